"""Where the golden vectors are: beside these tests, or in another directory of the same shape (``DSPARK_GOLDEN=DIR``)."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def golden() -> Path:
    return Path(os.environ.get("DSPARK_GOLDEN", Path(__file__).parent))
