"""The one place of the project's name and version (pyproject.toml reads them from here)."""

DISTRIBUTION = "dspark-engine-builder"
VERSION = "0.1.0"
