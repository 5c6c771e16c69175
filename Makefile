# Every target sets up what it needs on a machine that has Python 3.10-3.12 and a C++ compiler.
# Stamps in the virtual environment make a second run cheap: the packages are looked at again when
# pyproject.toml, the lock file or python/agl_fast/install/ change, the native code is built again
# when csrc/ or CMake do.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
# The Python of .venv; empty: the first supported one on PATH.
BASE_PYTHON ?=
PYTHON := $(VENV)/bin/python
UV := $(VENV)/bin/uv

# AUTO builds the CUDA kernels where nvcc is found; ON insists; OFF leaves them out.
export AGL_CUDA ?= AUTO
# Warnings are errors in CI only: a newer compiler than ours must not stop a user.
export AGL_WERROR ?= $(if $(CI),ON,OFF)
# Ray starts many processes that import the same packages: compiled once, not every time.
unexport PYTHONDONTWRITEBYTECODE
# Without it `import agentlightning` looks for a price list on the internet, and waits.
export LITELLM_LOCAL_MODEL_COST_MAP := True

# The places where CMake looks, too: nvcc is often off PATH.
NVCC := $(firstword $(CUDACXX) $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
NATIVE_MODULES := agl_fast._core $(if $(NVCC),$(if $(filter OFF,$(AGL_CUDA)),,agl_fast._cuda))

CPP_FILES := $(sort $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh'))
PYTHON_PATHS := python tests benchmarks examples scripts docs/conf.py
# Sources that are compiled without CUDA.
TIDY_FILES := $(filter-out csrc/bindings/cuda_module.cpp,$(filter %.cpp,$(CPP_FILES)))
NATIVE_SOURCES := CMakeLists.txt $(wildcard cmake/*.cmake) $(CPP_FILES)

# A file's tests stay together: they share what is expensive to start. The folders keep their order,
# so that the whole runs of tests/e2e are not what the other process waits for at the end.
TWO_PROCESSES := -n 2 --dist loadfile --no-loadscope-reorder

STAMPS := $(VENV)/.stamps
TOOLS := $(STAMPS)/uv
PACKAGES := $(STAMPS)/packages
NATIVE := $(STAMPS)/native-cuda-$(AGL_CUDA)-werror-$(AGL_WERROR)
SANITIZED := build/sanitized/_core.stamp
# An environment of its own: Sphinx reads the sources and imports nothing of ours.
DOCS_VENV := $(VENV)-docs
DOCS_TOOLS := $(DOCS_VENV)/.stamps/packages
# An environment without verl. Its Python may be one that verl does not support.
CORE_VENV := $(VENV)-core
CORE_PYTHON ?= $(PYTHON)

.PHONY: help setup quickstart bench test test-all fast-tests slow-tests core-tests coverage
.PHONY: lint generate format tidy sanitize docs wheel dist lock resolve version clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

setup: $(NATIVE) ## create .venv with the proven CPU packages and agl_fast, editable

quickstart: $(NATIVE) ## train an agent that uses a tool, on the CPU, in a few minutes
	$(PYTHON) -m agl_fast.quickstart

bench: $(NATIVE) ## measure, print the table, write benchmarks/results/
	$(PYTHON) -m benchmarks

test: lint docs sanitize fast-tests ## lint, docs, CUDA compile (where nvcc is), sanitizers, tests

test-all: lint docs sanitize wheel fast-tests slow-tests ## test, the slow tests, wheels

fast-tests: $(NATIVE) ## the tests that are not slow
	$(PYTHON) -m pytest -m "not slow" $(TWO_PROCESSES)

slow-tests: $(NATIVE) ## the slow tests
	$(PYTHON) -m pytest -m slow

core-tests: $(TOOLS) ## the fast tests without verl, also on Python 3.13 (CORE_PYTHON=python3.13)
	scripts/install_core.sh $(VENV) $(CORE_VENV) $(CORE_PYTHON)
	$(CORE_VENV)/bin/python -m pytest -m "not slow" $(TWO_PROCESSES)

coverage: $(NATIVE) ## lines and branches covered by the fast tests; build/coverage.xml
	$(PYTHON) -m pytest -m "not slow" $(TWO_PROCESSES) \
		--cov --cov-report=term --cov-report=xml:build/coverage.xml

lint: $(NATIVE) ## ruff, clang-format, mypy --strict, stubtest
	$(PYTHON) -m ruff check $(wildcard $(PYTHON_PATHS))
	$(PYTHON) -m ruff format --check $(wildcard $(PYTHON_PATHS))
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy docs/conf.py
	MYPYPATH=python $(PYTHON) -m mypy.stubtest --mypy-config-file pyproject.toml $(NATIVE_MODULES)

generate: $(NATIVE) ## config.yaml and the tables of docs/configuration.md, from verl/config/schema.py
	$(PYTHON) scripts/generate_config.py

format: $(NATIVE) ## rewrite Python and C++ sources in the project's style
	$(PYTHON) -m ruff check --fix $(wildcard $(PYTHON_PATHS))
	$(PYTHON) -m ruff format $(wildcard $(PYTHON_PATHS))
	$(VENV)/bin/clang-format -i $(CPP_FILES)

tidy: $(SANITIZED) ## clang-tidy over the host code
	printf '%s\n' $(TIDY_FILES) | xargs -n 1 -P 2 $(VENV)/bin/clang-tidy --quiet -p build/sanitized

sanitize: $(SANITIZED) ## the native tests under the address and undefined-behaviour sanitizers
	scripts/test_sanitized.sh $(PYTHON) build/sanitized

wheel: $(TOOLS) ## manylinux wheels for every CPython 3.10-3.13 found here, into dist/ (WHEEL_CUDA=ON: with CUDA)
	$(PYTHON) scripts/build_wheels.py --uv $(UV) --cuda $(or $(WHEEL_CUDA),OFF) --out dist

dist: $(TOOLS) ## like wheel, for a release: fails if one of Python 3.10-3.13 is missing
	$(PYTHON) scripts/build_wheels.py --uv $(UV) --all --out dist

lock: $(TOOLS) ## update requirements-cpu.lock (UPGRADE=--upgrade: upgrade all packages)
	scripts/lock_packages.sh $(VENV) $(UPGRADE)

resolve: $(NATIVE) ## check that the CPU and CUDA package sets resolve; needs a network
	$(PYTHON) -m pytest -m slow tests/repo/test_cuda_set.py tests/repo/test_lock.py

version: ## print the version
	@sed -nE 's/^version = "(.*)".*/\1/p' pyproject.toml

docs: $(DOCS_TOOLS) ## the documentation, into build/docs/index.html
	$(DOCS_VENV)/bin/sphinx-build --fail-on-warning --keep-going --fresh-env --quiet docs build/docs

clean: ## remove what was built; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	rm -f $(STAMPS)/native-*

$(TOOLS):
	scripts/create_venv.sh $(VENV) $(BASE_PYTHON)
	mkdir -p $(@D) && touch $@

$(PACKAGES): $(TOOLS) pyproject.toml requirements-cpu.lock $(wildcard $(addprefix python/agl_fast/install/,*.txt */*.toml))
	scripts/install_packages.sh $(VENV)
	touch $@

$(DOCS_TOOLS): $(TOOLS) pyproject.toml
	$(UV) venv --quiet --clear --python $(PYTHON) $(DOCS_VENV)
	$(UV) pip install --quiet --python $(DOCS_VENV)/bin/python --group docs
	mkdir -p $(@D) && touch $@

# Without build isolation: the build folder is kept, and would point into a deleted environment.
$(NATIVE): $(PACKAGES) $(NATIVE_SOURCES)
	rm -f $(STAMPS)/native-*
	$(UV) pip install --python $(PYTHON) --no-deps --no-build-isolation --reinstall-package agl-fast -e .
	touch $@

$(SANITIZED): $(NATIVE)
	scripts/build_sanitized.sh $(VENV) build/sanitized
	touch $@
