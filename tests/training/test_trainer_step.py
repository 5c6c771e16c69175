"""`ppo_step` on verl's FSDP2 engine for the CPU, in this process, without Ray."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import agl_fast
from agl_fast.training import WorkerGroups, ppo_step
from agl_fast.training.step_rows import Rows
from support import engine_workers
from support.tiny_model import make_tiny_model

# verl's, torch's and transformers' own.
pytestmark = pytest.mark.filterwarnings("ignore")

P, R = 24, 40
N_GROUPS, GROUP_SIZE = 6, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(folder, ["user\ncount apples"], max_length=P + R, seed=3)
    return folder


def configured(model: Path, **settings: Any) -> Any:
    return engine_workers.configured(
        model,
        n_groups=N_GROUPS,
        group_size=GROUP_SIZE,
        widths=(P, R),
        actor={"optim": {"lr": 0.0, "clip_grad": 1e9}, **settings},
    )


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    with engine_workers.one_rank():
        yield


@pytest.fixture
def make_actor(process_group: None) -> Any:
    def make(config: Any) -> WorkerGroups:
        return engine_workers.worker_groups(engine_workers.engine_worker(config))

    return make


def rollouts(seed: int = 0) -> list[agl_fast.Rollout]:
    """Of one to three calls each; some continue, some rewrite, one has an overlong prompt."""
    chances = random.Random(seed)

    def ids(n: int) -> list[int]:
        return [chances.randrange(1, 90) for _ in range(n)]

    made = []
    for number in range(N_GROUPS * GROUP_SIZE):
        prompt = ids(chances.randrange(3, 9))
        calls = []
        for _ in range(chances.randrange(1, 4)):
            call = agl_fast.Call(prompt, ids(chances.randrange(2, 6)))
            calls.append(call)
            continues = chances.random() < 0.7
            prompt = [*prompt, *call.response_ids, *ids(3)] if continues else ids(5)
        if number == 3:
            calls.append(agl_fast.Call(ids(P + 4), ids(3)))
        group = f"group {number // GROUP_SIZE}"
        made.append(agl_fast.Rollout(f"rollout {number}", group, calls, chances.random()))
    return made


def batch_of(level: str, *, trim: bool = True) -> agl_fast.Batch:
    return agl_fast.build_batch(
        rollouts(),
        level=level,
        max_prompt_length=P,
        max_response_length=R,
        overlong_prompt="drop",
        pad_token_id=0,
        trim=trim,
        call_index=True,
    )


def take_step(batch: agl_fast.Batch, workers: WorkerGroups, config: Any) -> dict[str, float]:
    taken = ppo_step(batch, workers, config, n_rollouts=len(batch.rollouts), global_step=1)
    return taken.metrics


def recorded_gradients(workers: WorkerGroups) -> list[torch.Tensor]:
    """Filled with the gradient of every optimiser step from now on."""
    engine = workers.actor.worker.engine
    found: list[torch.Tensor] = []

    def record(*_: Any) -> None:
        gradients = (p.grad.full_tensor().flatten().double() for p in engine.module.parameters())
        found.append(torch.cat(list(gradients)))

    engine.optimizer.register_step_pre_hook(record)
    return found


def plain_gradient(model: Path, batch: agl_fast.Batch) -> torch.Tensor:
    """Of -Σ advantage × log-prob over the trained tokens, divided by how many they are."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa")
    rewards: dict[str, list[float]] = {}
    for rollout in batch.rollouts:
        rewards.setdefault(rollout.data_id, []).append(rollout.reward)
    of_rollout = {
        rollout.rollout_id: (rollout.reward - torch.tensor(rewards[rollout.data_id]).mean())
        / (torch.tensor(rewards[rollout.data_id]).std() + 1e-6)
        for rollout in batch.rollouts
    }
    loss = torch.zeros(())
    n_tokens = 0
    for row, rollout_id in enumerate(batch.columns["rollout_id_list"]):
        if batch.tensors["is_drop_mask"][row]:
            continue
        real = batch.tensors["attention_mask"][row].bool()
        tokens = batch.tensors["input_ids"][row][real]
        prompt_width = batch.tensors["prompts"].shape[1]
        n_prompt = int(real[:prompt_width].sum())
        mask = batch.tensors["response_mask"][row][: len(tokens) - n_prompt]
        logits = plain(tokens[None]).logits[0, n_prompt - 1 : -1] / engine_workers.TEMPERATURE
        log_probs = torch.log_softmax(logits, dim=-1)
        chosen = log_probs.gather(1, tokens[n_prompt:, None])[:, 0]
        loss = loss - of_rollout[rollout_id] * (chosen * mask).sum()
        n_tokens += int(mask.sum())
    (loss / n_tokens).backward()
    return torch.cat([p.grad.flatten().double() for p in plain.parameters()])


