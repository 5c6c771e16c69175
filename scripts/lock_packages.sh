#!/usr/bin/env bash
# lock_packages.sh VENV [--upgrade]: write requirements-cpu.lock, for every Python that verl
# supports. Pins that still fit are kept; --upgrade upgrades them.
#
# Not `uv lock`: it has one list of overrides for a project, and those for CPUs and GPUs differ.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
upgrade=${2:-}

# torch is left out: PyPI has no CPU build, and other indexes have not one for every Python.
# overrides-cpu.txt pins it; these are the packages that its CPU build needs.
torch_needs=(filelock fsspec jinja2 networkx setuptools sympy typing-extensions)
overrides=$(mktemp)
trap 'rm "$overrides"' EXIT
sed 's/^torch==.*/torch ; python_version < "3"/' python/agl_fast/install/overrides-cpu.txt \
  >"$overrides"
printf '%s\n' "${torch_needs[@]}" |
  "$venv/bin/uv" pip compile --quiet --universal --python-version 3.10 $upgrade \
    --custom-compile-command "make lock" --no-annotate --no-emit-package vllm \
    --override "$overrides" --extra cpu --extra dev --extra examples \
    --output-file requirements-cpu.lock \
    pyproject.toml python/agl_fast/install/vllm-metadata/pyproject.toml -
