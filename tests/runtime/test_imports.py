"""What importing costs: nothing heavy with the package, no optional package for `doctor`, never torch.

Each check runs in an interpreter of its own, since this one has everything loaded already.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import runtime

ROOT = Path(__file__).resolve().parents[2]
HEAVY = "{'torch', 'onnx', 'onnxruntime', 'transformers', 'numpy', 'tokenizers', 'jinja2', 'builder'}"
# Stands before the code of a check: these packages can't be imported there, and have no metadata.
WITHOUT = """
import importlib.metadata, sys
class Absent:
    names = {"numpy", "onnxruntime", "tokenizers", "jinja2"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
known = importlib.metadata.version
def version(name):
    if name in Absent.names:
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)
importlib.metadata.version = version
"""


def python(code: str, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == expect, done.stderr
    return done


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert python(f"import sys, runtime; print(sorted({HEAVY} & set(sys.modules)))").stdout.strip() == "[]"


@pytest.mark.parametrize(
    "module", ["verify", "sampling", "distribution", "slots", "scheduler", "policy", "request", "result", "stats"]
)
def test_modules_without_a_model_load_only_numpy(module: str) -> None:
    out = python(f"import sys, runtime.{module}; print(sorted({HEAVY} - {{'numpy'}} & set(sys.modules)))").stdout
    assert out.strip() == "[]"


def test_text_loads_only_tokenizers() -> None:
    assert python(f"import sys, runtime.text; print(sorted({HEAVY} & set(sys.modules)))").stdout == "['tokenizers']\n"


def test_every_public_name_is_reachable_and_listed() -> None:
    assert sorted(runtime.__all__) == runtime.__all__
    for name in runtime.__all__:
        assert getattr(runtime, name).__name__ == name
    assert set(runtime.__all__) <= set(dir(runtime))
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        runtime.generat  # noqa: B018


def test_a_star_import_brings_the_public_names() -> None:
    assert (
        python("from runtime import *; print(generate.__name__, AsyncEngine.__name__)").stdout
        == "generate AsyncEngine\n"
    )


def test_errors_need_no_package() -> None:
    code = (
        WITHOUT + "import runtime; print(runtime.RequestError('a', 'b'), issubclass(runtime.BundleError, ValueError))"
    )
    assert python(code).stdout == "a: b True\n"


def test_doctor_runs_without_the_packages_and_names_them() -> None:
    code = WITHOUT + "from runtime.__main__ import main; raise SystemExit(main(sys.argv[1:]))"
    text = python(code, "doctor").stdout
    for name in ("numpy", "onnxruntime", "tokenizers", "jinja2"):
        assert re.search(f"missing {name}: .*pip install", text)
    facts = json.loads(python(code, "doctor", "--json").stdout)
    assert facts["packages"]["numpy"] is None
    assert not facts["backends"]["ort-cpu"]["can_run"]
    assert "numpy" in facts["backends"]["ort-cpu"]["missing"]


def test_a_missing_package_is_one_line(tmp_path: Path) -> None:
    code = WITHOUT + "from runtime.__main__ import main; raise SystemExit(main(sys.argv[1:]))"
    error = python(code, "validate", str(tmp_path), expect=1).stderr
    assert error.startswith("error: numpy is not installed. In the project's folder: pip install")
    assert error.count("\n") == 1


def test_generating_never_loads_torch(tiny_bundle: Callable[..., Path]) -> None:
    code = """
import sys, runtime
(result,) = runtime.generate(sys.argv[1], [[3, 4, 5]], max_new_tokens=4, ignore_eos=True)
print(len(result.token_ids), sorted({"torch", "onnx", "builder", "transformers"} & set(sys.modules)))
"""
    assert python(code, str(tiny_bundle("llama"))).stdout == "4 []\n"
