"""Scope of the audit: what the configuration allows to compare, and how precisely."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from omegaconf import DictConfig, OmegaConf

Precision: TypeAlias = Literal["float32", "16-bit", "quantised"]

_FLOAT32 = ("float32", "float", "fp32", "torch.float32")
_ROLLOUT = "actor_rollout_ref.rollout"
# Keys that make servers compute with fewer than 16 bits.
_QUANTISED = (
    f"{_ROLLOUT}.quantization",
    f"{_ROLLOUT}.quantization_config_file",
    f"{_ROLLOUT}.engine_kwargs.vllm.quantization",
    f"{_ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype",
    f"{_ROLLOUT}.qat.enable",
    "actor_rollout_ref.actor.qat.enable",
    "actor_rollout_ref.actor.fsdp_config.qat.enable",
)
# Values of these keys that quantise nothing.
_NOT_QUANTISED = (None, False, "", "auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Scope:
    """Relation between the servers' log-probs and the actor's.

    Attributes:
        precision: the lower one of both sides.
        kept_mass: minimum probability mass that top_p keeps; the servers' log-probs are
            renormalised over it. 1.0: everything is kept. 0.0: unknown because of top_k, so that
            steps can only be compared with the first one.
        incomparable: why nothing can be compared; None if it can.
        stops: a broken weight sync ends the run; otherwise it is a warning.
    """

    precision: Precision = "float32"
    kept_mass: float = 1.0
    incomparable: str | None = None
    stops: bool = True

    def nearest(self, rollout: torch.Tensor, actor: torch.Tensor) -> torch.Tensor:
        """The servers' log-probs clamped to the range that the actor's allow.

        After truncation a token of probability p has p / mass: its log-prob is between log p and
        log p - log `kept_mass`, and at most 0.
        """
        if self.kept_mass in (0.0, 1.0):
            return actor
        highest = torch.maximum((actor - math.log(self.kept_mass)).clamp(max=0.0), actor)
        return torch.minimum(torch.maximum(rollout, actor), highest)

    @property
    def is_relative(self) -> bool:
        """Whether steps can only be compared with the first one."""
        return self.kept_mass == 0.0

    def __str__(self) -> str:
        """A sentence about what is compared; empty if everything is."""
        if self.incomparable is not None:
            return f"log-probs of servers and actor are not compared: {self.incomparable}"
        if self.kept_mass >= 1.0:
            return ""
        compared = (
            "compares steps with the first one"
            if self.is_relative
            else f"expects a probability from p to p / {self.kept_mass:g} for a token to which the "
            "actor gives p"
        )
        return (
            f"{_ROLLOUT}.top_p and top_k cut what is sampled, and vLLM's log-probs are of what is "
            f"left: the audit {compared}. With {_ROLLOUT}.logprobs_mode=raw_logprobs and "
            "temperature 1 it compares exactly"
        )


def scope_of(config: DictConfig) -> Scope:
    """The scope of a whole configuration."""
    rollout = config.actor_rollout_ref.rollout
    mode = rollout.get("logprobs_mode") or "raw_logprobs"
    kept_mass, incomparable = 1.0, None
    if mode == "raw_logprobs":
        if rollout.temperature != 1.0:
            incomparable = (
                f"with {_ROLLOUT}.logprobs_mode=raw_logprobs the servers' are of temperature 1, "
                f"the actor's of {_ROLLOUT}.temperature={rollout.temperature:g}; "
                "logprobs_mode=processed_logprobs compares them"
            )
    elif mode == "processed_logprobs":
        cuts_by_rank = (rollout.get("top_k") or -1) > 0
        kept_mass = 0.0 if cuts_by_rank else float(rollout.get("top_p") or 1.0)
    else:
        incomparable = f"{_ROLLOUT}.logprobs_mode={mode} gives no log-probs"
    settings = config.get("agentlightning") or {}
    return Scope(
        _precision(config), kept_mass, incomparable, settings.get("audit", "stop") == "stop"
    )


def _precision(config: DictConfig) -> Precision:
    if any(OmegaConf.select(config, key) not in _NOT_QUANTISED for key in _QUANTISED):
        return "quantised"
    parts = config.actor_rollout_ref
    engine = parts.actor.fsdp_config
    mixed = engine.get("mixed_precision") or {}
    dtypes = (
        parts.rollout.get("dtype"),
        mixed.get("param_dtype", "bf16"),
        engine.get("model_dtype") or "fp32",
    )
    return "float32" if all(str(dtype) in _FLOAT32 for dtype in dtypes) else "16-bit"
