#!/usr/bin/env bash
# create_venv.sh VENV [PYTHON]: a virtual environment of this Python, or of the first supported one
# on PATH, with uv in it. An environment that is there is kept.
set -euo pipefail
venv=$1
candidates=(python3.11 python3 python3.12 python3.10)
[[ -z ${2:-} ]] || candidates=("$2")

# verl 0.9 ends at Python 3.12. A name on PATH may be a shim of a version that is switched off, so
# each candidate is run.
supported='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'
if [[ ! -x $venv/bin/python ]]; then
  for python in "${candidates[@]}" none; do
    "$python" -c "$supported" 2>/dev/null && break
  done
  if [[ $python == none ]]; then
    echo "create_venv.sh: expected Python 3.10, 3.11 or 3.12, tried ${candidates[*]}" >&2
    exit 1
  fi
  "$python" -m venv "$venv"
fi
[[ -x $venv/bin/uv ]] || "$venv/bin/python" -m pip install --quiet uv
