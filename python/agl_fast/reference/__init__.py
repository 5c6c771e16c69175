"""Plain-Python reference implementation of docs/rows.md and of every kernel.

Deliberately slow and simple; the native code is tested against it. It checks the options and the
errors that the specification defines, and trusts its input otherwise.
"""

from agl_fast.reference.build import Batch, build_batch
from agl_fast.reference.pad import (
    get_left_padded_ids_and_attention_mask,
    get_right_padded_ids_and_attention_mask,
    pad_left,
    pad_right,
)
from agl_fast.reference.parse import parse_token_ids

__all__ = [
    "Batch",
    "build_batch",
    "get_left_padded_ids_and_attention_mask",
    "get_right_padded_ids_and_attention_mask",
    "pad_left",
    "pad_right",
    "parse_token_ids",
]
