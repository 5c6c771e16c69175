#!/usr/bin/env bash
# install_packages.sh VENV: what agl_fast needs to train on a CPU and to be developed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
overrides=python/agl_fast/install/overrides-cpu.txt
install=("$venv/bin/uv" pip install --python "$venv/bin/python")

# uv reads none of pip's settings, and pip may know where wheels lie that PyPI does not have.
links=${PIP_FIND_LINKS:-$("$venv/bin/python" -m pip config get global.find-links 2>/dev/null || true)}
for link in $links; do
  install+=(--find-links "$link")
done

# CPU builds of torch are not on PyPI: where nothing configured has one, ask PyTorch's own index.
torch=$(grep '^torch==' "$overrides")
if ! "${install[@]}" --quiet --dry-run --no-deps --reinstall-package torch "$torch" 2>/dev/null; then
  install+=(--torch-backend cpu)
fi

"${install[@]}" --override "$overrides" -r pyproject.toml --extra cpu --extra dev --extra examples \
  ./python/agl_fast/install/vllm-metadata
