"""The audit of real steps with bfloat16 on both sides: healthy, and with servers that go deaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import agl_fast
from agl_fast import Call, Rollout
from agl_fast.training import ppo_step
from agl_fast.training.policy_audit import PolicyAudit, PolicyMismatchError
from support import engine_workers
from support.tiny_model import make_tiny_model

# verl's, torch's and transformers' own.
pytestmark = pytest.mark.filterwarnings("ignore")

N_ROLLOUTS, WIDTH, PROMPT = 16, 32, [1, 2, 3, 4]
BFLOAT16 = {"fsdp_config": {"mixed_precision": {"param_dtype": "bf16"}}}


class Server:
    """Samples in bfloat16 with the weights that it was given."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    def load(self, module: Any) -> None:
        weights = {name: each.full_tensor() for name, each in module.state_dict().items()}
        self.model.load_state_dict(weights)

    @torch.no_grad()
    def batch(self, step: int) -> agl_fast.Batch:
        """Rollouts of one call; every second one earns a reward."""
        torch.manual_seed(step)
        tokens = torch.tensor([PROMPT] * N_ROLLOUTS)
        for _ in range(WIDTH):
            logits = self.model(tokens).logits[:, -1].float() / engine_workers.TEMPERATURE
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(1), 1)], dim=1)
        logits = self.model(tokens).logits[:, len(PROMPT) - 1 : -1].float()
        answers = tokens[:, len(PROMPT) :]
        log_probs = (logits / engine_workers.TEMPERATURE).log_softmax(2)
        log_probs = log_probs.gather(2, answers[:, :, None])[:, :, 0]
        rollouts = [
            Rollout(str(i), "g", [Call(PROMPT, ids.tolist(), of_ids.tolist())], float(i % 2))
            for i, (ids, of_ids) in enumerate(zip(answers, log_probs, strict=True))
        ]
        return agl_fast.build_batch(
            rollouts,
            max_prompt_length=len(PROMPT),
            max_response_length=WIDTH,
            pad_token_id=0,
            trim=True,
            call_index=True,
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(folder, ["user\ncount apples"], max_length=64, seed=3)
    return folder


@pytest.fixture
def one_rank() -> Iterator[None]:
    with engine_workers.one_rank():
        yield


def train_on(step: Callable[[int], dict[str, float]], numbers: range) -> None:
    for number in numbers:
        step(number)


@pytest.mark.usefixtures("one_rank")
def test_four_healthy_steps_are_silent_and_deaf_servers_end_the_run(model, caplog):
    config = engine_workers.configured(
        model,
        n_groups=1,
        group_size=N_ROLLOUTS,
        widths=(len(PROMPT), WIDTH),
        actor={"optim": {"lr": 0.02}, **BFLOAT16},
    )
    config.actor_rollout_ref.rollout.dtype = "bfloat16"
    worker = engine_workers.engine_worker(config)
    workers = engine_workers.worker_groups(worker)
    server, audits = Server(model), PolicyAudit.of(config)
    assert audits.scope.precision == "16-bit"

    def step(number: int) -> dict[str, float]:
        return ppo_step(
            server.batch(number),
            workers,
            config,
            n_rollouts=N_ROLLOUTS,
            global_step=number,
            policy_audit=audits,
        ).metrics

    for number in range(1, 5):
        metrics = step(number)
        assert metrics["training/audit/n_tokens"] == N_ROLLOUTS * WIDTH
        assert 1e-7 < metrics["training/audit/prob_diff_mean"] < 0.01
        assert metrics["training/audit/logit_diff"] < 0.12
        server.load(worker.engine.module)
    assert "probabilities of servers" not in caplog.text

    # The last weights that the servers get are those of step 4.
    with pytest.raises(PolicyMismatchError, match="the servers do not hold the actor's weights"):
        train_on(step, range(5, 12))
    assert "probabilities of servers" in caplog.text
