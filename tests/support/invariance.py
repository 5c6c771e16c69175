"""The same calls, cut into rows in different ways: what is learned from each."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agl_fast
from agl_fast.training import WorkerGroups, ppo_step
from support import engine_workers
from support.plain_actor import VOCABULARY, PlainActor, PlainCritic, plain_model
from support.small_trees import forked_calls
from support.tiny_model import make_tiny_model

P, R = 24, 96
N_GROUPS, GROUP_SIZE = 6, 2
N_MINI_BATCHES = 3

POLICY_LOSSES = (
    "vanilla",
    "cispo",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "gpg",
    "gspo",
    "sapo",
    "per_rollout_mean",
    "cispo_per_rollout_mean",
)
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
# So that each moves the parameters about as far.
LEARNING_RATES = {
    "token-sum": 0.004,
    "seq-mean-token-sum": 0.05,
    "seq-mean-token-sum-norm": 0.05 * R,
}
# Each policy loss, and for two of them, of tokens and of calls, each way to average.
OBJECTIVES = [
    *((name, "token-mean") for name in POLICY_LOSSES),
    *((name, mode) for name in ("vanilla", "gspo") for mode in AGGREGATIONS[1:]),
]
# Through engines and on two ranks, `make test` takes one objective of each unit that is averaged:
# tokens, calls, rollouts. `make test-all` takes all of them.
QUICK = [
    ("vanilla", "token-mean"),
    ("vanilla", "seq-mean-token-mean"),
    ("gspo", "seq-mean-token-sum-norm"),
    ("cispo_per_rollout_mean", "token-mean"),
]
QUICK_OR_SLOW = [
    pytest.param(*objective, marks=[] if objective in QUICK else [pytest.mark.slow])
    for objective in OBJECTIVES
]

OF_LIMITS = ("overlong_prompt", "overlong_call", "truncated_rollout")


@dataclass(frozen=True)
class Cut:
    """How calls are cut into rows, and rows into micro-batches.

    Attributes:
        micro_batch_size: rows; of an engine, where it is not fixed, tokens ÷ 40.
        shuffled: the rows stand in another order.
        fixed: micro-batches are filled up to their size.
        branched: the calls of `branched_rollouts`.
    """

    level: str
    micro_batch_size: int
    shuffled: bool = False
    trim: bool = True
    fixed: bool = False
    branched: bool = False
    tree_max_tokens: int = 1000


AS_CALLS = Cut("transition", 64)
BRANCHED_AS_CALLS = Cut("transition", 64, branched=True)
BRANCHED_AS_TREES = (
    Cut("tree", 64, branched=True),
    Cut("tree", 3, branched=True, shuffled=True, tree_max_tokens=60),
)
ONE_RANK = (
    Cut("trajectory", 3),
    Cut("trajectory", 64, shuffled=True, trim=False),
    Cut("transition", 4, shuffled=True, fixed=True),
)
TWO_RANKS = (Cut("trajectory", 1, shuffled=True), Cut("transition", 3, trim=False))


def cuts_of_engines(objective: tuple[str, str]) -> tuple[Cut, Cut]:
    """For one rank and for two; the objectives take turns."""
    number = OBJECTIVES.index(objective)
    return ONE_RANK[number % len(ONE_RANK)], TWO_RANKS[number % len(TWO_RANKS)]


@dataclass
class Learned:
    """What a step came to.

    Attributes:
        advantages: by rollout, call and token of the call.
        parameters: after the step, float64.
    """

    advantages: dict[tuple[str, int, int], float]
    parameters: torch.Tensor


def rollouts(seed: int = 0) -> list[agl_fast.Rollout]:
    """Of one to four calls each: most continue, some rewrite, some begin anew."""
    chances = random.Random(seed)

    def ids(n: int) -> list[int]:
        return [chances.randrange(1, VOCABULARY) for _ in range(n)]

    made = []
    for number in range(N_GROUPS * GROUP_SIZE):
        prompt = ids(chances.randrange(3, 9))
        calls = []
        for _ in range(chances.randrange(1, 5)):
            call = agl_fast.Call(prompt, ids(chances.randrange(2, 9)))
            calls.append(call)
            continues = chances.random() < 0.7
            prompt = [*prompt, *call.response_ids, *ids(3)] if continues else ids(5)
        group = f"group {number // GROUP_SIZE}"
        made.append(agl_fast.Rollout(f"rollout {number}", group, calls, chances.random()))
    return made


def branched_rollouts() -> list[agl_fast.Rollout]:
    """Of ten calls each: they continue, fork, are retried, rewrite and begin anew."""
    return [
        agl_fast.Rollout(
            f"rollout {number}",
            f"group {number // GROUP_SIZE}",
            [agl_fast.Call(*call) for call in forked_calls(number)],
            random.Random(number).random(),
        )
        for number in range(N_GROUPS * GROUP_SIZE)
    ]


def cut_into_rows(cut: Cut) -> agl_fast.Batch:
    batch = agl_fast.build_batch(
        branched_rollouts() if cut.branched else rollouts(),
        level=cut.level,
        max_prompt_length=P if cut.level == "trajectory" else P + R,
        max_response_length=R,
        tree_max_tokens=cut.tree_max_tokens,
        pad_token_id=0,
        trim=cut.trim,
        call_index=True,
    )
    # Advantages are given in the precision of the scores.
    batch.tensors["token_level_scores"] = batch.tensors["token_level_scores"].double()
    assert batch.accounting.truncated == 0
    assert not any(batch.accounting.dropped_by_reason[reason] for reason in OF_LIMITS)
    if cut.shuffled:
        order = np.random.default_rng(1).permutation(len(batch))
        batch.tensors = {name: values[order] for name, values in batch.tensors.items()}
        batch.columns = {name: values[order] for name, values in batch.columns.items()}
    return batch


def configured(model: Path, **settings: Any) -> Any:
    """Everything that is minimised has a weight that shows."""
    config = engine_workers.configured(
        model,
        n_groups=N_GROUPS,
        group_size=GROUP_SIZE,
        widths=(P + R, R),
        actor={
            "ppo_mini_batch_size": N_GROUPS // N_MINI_BATCHES,
            "entropy_coeff": 0.05,
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "optim": {"lr": 0.1, "optimizer": "SGD", "weight_decay": 0.0, "clip_grad": 1e9},
            **settings,
        },
    )
    return config


def ask_for(config: Any, policy_loss: str, aggregation: str) -> Any:
    config.actor_rollout_ref.actor.policy_loss.loss_mode = policy_loss
    config.actor_rollout_ref.actor.policy_loss.dro_beta = 0.5
    config.actor_rollout_ref.actor.loss_agg_mode = aggregation
    return config


def learn(
    cut: Cut, workers: WorkerGroups, config: Any, **told: Any
) -> dict[tuple[str, int, int], float]:
    """Take a step of three mini-batches, or as many as may be; return the advantages.

    Args:
        told: to `ppo_step`.
    """
    batch = cut_into_rows(cut)
    told |= {"n_rollouts": len(batch.rollouts), "global_step": 1}
    taken = ppo_step(batch, workers, config, **told)
    limit = config.agentlightning.max_ppo_update_times or N_MINI_BATCHES
    assert taken.metrics["training/n_mini_batches"] == min(limit, N_MINI_BATCHES)
    tensors, of_row = taken.rows.tensors, taken.rows.columns["rollout_id_list"]
    advantages: dict[tuple[str, int, int], float] = {}
    for row, column in tensors["response_mask"].nonzero().tolist():
        call = int(tensors["call_index"][row, column])
        earlier = tensors["call_index"][row, :column] == call
        key = (of_row[row], call, int(earlier.sum()))
        assert key not in advantages
        advantages[key] = float(tensors["advantages"][row, column])
    return advantages


def learned_by_plain_model(
    cut: Cut, config: Any, actor_cls: type[PlainActor] = PlainActor, **told: Any
) -> Learned:
    """In float64."""
    model = plain_model(1)
    rate = _rate(config.actor_rollout_ref.actor)
    actor = actor_cls(model, micro_batch_size=cut.micro_batch_size, learning_rate=rate)
    workers = engine_workers.worker_groups(actor, actor_cls(plain_model(2)))
    advantages = learn(cut, workers, config, **told)
    return Learned(advantages, moved(flat(plain_model(1).parameters()), flat(model.parameters())))


def learned_with_critic(
    cut: Cut,
    config: Any,
    actor_cls: type[PlainActor] = PlainActor,
    critic_cls: type[PlainActor] = PlainCritic,
) -> Learned:
    """By actor and critic, in float64."""
    models = [plain_model(1), plain_model(5)]
    size, rate = cut.micro_batch_size, _rate(config.critic) / 10
    actor = actor_cls(
        models[0], micro_batch_size=size, learning_rate=_rate(config.actor_rollout_ref.actor)
    )
    critic = critic_cls(models[1], micro_batch_size=size, learning_rate=rate)
    reference = actor_cls(plain_model(2))
    advantages = learn(cut, engine_workers.worker_groups(actor, reference, critic), config)
    parameters = [
        moved(flat(plain_model(seed).parameters()), flat(model.parameters()))
        for seed, model in zip((1, 5), models, strict=True)
    ]
    return Learned(advantages, torch.cat(parameters))


class Engines:
    """verl's, for actor and reference, in float32.

    Args:
        model, reference: folders.
        worker_cls: None: the one of the platform.
    """

    def __init__(
        self, config: Any, model: Path, reference: Path, worker_cls: type[Any] | None = None
    ) -> None:
        self._actor, self._reference = (
            engine_workers.engine_worker(_with_model(config, path), worker_cls)
            for path in (model, reference)
        )
        self._parameters = list(self._actor.engine.module.parameters())
        self._saved = [parameter.detach().clone() for parameter in self._parameters]
        self._start = self.parameters

    @property
    def parameters(self) -> torch.Tensor:
        return flat(parameter.full_tensor() for parameter in self._parameters)

    def learned(self, cut: Cut, config: Any) -> Learned:
        """From the first parameters on."""
        with torch.no_grad():
            for parameter, saved in zip(self._parameters, self._saved, strict=True):
                parameter.copy_(saved)
        for group in self._actor.engine.optimizer.param_groups:
            group["lr"] = _rate(config.actor_rollout_ref.actor)
        actor = config.actor_rollout_ref.actor
        actor.use_dynamic_bsz = not cut.fixed
        actor.ppo_micro_batch_size_per_gpu = cut.micro_batch_size
        engine = self._actor.engine_config
        engine.use_dynamic_bsz = actor.use_dynamic_bsz
        engine.micro_batch_size_per_gpu = cut.micro_batch_size
        engine.max_token_len_per_gpu = max(40 * cut.micro_batch_size, P + R)
        workers = engine_workers.worker_groups(self._actor, self._reference)
        return Learned(learn(cut, workers, config), moved(self._start, self.parameters))


def _rate(part: Any) -> float:
    return LEARNING_RATES.get(part.loss_agg_mode, 0.5)


def _with_model(config: Any, path: Path) -> Any:
    config = config.copy()
    config.actor_rollout_ref.model.path = str(path)
    return config


def moved(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """`after`, which is far enough from `before` to show what was learned."""
    assert (after - before).norm() > 0.01 * before.norm()
    return after


def flat(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in parameters])


def difference(first: Learned, second: Learned) -> float:
    """The larger of: of advantages; of parameters, against the parameters."""
    if first.advantages.keys() != second.advantages.keys():
        return float("inf")
    of_advantages = max(abs(second.advantages[key] - a) for key, a in first.advantages.items())
    apart = (first.parameters - second.parameters).norm() / first.parameters.norm()
    return max(of_advantages, float(apart))


def tiny_model(folder: Path, seed: int) -> Path:
    make_tiny_model(folder, ["user\ncount apples"], max_length=P + R, seed=seed)
    return folder