def relative_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).norm() / second.norm())


@pytest.mark.parametrize("level", ["transition", "trajectory"])
def test_the_gradient_is_the_one_written_out(make_actor, model, level):
    config = configured(model)
    workers = make_actor(config)
    gradients = recorded_gradients(workers)
    batch = batch_of(level)
    metrics = take_step(batch, workers, config)
    assert metrics["training/n_triplets_prompt_too_long"] == 1
    (gradient,) = gradients
    assert relative_difference(gradient, plain_gradient(model, batch)) < 1e-5


@pytest.mark.parametrize("loss_agg_mode", ["token-mean", "seq-mean-token-sum-norm"])
def test_trimming_changes_no_gradient(make_actor, model, loss_agg_mode):
    config = configured(model, loss_agg_mode=loss_agg_mode)
    workers = make_actor(config)
    gradients = recorded_gradients(workers)
    for trim in (True, False):
        take_step(batch_of("trajectory", trim=trim), workers, config)
    assert gradients[0].norm() > 0
    assert relative_difference(*gradients) < 1e-6


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("level", ["transition", "trajectory"])
def test_three_mini_batches_are_three_optimiser_steps_at_every_level(
    make_actor, model, level, epochs
):
    config = configured(
        model,
        ppo_mini_batch_size=2,
        ppo_epochs=epochs,
        use_dynamic_bsz=False,
        ppo_micro_batch_size_per_gpu=2,
    )
    workers = make_actor(config)
    gradients = recorded_gradients(workers)
    scheduler = workers.actor.worker.engine.lr_scheduler
    before = scheduler.last_epoch
    metrics = take_step(batch_of(level), workers, config)
    assert len(gradients) == 3 * epochs
    assert metrics["training/n_mini_batches"] == 3
    assert scheduler.last_epoch == before + 1


def test_metrics_of_before_and_after_processing(make_actor, model):
    config = configured(model)
    workers = make_actor(config)
    batch = batch_of("trajectory")
    metrics = take_step(batch, workers, config)
    kept = ~batch.tensors["is_drop_mask"]
    attended = batch.tensors["attention_mask"][:, batch.tensors["prompts"].shape[1] :].sum(dim=1)
    sampled = batch.tensors["response_mask"].sum(dim=1)
    context = attended - sampled
    for suffix, counted in (("before", torch.ones_like(kept)), ("after", kept)):
        for name, value in (
            ("response_length/mean", sampled[counted].double().mean()),
            ("context_length/mean", context[counted].double().mean()),
            ("critic/score/mean", batch.tensors["token_level_scores"].sum(1)[counted].mean()),
        ):
            assert metrics[f"{name}_{suffix}_processing"] == pytest.approx(float(value))
    rewards = [rollout.reward for rollout in batch.rollouts]
    assert metrics["critic/score/mean"] == pytest.approx(sum(rewards) / len(rewards))
    for name in ("actor/grad_norm", "actor/entropy_loss", "actor/pg_loss", "perf/mfu/actor"):
        assert name in metrics


def test_the_update_limit_leaves_out_rollouts_that_are_as_good_as_their_group(make_actor, model):
    config = configured(model, ppo_mini_batch_size=2)
    config.agentlightning.max_ppo_update_times = 2
    workers = make_actor(config)
    gradients = recorded_gradients(workers)
    batch = batch_of("trajectory")
    for entry in batch.rollouts[:4]:
        entry.reward = 1.0
    taken = ppo_step(batch, workers, config, n_rollouts=len(batch.rollouts), global_step=1)
    assert len(gradients) == taken.metrics["training/n_mini_batches"] == 2
    assert taken.metrics["training/n_zero_advantage_groups"] == 2
    assert taken.metrics["training/n_rollouts_over_update_limit"] == 4
    left_out = {entry.rollout_id for entry in batch.rollouts[:4]}
    assert left_out.isdisjoint(taken.rows.columns["rollout_id_list"])
    n_tokens = sum(entry.accounting.trained for entry in batch.rollouts[:4])
    assert taken.metrics["training/tokens/over_update_limit"] == n_tokens
    n_left = taken.rows.tensors["response_mask"].sum()
    assert n_left + n_tokens == batch.accounting.trained


