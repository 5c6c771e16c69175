"""PPO batches from agents' calls in one native pass, and a VERL algorithm that trains on them."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from agl_fast._moved import keep_old_paths

# Importing agentlightning imports litellm, which would download a price list and wait for it.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

if TYPE_CHECKING:
    from agl_fast import reference
    from agl_fast.algorithm import VERL
    from agl_fast.ops.pad import (
        get_left_padded_ids_and_attention_mask,
        get_right_padded_ids_and_attention_mask,
        pad_left,
        pad_right,
    )
    from agl_fast.ops.parse import parse_token_ids
    from agl_fast.proxy import LLMProxy
    from agl_fast.rollouts import AgentModeDaemon
    from agl_fast.rows.accounting import (
        Accounting,
        EmptyBatchError,
        Mismatch,
        RolloutEntry,
    )
    from agl_fast.rows.batch import Batch
    from agl_fast.rows.builder import BatchBuilder, build_batch
    from agl_fast.rows.calls import Call, Rollout
    from agl_fast.runner import ConcurrentRunner, RolloutTracer
    from agl_fast.tools.dry_run import dry_run
    from agl_fast.training import AgentLightningTrainer

    __version__: str

__all__ = [
    "VERL",
    "Accounting",
    "AgentLightningTrainer",
    "AgentModeDaemon",
    "Batch",
    "BatchBuilder",
    "Call",
    "ConcurrentRunner",
    "EmptyBatchError",
    "LLMProxy",
    "Mismatch",
    "Rollout",
    "RolloutEntry",
    "RolloutTracer",
    "__version__",
    "build_batch",
    "dry_run",
    "get_left_padded_ids_and_attention_mask",
    "get_right_padded_ids_and_attention_mask",
    "pad_left",
    "pad_right",
    "parse_token_ids",
    "reference",
]

keep_old_paths()

# Loaded on first use: importing agl_fast loads neither numpy nor torch.
_HOMES = {
    "AgentLightningTrainer": "agl_fast.training",
    "AgentModeDaemon": "agl_fast.rollouts",
    "LLMProxy": "agl_fast.proxy",
    "VERL": "agl_fast.algorithm",
    "Accounting": "agl_fast.rows.accounting",
    "Batch": "agl_fast.rows.batch",
    "BatchBuilder": "agl_fast.rows.builder",
    "Call": "agl_fast.rows.calls",
    "ConcurrentRunner": "agl_fast.runner",
    "EmptyBatchError": "agl_fast.rows.accounting",
    "Mismatch": "agl_fast.rows.accounting",
    "Rollout": "agl_fast.rows.calls",
    "RolloutEntry": "agl_fast.rows.accounting",
    "RolloutTracer": "agl_fast.runner",
    "build_batch": "agl_fast.rows.builder",
    "dry_run": "agl_fast.tools.dry_run",
    "get_left_padded_ids_and_attention_mask": "agl_fast.ops.pad",
    "get_right_padded_ids_and_attention_mask": "agl_fast.ops.pad",
    "pad_left": "agl_fast.ops.pad",
    "pad_right": "agl_fast.ops.pad",
    "parse_token_ids": "agl_fast.ops.parse",
}


def __getattr__(name: str) -> Any:
    if name == "reference":
        return import_module("agl_fast.reference")
    if name == "__version__":
        from importlib.metadata import version

        return version("agl-fast")
    if name not in _HOMES:
        raise AttributeError(f"module 'agl_fast' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
