# Every target makes and fills .venv itself, from the pins in requirements/. Needed: Python 3.11 or later, pip, make.

PYTHON ?= $(shell command -v python3.11 || command -v python3 || command -v python)
PY := .venv/bin/python
BUILD_READY := .venv/.build-ready
DEV_READY := .venv/.dev-ready

# The GPU targets take the Python of the machine with the card, which has torch for CUDA, onnxruntime-gpu and pytest.
GPU_PY ?= python3
# ONNX Runtime's headers, for the plugins (plugins/README.md).
ONNXRUNTIME_INCLUDE_DIR ?=

.PHONY: help demo target test fuzz lint format bench plugins test-gpu bench-gpu clean

help:
	@echo "make demo    build the demo pair and stream answers for three prompts"
	@echo "make test    ruff, mypy and pytest"
	@echo "make fuzz    a million random events over slots, rings and scheduler (FUZZ='--seed 7' and the like)"
	@echo "make lint    ruff and mypy only"
	@echo "make format  let ruff format and sort"
	@echo "make bench   measure the demo pair: JSON and PNG in build/bench; BENCH='--only concurrency' measures a part"
	@echo "make plugins ONNXRUNTIME_INCLUDE_DIR=DIR   compile the CUDA kernels into plugins/build"
	@echo "make test-gpu    the tests that need a CUDA card, with GPU_PY=python3"
	@echo "make bench-gpu   measure a CUDA card: JSON and PNG in build/bench_gpu; BENCH='--bundle DIR' for the real pair"
	@echo "make clean   remove .venv, caches and built bundles"

demo: $(BUILD_READY)
	$(PY) engines/demo.py

test: lint target
	$(PY) -m pytest

fuzz: $(DEV_READY)
	$(PY) -m tests.fuzz $(FUZZ)

# The demo's target (about 90 MB, fetched once), which the tests of the real pair need too.
target: $(BUILD_READY)
	$(PY) engines/demo.py --fetch

lint: $(DEV_READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(DEV_READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(DEV_READY) target
	$(PY) tests/bench/bench.py $(BENCH)

plugins:
	cmake -S plugins -B plugins/build -DONNXRUNTIME_INCLUDE_DIR="$(abspath $(ONNXRUNTIME_INCLUDE_DIR))"
	cmake --build plugins/build --parallel

test-gpu:
	$(GPU_PY) -m pytest tests/plugins tests/gpu

bench-gpu:
	$(GPU_PY) -m tests.bench_gpu.bench $(BENCH)

clean:
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis engines/build plugins/build *.egg-info

# Debian's Python has venv without ensurepip: the outer pip then fills the environment.
$(PY):
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or later is needed; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	"$(PYTHON)" -m venv .venv >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear --without-pip .venv
	@$(PY) -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m pip --python $(PY) install --quiet pip

$(BUILD_READY): requirements/build.txt pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements/build.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(DEV_READY): requirements/dev.txt $(BUILD_READY)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	@touch $@
