"""What a wheel must do beside numpy alone, and with torch where that is: run by build_wheels.py."""

import sys
from importlib.metadata import version
from importlib.util import find_spec

import agl_fast
import agl_fast.reference

assert agl_fast.__version__ == version("agl-fast")
assert agl_fast.parse_token_ids("[1, 2, 3]").tolist() == [1, 2, 3]

call = agl_fast.Call([1, 2], [3, 4], log_probs=[-0.5, -0.25], reward=1.0)
rollout = agl_fast.Rollout("rollout-0", "data-0", [call])
assert rollout.calls[0].response_ids == [3, 4]

assert "torch" not in sys.modules
beside = "numpy"
if find_spec("torch") is not None:
    ids, mask = agl_fast.pad_left([[1, 2, 3], [4]], 2, pad_token_id=9)
    assert (ids.tolist(), mask.tolist()) == ([[2, 3], [9, 4]], [[1, 1], [0, 1]])
    batch = agl_fast.build_batch(
        [rollout], max_prompt_length=3, max_response_length=3, pad_token_id=0
    )
    assert batch.tensors["responses"].tolist() == [[3, 4, 0]]
    beside = "numpy and torch"
print(f"agl_fast {agl_fast.__version__} works on Python {sys.version.split()[0]} with {beside}")
