"""doctor: what can be built and run, with the remedy for each thing missing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from runtime import doctor
from runtime.libraries import BACKENDS, BUILD_PACKAGES, BackendInfo

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


def test_facts_have_stable_keys() -> None:
    facts = json.loads(json.dumps(doctor.examine()))
    assert sorted(facts) == ["backends", "cpu", "gpus", "memory", "packages", "platform", "python", "version"]
    assert sorted(facts["backends"]) == ["ort-cpu", "ort-cuda", "tensorrt", "tensorrt-rtx"]
    assert sorted(facts["backends"]["ort-cpu"]) == ["can_build", "can_run", "missing", "remedy"]
    assert sorted(facts["cpu"]) == ["architecture", "cores", "features", "model", "usable"]
    assert facts["python"]["ok"] is True


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
