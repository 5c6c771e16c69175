"""verl's rollout correction: weights for the ratio between actor and servers, per call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import DictConfig
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

from agl_fast.training.step_rows import Rows
from agl_fast.training.trained_tokens import Sequences, TrainedTokens, on_trained

Tensors = dict[str, torch.Tensor]

_OPTIONS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
)


def require_supported(algorithm: DictConfig) -> None:
    """Raise ValueError for an unsupported rollout correction.

    Args:
        algorithm: verl's `algorithm` group of the configuration.
    """
    correction = algorithm.get("rollout_correction") or {}
    key = "algorithm.rollout_correction"
    _try_out(correction, key)
    if not correction.get("bypass_mode"):
        return
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


def _try_out(correction: Mapping[str, Any], key: str) -> None:
    """Correct a token that servers and actor give the same probability, as verl checks options only
    then."""
    given = {name: correction[name] for name in _OPTIONS if correction.get(name) is not None}
    named = ", ".join(f"{key}.{name}={value!r}" for name, value in given.items())
    same = torch.full((1, 1), -1.0)
    try:
        _, kept, _ = compute_rollout_correction_and_rejection_mask(
            old_log_prob=same, rollout_log_prob=same, response_mask=torch.ones(1, 1), **given
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{named}: expected what verl can compute: {error}") from error
    if not kept.all():
        raise ValueError(
            f"{named}: expected thresholds on both sides of ratio 1, as these reject every token, "
            "even if servers and actor agree"
        )


def bypasses(rows: Rows, config: DictConfig) -> bool:
    """Whether the servers' log-probs replace the actor's: `bypass_mode`, and none is missing."""
    correction = config.algorithm.get("rollout_correction") or {}
    if not correction.get("bypass_mode") or "rollout_log_probs" not in rows.tensors:
        return False
    return _drops(config) or bool(_known(_calls(rows, required=False), rows).all())


def correct(rows: Rows, config: DictConfig) -> tuple[Tensors, dict[str, float]]:
    """Importance weights and rejections (`algorithm.rollout_correction`). A sequence is a call.

    Calls without log-probs, by `agentlightning.missing_rollout_log_probs`: `recompute` assumes the
    actor's probabilities; `drop` does not train them. With `bypass_mode` the servers' log-probs
    replace the actor's, so that the loss's ratio is the correction.

    Args:
        rows: with old_log_probs; rollout_log_probs if any call has some; call_index if a row may
            hold several calls and whole calls are weighted or rejected.

    Returns:
        The changed tensors, (B, R) each: response_mask, rollout_log_probs, old_log_probs,
        rollout_is_weights; and metrics `rollout_corr/*`.

    Raises:
        ValueError: the batch does not record which call sampled a token, or no call is left.
    """
    correction = config.algorithm.get("rollout_correction") or {}
    drops = _drops(config)
    log_probs = rows.tensors.get("rollout_log_probs")
    if log_probs is None and not drops:
        return {}, {}
    by_call = _calls(rows, required=_depends_on_calls(correction))
    known = _known(by_call, rows)
    if log_probs is None or (drops and not known.any()):
        raise ValueError(
            "no call of this step has log-probs, so that "
            "agentlightning.missing_rollout_log_probs='drop' leaves nothing to train"
        )
    response_mask, old_log_probs = rows.response_mask, rows.tensors["old_log_probs"]
    metrics = {"training/n_calls_without_log_probs": float((~known).sum())}
    known_tokens = by_call.scatter(known[:, None].expand(by_call.shape), response_mask)
    if drops:
        response_mask = known_tokens
    else:
        log_probs = torch.where(known_tokens.bool(), log_probs, old_log_probs)
    log_probs = on_trained(log_probs, response_mask)
    changed = {"response_mask": response_mask, "rollout_log_probs": log_probs}
    if correction.get("bypass_mode"):
        return changed | {"old_log_probs": log_probs}, metrics
    if not correction:
        return changed, metrics

    weights, kept, of_verl = compute_rollout_correction_and_rejection_mask(
        old_log_prob=by_call.gather(old_log_probs),
        rollout_log_prob=by_call.gather(log_probs),
        response_mask=by_call.gather(response_mask),
        **{name: correction[name] for name in _OPTIONS if name in correction},
    )
    changed["response_mask"] = by_call.scatter(kept, response_mask)
    if weights is not None:
        importance = weights.batch["rollout_is_weights"]
        changed["rollout_is_weights"] = by_call.scatter(importance, log_probs)
    return changed, metrics | of_verl


def _calls(rows: Rows, *, required: bool) -> Sequences:
    """The trained tokens as calls; as rows if calls are unknown and not required."""
    if rows.call_index is not None or required:
        return rows.trained_tokens(by_call=True).by_call()[0]
    numbers = range(len(rows))
    no_calls = torch.zeros_like(rows.response_mask)
    return TrainedTokens.of(rows.response_mask, no_calls, numbers, numbers).by_call()[0]


def _known(by_call: Sequences, rows: Rows) -> torch.Tensor:
    """(calls,) bool: calls with log-probs. All zeros count as missing."""
    log_probs = rows.tensors.get("rollout_log_probs")
    if log_probs is None:
        return torch.zeros(by_call.shape[0], dtype=torch.bool)
    return by_call.gather(log_probs).ne(0).any(dim=1)


def _drops(config: DictConfig) -> bool:
    return bool(config.get("agentlightning", {}).get("missing_rollout_log_probs") == "drop")


def _depends_on_calls(correction: DictConfig) -> bool:
    rejects_by = str(correction.get("rollout_rs") or "")
    return correction.get("rollout_is") == "sequence" or "seq_" in rejects_by
