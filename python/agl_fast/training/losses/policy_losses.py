"""Supported policy losses, and the unit that each averages over."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from agl_fast.training.losses.units import NEEDS_CALLS, Aggregation

# Agent-lightning 1.0's names: verl's token loss, averaged over rollouts.
OF_ROLLOUTS = {"per_rollout_mean": "vanilla", "cispo_per_rollout_mean": "cispo"}
# verl's losses in which a token's value does not depend on other tokens. Losses that are not
# listed, such as user-defined ones, get calls as rows.
OF_TOKENS = frozenset({"vanilla", "cispo", "dppo_kl", "dppo_tv", "dro", "gpg", "sapo"})
# verl's formulas for these average over sequences and ignore loss_agg_mode.
_FIXED: dict[str, Aggregation] = {"geo_mean": "seq-mean-token-mean", "sapo": "seq-mean-token-mean"}

_PICKS_TOKENS = (
    "it picks tokens by their covariance within a micro-batch, so that how rows were cut and "
    "packed would change what is learned"
)
REFUSED = {
    "clip_cov": _PICKS_TOKENS,
    "kl_cov": _PICKS_TOKENS,
    "bypass_mode": "it is verl's name for what algorithm.rollout_correction.bypass_mode=true with "
    "loss_mode=vanilla does here",
}


def require_supported(actor: Any) -> None:
    """Raise ValueError for an unsupported policy loss.

    Args:
        actor: verl's `actor_rollout_ref.actor`.
    """
    name = loss_mode(actor)
    if name in REFUSED:
        raise ValueError(f"actor_rollout_ref.actor.policy_loss.loss_mode={name!r}: {REFUSED[name]}")
    beta = actor.policy_loss.get("dro_beta")
    if name == "dro" and not (beta is not None and beta > 0):
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss.dro_beta={beta!r}: expected a number above 0, "
            "as loss_mode is dro"
        )


def loss_mode(actor: Any) -> str:
    """The configured policy loss."""
    return str(actor.policy_loss.get("loss_mode", "vanilla"))


def aggregation_of(actor: Any) -> Aggregation:
    """The unit over which policy, KL and entropy terms are averaged."""
    name = loss_mode(actor)
    if name in OF_ROLLOUTS:
        return "rollout-mean"
    aggregation: Aggregation = _FIXED.get(name, actor.loss_agg_mode)
    return aggregation


def needs_calls(actor: Any) -> bool:
    """Whether the loss depends on which call sampled a token."""
    return aggregation_of(actor) in NEEDS_CALLS or not is_of_tokens(loss_mode(actor))


def is_of_tokens(name: str) -> bool:
    return name in OF_TOKENS or name in OF_ROLLOUTS


def require_registered(name: str) -> None:
    """Raise ValueError if no policy loss of that name is registered in this process."""
    wanted = OF_ROLLOUTS.get(name, name)
    if wanted not in POLICY_LOSS_REGISTRY:
        known = sorted({*POLICY_LOSS_REGISTRY, *OF_ROLLOUTS} - REFUSED.keys())
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={name!r} is not registered with verl "
            f"in this worker; expected one of {', '.join(known)}, or set "
            "actor_rollout_ref.model.external_lib to the module that registers it"
        )
