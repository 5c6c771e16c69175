#!/usr/bin/env bash
# test_sanitized.sh PYTHON FOLDER: the native tests over the sanitized _core in FOLDER.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
folder=$2

# The sanitizer's runtime must be the first library of the process, and it looks for the C++
# runtime's throw at the start, when a Python interpreter has not loaded any.
library() {
  local path
  path=$("${CXX:-c++}" -print-file-name="$1")
  if [[ $path != /* ]]; then
    echo "test_sanitized.sh: ${CXX:-c++} has no $1; set CXX to a g++ that has" >&2
    return 1
  fi
  echo "$path"
}
address=$(library libasan.so)
cxx=$(library libstdc++.so)

# Python never frees all it holds at exit, so leaks are not looked for. Its own allocator would
# hide overflows inside its arenas, hence malloc.
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1
export UBSAN_OPTIONS=print_stacktrace=1
export PYTHONMALLOC=malloc
export AGL_SANITIZED_CORE=$folder
export PYTHONPATH=tests/native
# What reaches native code and imports nothing of verl, less the widest traces, which take long.
# Reports are written below Python, hence capture=sys.
tests=(
  tests/core/test_expand.py
  tests/core/test_expand_rows.py
  tests/core/test_json_spans.py
  tests/core/test_pad.py
  tests/core/test_parse.py
  tests/core/test_property_native.py
  tests/rows/test_bad_input.py
  tests/rows/test_conformance.py
  tests/rows/test_property_add_call.py
  tests/rows/test_traces.py
  tests/tree/test_tree_conformance.py
  tests/tree/test_tree_traces.py
)
LD_PRELOAD="$address $cxx" "$python" -m pytest -p sanitized_core --hypothesis-profile sanitized \
  -p no:cacheprovider --capture=sys -m "not slow and not gpu" -k "not P8192" "${tests[@]}"
