"""verl's correction for what the servers sampled with another probability than the actor's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

from agl_fast.training.trained_tokens import (
    Sequences,
    TrainedTokens,
    call_numbers,
    on_trained,
)

Tensors = dict[str, torch.Tensor]

_OPTIONS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
)


def require_supported(algorithm: Any) -> None:
    """Raise ValueError for a correction that cannot be computed.

    Args:
        algorithm: verl's `algorithm` group of the configuration.
    """
    correction = algorithm.get("rollout_correction") or {}
    if not correction.get("bypass_mode"):
        return
    key = "algorithm.rollout_correction"
    if correction.get("loss_type", "ppo_clip") != "ppo_clip":
        raise ValueError(
            f"{key}.loss_type={correction['loss_type']!r} with {key}.bypass_mode=true: expected "
            "'ppo_clip'; with actor.policy_loss.loss_mode=cispo the ratio weighs log-probs, too"
        )
    if correction.get("rollout_rs") is not None:
        raise ValueError(
            f"{key}.rollout_rs={correction['rollout_rs']!r} with {key}.bypass_mode=true: expected "
            "null, as rejection compares with the actor's log-probs, which bypass_mode leaves out"
        )


def bypasses(
    tensors: Mapping[str, torch.Tensor], columns: Mapping[str, NDArray[Any]], config: Any
) -> bool:
    """Whether the servers' log-probs stand for the actor's: `bypass_mode`, and none is missing."""
    correction = config.algorithm.get("rollout_correction") or {}
    if not correction.get("bypass_mode") or "rollout_log_probs" not in tensors:
        return False
    by_call = _calls(tensors, columns, needed=False)
    return _drops(config) or bool(_known(by_call, tensors).all())


def correct(
    tensors: Mapping[str, torch.Tensor], columns: Mapping[str, NDArray[Any]], config: Any
) -> tuple[Tensors, dict[str, float]]:
    """Weights and rejections (`algorithm.rollout_correction`). A sequence is a call.

    Calls without log-probs (`agentlightning.missing_rollout_log_probs`): recompute: they count as
    sampled by the actor; drop: they are not trained. With `bypass_mode` the servers' log-probs take
    the place of the actor's, so that the loss's ratio is the correction.

    Args:
        tensors: (B, R) response_mask, old_log_probs, rollout_log_probs if any call has some, and
            call_index where a row may hold several calls and they are weighed or rejected whole.

    Returns:
        What changes: response_mask, rollout_log_probs, old_log_probs, rollout_is_weights, (B, R)
        each; and `rollout_corr/*`.

    Raises:
        ValueError: the batch does not say which call sampled a token, or no call is left.
    """
    correction = config.algorithm.get("rollout_correction") or {}
    drops = _drops(config)
    given = tensors.get("rollout_log_probs")
    if given is None and not drops:
        return {}, {}
    by_call = _calls(tensors, columns, needed=_looks_at_calls(correction))
    known = _known(by_call, tensors)
    if given is None or (drops and not known.any()):
        raise ValueError(
            "no call of this step has log-probs, so that "
            "agentlightning.missing_rollout_log_probs='drop' leaves nothing to train"
        )
    response_mask = tensors["response_mask"]
    metrics = {"training/n_calls_without_log_probs": float((~known).sum())}
    known_tokens = by_call.scatter(known[:, None].expand(by_call.shape), response_mask)
    if drops:
        response_mask = known_tokens
    else:
        given = torch.where(known_tokens.bool(), given, tensors["old_log_probs"])
    given = on_trained(given, response_mask)
    changed = {"response_mask": response_mask, "rollout_log_probs": given}
    if correction.get("bypass_mode"):
        return changed | {"old_log_probs": given}, metrics
    if not correction:
        return changed, metrics

    weights, kept, found = compute_rollout_correction_and_rejection_mask(
        old_log_prob=by_call.gather(tensors["old_log_probs"]),
        rollout_log_prob=by_call.gather(given),
        response_mask=by_call.gather(response_mask),
        **{name: correction[name] for name in _OPTIONS if name in correction},
    )
    changed["response_mask"] = by_call.scatter(kept, response_mask)
    if weights is not None:
        changed["rollout_is_weights"] = by_call.scatter(weights.batch["rollout_is_weights"], given)
    return changed, metrics | found


def _calls(
    tensors: Mapping[str, torch.Tensor], columns: Mapping[str, NDArray[Any]], *, needed: bool
) -> Sequences:
    """Where the batch does not tell calls apart and nothing depends on it: rows."""
    n_rows = len(tensors["response_mask"])
    tells_calls = "call_index" in tensors or "turn_index_list" in columns
    of_row = (columns["rollout_id_list"] if tells_calls or needed else np.arange(n_rows)).tolist()
    numbers = (
        call_numbers(tensors, columns)
        if tells_calls or needed
        else torch.zeros_like(tensors["response_mask"])
    )
    tokens = TrainedTokens.of(
        tensors["response_mask"], numbers, of_row, list(dict.fromkeys(of_row))
    )
    return tokens.by_call()[0]


def _known(by_call: Sequences, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """(calls,) bool: which have log-probs. One that is certain of every token looks as if not."""
    given = tensors.get("rollout_log_probs")
    if given is None:
        return torch.zeros(by_call.shape[0], dtype=torch.bool)
    return by_call.gather(given).ne(0).any(dim=1)


def _drops(config: Any) -> bool:
    return bool(config.get("agentlightning", {}).get("missing_rollout_log_probs") == "drop")


def _looks_at_calls(correction: Any) -> bool:
    rejects_by = str(correction.get("rollout_rs") or "")
    return correction.get("rollout_is") == "sequence" or "seq_" in rejects_by
