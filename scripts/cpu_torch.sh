#!/usr/bin/env bash
# cpu_torch.sh VENV: the options with which uv finds the CPU build of torch.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
options=()

# uv reads none of pip's settings, and pip may know where wheels lie that PyPI does not have.
links=${PIP_FIND_LINKS:-$("$venv/bin/python" -m pip config get global.find-links 2>/dev/null || true)}
for link in $links; do
  options+=(--find-links "$link")
done

# CPU builds of torch are not on PyPI: where nothing configured has one, ask PyTorch's own index.
torch=$(grep '^torch==' python/agl_fast/install/overrides-cpu.txt)
if ! "$venv/bin/uv" pip install --python "$venv/bin/python" "${options[@]}" --quiet --dry-run \
  --no-deps --reinstall-package torch "$torch" 2>/dev/null; then
  options+=(--torch-backend cpu)
fi
echo "${options[@]}"
