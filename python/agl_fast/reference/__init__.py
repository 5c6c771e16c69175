"""The plain-Python twin: what every kernel and the whole of ``docs/rows.md`` mean.

Slow and simple on purpose. It trusts its input, apart from the errors that the specification itself
defines; the native code is tested against it.
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
