"""Steps on verl's FSDP2 engine with log-probs of the servers, and sums of squared probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agl_fast
from agl_fast import Call, Rollout
from agl_fast.training import WorkerGroups, ppo_step
from agl_fast.training.audit_scope import Scope
from agl_fast.training.policy_audit import PolicyAudit
from support import engine_workers
from support.tiny_model import make_tiny_model

# verl's, torch's and transformers' own.
pytestmark = pytest.mark.filterwarnings("ignore")

P, R = 8, 12
# A rollout of a call that the next one continues, and one of two separate calls.
ANSWERS = {("A", 0): [3, 4], ("A", 1): [6], ("B", 0): [9, 9, 8], ("B", 1): [7]}
PROMPTS = {("A", 0): [1, 2], ("A", 1): [1, 2, 3, 4, 5], ("B", 0): [1, 2], ("B", 1): [30, 31]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(folder, ["user\ncount apples"], max_length=P + R, seed=3)
    return folder


@pytest.fixture(scope="module")
def workers(model: Path) -> Iterator[WorkerGroups]:
    """Their learning rate is 0."""
    with engine_workers.one_rank():
        yield engine_workers.worker_groups(engine_workers.engine_worker(configured(model)))


def configured(model: Path, correction: dict[str, Any] | None = None, **algorithm: Any) -> Any:
    sums = "optimal_token_baseline" in str(algorithm.get("adv_estimator"))
    return engine_workers.configured(
        model,
        n_groups=1,
        group_size=2,
        widths=(P, R),
        actor={"optim": {"lr": 0.0, "clip_grad": 1e9}, "calculate_sum_pi_squared": sums},
        algorithm={"rollout_correction": correction or {}, **algorithm},
    )


def batch_of(log_probs: dict[tuple[str, int], list[float]]) -> agl_fast.Batch:
    calls = {call: Call(PROMPTS[call], ANSWERS[call], log_probs.get(call)) for call in ANSWERS}
    return agl_fast.build_batch(
        [
            Rollout("A", "g", [calls["A", 0], calls["A", 1]], 1.0),
            Rollout("B", "g", [calls["B", 0], calls["B", 1]], 0.0),
        ],
        max_prompt_length=P,
        max_response_length=R,
        pad_token_id=0,
        trim=True,
        call_index=True,
    )


def step(batch: agl_fast.Batch, workers: WorkerGroups, config: Any) -> Any:
    return ppo_step(batch, workers, config, n_rollouts=2, global_step=1)


@pytest.fixture(scope="module")
def distributions(model: Path) -> dict[tuple[str, int], torch.Tensor]:
    """By call, the log-probs of every token at each place of its answer."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa")
    found = {}
    for call, answer in ANSWERS.items():
        tokens = torch.tensor([[*PROMPTS[call], *answer]])
        with torch.no_grad():
            logits = plain(tokens).logits[0, len(PROMPTS[call]) - 1 : -1]
        found[call] = torch.log_softmax(logits / engine_workers.TEMPERATURE, dim=-1)
    return found


@pytest.fixture(scope="module")
def sampled(distributions: dict[tuple[str, int], torch.Tensor]) -> dict[Any, list[float]]:
    """With these a server that holds the actor's weights has sampled."""
    return {
        call: distribution.gather(1, torch.tensor(ANSWERS[call])[:, None])[:, 0].tolist()
        for call, distribution in distributions.items()
    }


class NoForward:
    """A group that is not asked for log-probs."""

    def __init__(self, group: Any) -> None:
        self.update_actor = group.update_actor
        self.set_loss_fn = group.set_loss_fn


def test_bypass_spares_the_actors_pass_and_learns_the_same(model, workers, sampled):
    batch = batch_of(sampled)
    asked = step(batch, workers, configured(model))
    spared = WorkerGroups(NoForward(workers.actor), workers.n_actor_ranks)
    bypassed = step(batch, spared, configured(model, {"bypass_mode": True}))
    norms = [each.metrics["actor/grad_norm"] for each in (asked, bypassed)]
    assert norms[0] > 0
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert "training/audit/n_tokens" in asked.metrics
    assert "training/audit/n_tokens" not in bypassed.metrics


def test_calls_that_were_bent_are_audited_apart(model, workers, sampled):
    forced = {**sampled, ("B", 0): [0.0, 0.0, 0.0]}
    batch = batch_of(forced)
    calls = {"A": {}, "B": {0: ("tool_choice",)}}
    rows = [calls[rollout_id] for rollout_id in batch.columns["rollout_id_list"]]
    batch.columns["bent_calls_list"] = np.array(rows, dtype=object)
    audits = PolicyAudit(Scope())
    found = ppo_step(
        batch,
        workers,
        configured(model),
        n_rollouts=2,
        global_step=1,
        policy_audit=audits,
    ).metrics
    assert found["training/audit/n_tokens"] == 4
    assert found["training/audit/prob_diff_max"] < 1e-4
    assert found["training/audit/bent/n_tokens"] == 3
    assert found["training/audit/bent/prob_diff_mean"] > 0.5
    assert found["training/rollout_probs_diff_max"] > 0.5
    assert audits.last is None  # 4 tokens decide nothing


def test_bypass_asks_the_actor_where_a_call_has_no_log_probs(model, workers, sampled):
    batch = batch_of({call: values for call, values in sampled.items() if call != ("B", 1)})
    config = configured(model, {"bypass_mode": True})
    found = step(batch, workers, config)
    assert found.metrics["training/n_calls_without_log_probs"] == 1
    trained = found.rows.tensors["response_mask"].bool()
    assert (found.rows.tensors["old_log_probs"][trained] < 0).all()


def test_truncated_importance_weights_scale_the_gradient(model, workers, sampled):
    # Everywhere the server's probability is half the actor's.
    halved = {call: [value - 0.6931472 for value in values] for call, values in sampled.items()}
    plain = step(batch_of(halved), workers, configured(model))
    correction = {"rollout_is": "token", "rollout_is_threshold": 1.5}
    weighed = step(batch_of(halved), workers, configured(model, correction))
    assert weighed.metrics["actor/grad_norm"] == pytest.approx(
        1.5 * plain.metrics["actor/grad_norm"], rel=1e-4
    )
    assert weighed.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.5)


def test_the_optimal_baseline_gets_squared_probabilities(model, workers, sampled, distributions):
    found = step(
        batch_of(sampled), workers, configured(model, adv_estimator="optimal_token_baseline")
    )
    rows = found.rows.tensors
    expected = torch.cat([distributions[call].exp().square().sum(dim=1) for call in ANSWERS])
    assert rows["sum_pi_squared"][rows["response_mask"].bool()].tolist() == pytest.approx(
        expected.tolist(), rel=1e-4
    )
    assert found.metrics["actor/grad_norm"] > 0
