"""What a wheel must do where only numpy is installed: run by build_wheels.py, once a wheel."""

import sys
from importlib.metadata import version

import agl_fast
import agl_fast.reference

assert agl_fast.__version__ == version("agl-fast")
assert agl_fast.parse_token_ids("[1, 2, 3]").tolist() == [1, 2, 3]

call = agl_fast.Call([1, 2], [3, 4], log_probs=[-0.5, -0.25], reward=1.0)
rollout = agl_fast.Rollout("rollout-0", "data-0", [call])
assert rollout.calls[0].response_ids == [3, 4]

assert "torch" not in sys.modules
print(f"agl_fast {agl_fast.__version__} works on Python {sys.version.split()[0]}")
