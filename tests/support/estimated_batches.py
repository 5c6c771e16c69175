"""Batches of written-out rollouts, with what a step adds to them before advantages."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import OmegaConf

import agl_fast
import support.verl_trainer_imports  # noqa: F401
from agl_fast.training.advantages import Estimated, estimate
from agl_fast.training.step_rows import Rows

LEVELS = ("transition", "trajectory")


def configured(estimator: str, *, credit: str = "identical", **algorithm: Any) -> Any:
    defaults = {"use_kl_in_reward": False, "kl_penalty": "kl", "gamma": 1.0, "lam": 1.0}
    return OmegaConf.create(
        {
            "algorithm": {**defaults, "adv_estimator": estimator, **algorithm},
            "agentlightning": {"credit": credit},
        }
    )


def build(rollouts: list[agl_fast.Rollout], level: str = "trajectory", **options: Any) -> Any:
    return agl_fast.build_batch(
        rollouts,
        level=level,
        **{
            "max_prompt_length": 64,
            "max_response_length": 64,
            "pad_token_id": 0,
            "trim": True,
            "call_index": True,
            **options,
        },
    )


def by_token(batch: agl_fast.Batch, values: torch.Tensor) -> dict[tuple[str, int, int], float]:
    """By rollout, call and the token's place in the call."""
    found: dict[tuple[str, int, int], float] = {}
    for row, rollout in enumerate(batch.columns["rollout_id_list"].tolist()):
        for column in batch.tensors["response_mask"][row].nonzero()[:, 0].tolist():
            call = int(batch.tensors["call_index"][row, column])
            place = sum(key[:2] == (rollout, call) for key in found)
            found[rollout, call, place] = float(values[row, column])
    return found


def placed(batch: agl_fast.Batch, values: dict[tuple[str, int, int], float]) -> torch.Tensor:
    """The opposite of `by_token`: (B, R) float32."""
    numbers = {key: number for number, key in enumerate(values)}
    width = batch.tensors["response_mask"].shape
    tokens = torch.zeros(width)
    seen: dict[tuple[str, int], int] = {}
    for row, rollout in enumerate(batch.columns["rollout_id_list"].tolist()):
        for column in batch.tensors["response_mask"][row].nonzero()[:, 0].tolist():
            call = int(batch.tensors["call_index"][row, column])
            place = seen.get((rollout, call), 0)
            seen[rollout, call] = place + 1
            assert (rollout, call, place) in numbers
            tokens[row, column] = values[rollout, call, place]
    return tokens


def estimated(
    batch: agl_fast.Batch, config: Any, kl_controller: Any = None, **values: Any
) -> Estimated:
    """`values` are tensors (B, R), or by token."""
    tensors = {
        name: value if isinstance(value, torch.Tensor) else placed(batch, value)
        for name, value in values.items()
    }
    rows = Rows({**batch.tensors, **tensors}, batch.columns, batch.rollouts)
    return estimate(rows, config, kl_controller)


def advantages(batch: agl_fast.Batch, config: Any, **values: Any) -> dict[Any, float]:
    return by_token(batch, estimated(batch, config, **values).tensors["advantages"])


class Controller:
    """Of the KL penalty, as verl's."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.told: dict[str, float] = {}

    def update(self, **told: float) -> None:
        self.told = told
