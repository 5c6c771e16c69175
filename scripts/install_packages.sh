#!/usr/bin/env bash
# install_packages.sh VENV: what agl_fast needs to train on a CPU and to be developed, in the
# versions that are locked.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1

found=$(scripts/cpu_torch.sh "$venv")
read -ra options <<<"$found"
"$venv/bin/uv" pip install --python "$venv/bin/python" "${options[@]}" \
  --override python/agl_fast/install/overrides-cpu.txt \
  --constraint requirements-cpu.lock \
  -r pyproject.toml --extra cpu --extra dev --extra examples \
  ./python/agl_fast/install/vllm-metadata
