"""What is installed of a library, from packages' metadata and files of the system."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.libraries import BACKENDS, Library, library, library_remedies, system_library

FULL = BACKENDS["tensorrt"]


def test_a_library_of_one_package_is_its_own_native_part() -> None:
    assert library(BACKENDS["ort-cpu"], {"onnxruntime-gpu": "1.32"}) == Library("1.32", "1.32")
    assert library(BACKENDS["ort-cpu"], {}) == Library(None, None)


def test_libraries_installed_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert system_library("libnvinfer.so", (tmp_path,)) is None
    (tmp_path / "libnvinfer_plugin.so.10").touch()
    assert system_library("libnvinfer.so", (tmp_path,)) is None
    (tmp_path / "libnvinfer.so.10").touch()
    assert system_library("libnvinfer.so", (tmp_path,)) == "unknown"
    (tmp_path / "libnvinfer.so.10.16.1").touch()
    assert system_library("libnvinfer.so", (tmp_path,)) == "10.16.1"
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    assert library(FULL, {"tensorrt": "10.16.1.11"}) == Library("10.16.1.11", "10.16.1")


def test_remedies_name_the_version_where_one_is_wanted() -> None:
    rtx = BACKENDS["tensorrt-rtx"]
    assert library_remedies(rtx, Library("1.7.1", "1.7.1"), "1.7.1") == []
    assert library_remedies(rtx, Library(None, None), "1.7.1") == [
        ("tensorrt-rtx-cu13-bindings", "pip install tensorrt-rtx-cu13-bindings==1.7.1"),
        ("tensorrt-rtx-cu13-libs", "pip install tensorrt-rtx-cu13-libs==1.7.1"),
    ]
    # The package that is named brings both halves.
    assert library_remedies(FULL, Library(None, None), "11.4") == [("tensorrt", "pip install tensorrt==11.4")]
