#!/usr/bin/env bash
# install_core.sh VENV CORE_VENV PYTHON: agl_fast and what its tests need, without verl, with the uv
# of VENV, into an environment CORE_VENV of this Python.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
core=$2
python=$3

"$venv/bin/uv" venv --quiet --clear --python "$python" "$core"
found=$(scripts/cpu_torch.sh "$venv")
read -ra options <<<"$found"
# A build folder of its own: that of the editable install stays as it is.
"$venv/bin/uv" pip install --python "$core/bin/python" "${options[@]}" \
  --override python/agl_fast/install/overrides-cpu.txt \
  --config-setting build-dir=build/core --reinstall-package agl-fast '.[test]'
