#!/usr/bin/env bash
# test_sanitized.sh PYTHON FOLDER: the native tests over the sanitized _core in FOLDER.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
folder=$2

# The sanitizer's runtime must be the first library of the process, and Python does not bring it.
runtime=$("${CXX:-c++}" -print-file-name=libasan.so)
if [[ $runtime != /* ]]; then
  echo "test_sanitized.sh: ${CXX:-c++} has no libasan; set CXX to a g++ that has" >&2
  exit 1
fi

# Python never frees all it holds at exit, so leaks are not looked for. Its own allocator would
# hide overflows inside its arenas, hence malloc.
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1
export UBSAN_OPTIONS=print_stacktrace=1
export PYTHONMALLOC=malloc
export AGL_SANITIZED_CORE=$folder
export PYTHONPATH=tests/native
LD_PRELOAD=$runtime "$python" -m pytest -p sanitized_core --hypothesis-profile sanitized \
  -p no:cacheprovider -m "native and not slow"
