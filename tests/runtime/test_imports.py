"""The model-free modules stay free of the heavy libraries."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["verify", "sampling", "slots", "scheduler", "text", "request"])
def test_no_heavy_library(module: str) -> None:
    code = f"""
import sys
import runtime.{module}
print(sorted({{"torch", "onnxruntime", "onnx", "transformers", "jinja2"}} & set(sys.modules)))
"""
    # Without the package's own __init__, which may load the engine: this is about the module and what it stands on.
    bare = "import sys, types; p = types.ModuleType('runtime'); p.__path__ = [PATH]; sys.modules['runtime'] = p"
    import runtime.errors

    path = str(runtime.errors.__file__).rsplit("errors.py", 1)[0]
    out = subprocess.run(
        [sys.executable, "-c", bare.replace("PATH", repr(path)) + code], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"