def test_a_step_of_which_every_token_is_rejected_updates_nothing(make_actor, model):
    config = configured(model)
    config.algorithm.rollout_correction.rollout_rs = "token_k1"
    config.algorithm.rollout_correction.rollout_rs_threshold = "0.5_2.0"
    workers = make_actor(config)
    gradients = recorded_gradients(workers)
    batch = batch_of("trajectory")
    batch.tensors["rollout_log_probs"] = torch.full(batch.tensors["responses"].shape, -30.0)
    taken = ppo_step(batch, workers, config, n_rollouts=len(batch.rollouts), global_step=1)
    assert not gradients
    assert taken.metrics["training/n_mini_batches"] == 0
    assert not taken.rows.tensors["response_mask"].any()
    assert "algorithm.rollout_correction rejects every token" in str(taken.empty)


def test_the_actor_stays_as_it_is_while_the_critic_warms_up(make_actor, model):
    workers = make_actor(config := configured(model))
    gradients = recorded_gradients(workers)
    batch = batch_of("trajectory")
    told = {"n_rollouts": len(batch.rollouts), "global_step": 1}
    taken = ppo_step(batch, workers, config, update_actor=False, **told)
    assert not gradients
    assert "advantages" in taken.rows.tensors
    assert taken.empty is None


def test_the_reference_of_a_lora_actor_is_its_base(make_actor, model):
    from agl_fast.training.worker_groups import policy_log_probs, reference_log_probs

    batch = batch_of("trajectory")
    rows = Rows.of(batch)
    mask = batch.tensors["response_mask"].bool()
    plain, _ = policy_log_probs(rows, make_actor(config := configured(model)), config)

    config.actor_rollout_ref.model.lora_rank = 2
    workers = replace(make_actor(config), reference_is_base_of_actor=True)
    adapters = [
        weight
        for name, weight in workers.actor.worker.engine.module.named_parameters()
        if "lora_B" in name
    ]
    with torch.no_grad():
        for weight in adapters:
            weight.fill_(0.5)
    adapted, _ = policy_log_probs(rows, workers, config)
    reference = reference_log_probs(rows, workers, config)["ref_log_prob"]
    torch.testing.assert_close(reference[mask], plain["old_log_probs"][mask])
    assert (adapted["old_log_probs"] - reference)[mask].abs().max() > 0.01


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_workers_cut_out_the_mini_batches_that_were_laid_out(n_ranks):
    from verl.utils import tensordict_utils as tu

    from agl_fast.training.minibatches import lay_out, whole_rollouts
    from agl_fast.training.worker_groups import FORWARD_KEYS, laid_out_rows

    batch = batch_of("transition")
    rows = Rows.of(batch)
    rows.tensors["row"] = torch.arange(1, len(batch) + 1)[:, None]
    mini_batches = whole_rollouts(batch.columns["rollout_id_list"].tolist(), 3)
    layout = lay_out(mini_batches, rows.lengths, n_ranks=n_ranks)
    laid_out = laid_out_rows(rows, layout, (*FORWARD_KEYS, "row"), temperature=1.0)

    found: list[set[int]] = [set() for _ in mini_batches]
    for of_rank in tu.chunk_tensordict(laid_out, n_ranks):
        size = layout.mini_batch_size // n_ranks
        cut = tu.make_iterator(of_rank, size, epochs=1, dataloader_kwargs={"shuffle": False})
        for number, mini_batch in enumerate(cut):
            assert len(mini_batch) == size
            numbers = mini_batch["row"][:, 0].tolist()
            for row, ids in zip(numbers, mini_batch["input_ids"], strict=True):
                if row == 0:
                    assert len(ids) == 2
                    continue
                real = batch.tensors["attention_mask"][row - 1].bool()
                assert ids.tolist() == batch.tensors["input_ids"][row - 1][real].tolist()
                found[number].add(row - 1)
    assert found == [set(mini_batch.tolist()) for mini_batch in mini_batches]
