"""doctor: what can be built and run, with the remedy for each thing missing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runtime import doctor
from runtime.libraries import BACKENDS, BUILD_PACKAGES, BackendInfo, Library
from runtime.machine import Driver

ALL = dict.fromkeys(("numpy", "tokenizers", "jinja2", "onnxruntime", *BUILD_PACKAGES), "1")
CPU = BACKENDS["ort-cpu"]


def test_everything_there() -> None:
    found = doctor.state(CPU, ALL, ())
    assert (found.can_build, found.can_run, found.missing, found.remedy) == (True, True, (), ())


def test_gpu_build_of_the_library_serves_the_cpu_too() -> None:
    packages = {**ALL, "onnxruntime": None, "onnxruntime-gpu": "1"}
    assert doctor.state(CPU, packages, ()).can_run


@pytest.mark.parametrize(
    ("absent", "can_build", "can_run", "remedy"),
    [
        ("onnxruntime", False, False, "pip install onnxruntime"),
        ("torch", False, True, "in the project's folder: pip install '.[build]'"),
        ("tokenizers", True, False, "in the project's folder: pip install ."),
    ],
)
def test_one_package_missing(absent: str, can_build: bool, can_run: bool, remedy: str) -> None:
    found = doctor.state(CPU, {**ALL, absent: None}, ())
    assert (found.can_build, found.can_run) == (can_build, can_run)
    assert found.missing == (absent,)
    assert found.remedy == (remedy,)


def test_gpu_architectures() -> None:
    info = BackendInfo(True, ("onnxruntime",), ("sm_90",))
    old, new = doctor.Gpu("old", "sm_70", 1), doctor.Gpu("new", "sm_90", 1)
    assert doctor.state(info, ALL, (old,)).can_build  # building needs no GPU here
    assert not doctor.state(info, ALL, (old,)).can_run
    assert doctor.state(info, ALL, (old,)).missing == ("a GPU of sm_90",)
    assert doctor.state(info, ALL, (old, new)).can_run
    assert not doctor.state(BackendInfo(True, ("onnxruntime",), ("sm_90",), build_gpu=True), ALL, ()).can_build


def test_a_back_end_of_a_later_version_is_said_to_be_one() -> None:
    found = doctor.state(BackendInfo(False, ("onnxruntime",)), ALL, ())
    assert (found.can_build, found.can_run, found.missing) == (False, False, ("not in this version",))


RTX, FULL = (replace(BACKENDS[name], supported=True) for name in ("tensorrt-rtx", "tensorrt"))
RTX_ALL = {
    **ALL,
    "tensorrt-rtx-cu13-bindings": "1.7.1.116",
    "tensorrt-rtx-cu13-libs": "1.7.1.116",
    "cuda-python": "13.0.1",
}
ADA = doctor.Gpu("Ada", "sm_89", 1)
NEW = Driver("580.65.06", (13, 0))


def test_rtx_builds_without_a_gpu_for_its_architectures() -> None:
    found = doctor.state(RTX, {**RTX_ALL, "cuda-python": None}, (), None, doctor.buildable("tensorrt-rtx"))
    assert (found.can_build, found.can_run) == (True, False)
    assert found.builds_for == ("sm_75", "sm_80", "sm_86", "sm_89", "sm_120", "sm_121")
    assert found.library == Library("1.7.1.116", "1.7.1.116")
    assert found.missing == ("a GPU of sm_75, sm_80, sm_86, sm_89, sm_120, sm_121", "cuda-python")
    assert found.remedy[1] == "pip install cuda-python"


def test_rtx_runs_with_gpu_driver_and_cuda_bindings() -> None:
    for name in ("cuda-python", "cuda-bindings"):
        packages = {**RTX_ALL, "cuda-python": None, name: "13.0.1"}
        found = doctor.state(RTX, packages, (ADA, doctor.Gpu("Hopper", "sm_90", 1)), NEW, ("sm_89",))
        assert (found.can_run, found.missing, found.runs_on) == (True, (), ("sm_89",))


@pytest.mark.parametrize(
    ("system", "missing"),
    [
        (Driver("570.86.15", (12, 8)), ("driver 580 or later, this is driver 570.86.15 (CUDA 12.8)",)),
        (Driver("570.86.15", None), ("driver 580 or later, this is driver 570.86.15 (an unknown CUDA)",)),
        (Driver("570.86.15", (13, 0)), ()),  # a compatibility package
        (None, ()),
    ],
)
def test_a_driver_too_old(system: Driver | None, missing: tuple[str, ...]) -> None:
    found = doctor.state(RTX, RTX_ALL, (ADA,), system, ("sm_89",))
    assert found.missing == missing
    assert (found.can_build, found.can_run) == (True, not missing)


def test_each_half_of_rtx_is_asked_for() -> None:
    found = doctor.state(RTX, {**ALL, "cuda-python": "13"}, (ADA,), NEW)
    assert found.missing == ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs")
    found = doctor.state(RTX, {**RTX_ALL, "tensorrt-rtx-cu13-libs": None}, (ADA,), NEW)
    assert (found.can_build, found.can_run, found.missing) == (False, False, ("tensorrt-rtx-cu13-libs",))
    assert found.remedy == ("pip install tensorrt-rtx-cu13-libs==1.7.1.116",)
    assert found.builds_for == found.runs_on == ()


def test_full_tensorrt_says_which_package_brings_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.libraries._LIBRARY_FOLDERS", ())
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    none = {**ALL, "cuda-python": "13"}
    found = doctor.state(FULL, none, (ADA,), NEW)
    assert (found.missing, found.remedy) == (("tensorrt",), ("pip install tensorrt",))
    found = doctor.state(FULL, {**none, "tensorrt-cu13-bindings": "11.4.0.106"}, (ADA,), NEW)
    assert (found.missing, found.remedy) == (
        ("tensorrt-cu13-libs",),
        ("pip install tensorrt-cu13-libs==11.4.0.106",),
    )
    both = {**none, "tensorrt": "11.4.0.106", "tensorrt-cu13-libs": "11.4.0.106"}
    found = doctor.state(FULL, both, (ADA,), NEW, doctor.buildable("tensorrt"))
    assert (found.can_build, found.can_run, found.builds_for) == (True, True, ("sm_89",))
    assert not doctor.state(FULL, both, (), None).can_build


def test_kernels_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSPARK_PLUGINS", raising=False)
    assert doctor.kernels() == {"onnxruntime": None, "tensorrt": None}
    library = tmp_path / "libdspark_kernels.so"
    library.write_bytes(b"")
    for named in (tmp_path, library):
        monkeypatch.setenv("DSPARK_PLUGINS", str(named))
        assert doctor.kernels() == {"onnxruntime": None, "tensorrt": str(library)}
        assert doctor.examine()["plugins"] == {
            "variable": "DSPARK_PLUGINS",
            "value": str(named),
            "onnxruntime": None,
            "tensorrt": str(library),
        }


def test_facts_have_stable_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda: (doctor.Gpu("Ada", "sm_89", 24 << 30, 20 << 30),))
    monkeypatch.setattr(doctor, "driver", lambda: NEW)
    facts = json.loads(json.dumps(doctor.examine()))
    assert " ".join(sorted(facts)) == "backends cpu driver gpus memory packages platform plugins python version"
    assert sorted(facts["backends"]) == ["ort-cpu", "ort-cuda", "tensorrt", "tensorrt-rtx"]
    for found in facts["backends"].values():
        assert sorted(found) == ["builds_for", "can_build", "can_run", "library", "missing", "remedy", "runs_on"]
        assert sorted(found["library"]) == ["bindings", "native"]
    assert sorted(facts["cpu"]) == ["architecture", "cores", "features", "model", "usable"]
    assert facts["driver"] == {"version": "580.65.06", "cuda": "13.0"}
    assert facts["gpus"] == [
        {
            "name": "Ada",
            "architecture": "sm_89",
            "compute_capability": "8.9",
            "memory": 24 << 30,
            "free": 20 << 30,
        }
    ]
    assert facts["python"]["ok"] is True


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda: ())
    monkeypatch.setattr(doctor, "driver", lambda: None)
    facts = doctor.examine()
    assert (facts["driver"], facts["gpus"]) == (None, [])
    assert "driver    none" in doctor.describe()


def test_text_names_each_back_end() -> None:
    lines = doctor.describe()
    for name in BACKENDS:
        assert sum(line.startswith(f"{name} ") for line in lines) == 1


def test_runs_as_a_module_without_torch_or_click() -> None:
    code = "import sys, runtime.__main__ as m; m.main(['doctor', '--json']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ort-cpu" in json.loads(done.stdout)["backends"]
    loaded = set(done.stderr.split())
    assert not loaded & {"torch", "onnx", "click", "rich", "builder", "onnxruntime"}
