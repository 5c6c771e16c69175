#!/usr/bin/env bash
# build_sanitized.sh VENV FOLDER: _core with the address and undefined-behaviour sanitizers.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/$1
folder=$2

"$venv/bin/cmake" -S . -B "$folder" -G Ninja \
  -DCMAKE_MAKE_PROGRAM="$venv/bin/ninja" \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DPython_EXECUTABLE="$venv/bin/python" \
  -Dpybind11_DIR="$("$venv/bin/python" -m pybind11 --cmakedir)" \
  -DAGL_SANITIZE=ON -DAGL_CUDA=OFF -DAGL_WERROR="${AGL_WERROR:-OFF}"
"$venv/bin/cmake" --build "$folder"
