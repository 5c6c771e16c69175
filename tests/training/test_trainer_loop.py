"""The order of a run: checkpoint, sync, validation, steps, saving. Without Ray or models."""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import support.verl_trainer_imports  # noqa: F401

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # litellm's
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    from agl_fast.rollouts import AgentModeDaemon, ValidatedRollout
    from agl_fast.training import AgentLightningTrainer
    from agl_fast.training import trainer as module
    from agl_fast.verl.config import compose

from agl_fast.training.step_rows import Rows
from support.training_loop import FakeDaemon, Loop, keep_logs
from support.verl_settings import documented


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, Any]]]:
    return keep_logs(monkeypatch)


def step(number: int, *further: Any) -> list[Any]:
    return [("sample", number - 1), ("learn", 12), *further, ("sync", number)]


def test_a_run_validates_trains_saves_and_stops(logged):
    loop = Loop(save_freq=2, test_freq=3, total_training_steps=3)
    loop.fit()
    assert loop.events == [
        ("sync", 0),
        ("validate", 2, 0),
        *step(1),
        *step(2, ("save", 2)),
        *step(3, ("save", 3)),
        ("validate", 2, 3),
        "stop",
    ]
    assert [number for number, _ in logged] == [0, 1, 2, 3, -1]
    assert logged[0][1]["val/of_subclass"] == 1.0
    third = logged[3][1]
    assert third["training/global_step"] == 3
    assert third["training/epoch"] == 1
    assert {"training/reward", "actor/loss", "val/reward", "timing_s/step"} <= third.keys()
    assert logged[-1][1] == {"exit_code": 0}


def test_a_resumed_run_goes_on_where_it_was(logged):
    loop = Loop(saved_step=3, val_before_train=False)
    loop.fit()
    assert loop.events == [("sync", 3), *step(4), "stop"]


def test_a_finished_run_does_nothing_more(logged):
    loop = Loop(saved_step=4, val_before_train=False)
    loop.fit()
    assert loop.events == [("sync", 4), "stop"]


def test_val_only_validates_although_val_before_train_is_off(logged):
    loop = Loop(val_only=True, val_before_train=False)
    loop.fit()
    assert loop.events == [("sync", 0), ("validate", 2, 0), "stop"]


def test_batches_of_a_validation_are_averaged_over_rollouts(logged):
    loop = Loop(val_only=True, n_val_batches=4, val_n=2)
    loop.fit()
    metrics = logged[0][1]
    assert metrics["val/n_rollouts"] == 16
    assert metrics["val/reward"] == 0.25
    assert metrics["val/source/reward"] == 0.25


class Validated(FakeDaemon):
    """Two batches of two samples with two rollouts each; the third sample is of another source."""

    BATCHES = (
        [("math", 1.0, (3,)), ("math", 0.0, (3, 4)), ("math", 1.0, ()), ("math", 1.0, (2,))],
        [("code", 0.5, (1, 2, 3)), ("code", 0.5, (1,)), (None, 0.0, (1,)), (None, 1.0, (1,))],
    )

    def get_test_metrics(self) -> dict[str, float]:
        self.validated_rollouts = [
            ValidatedRollout(source, reward, True, lengths, False)
            for source, reward, lengths in self.BATCHES[self.n_validated]
        ]
        self.n_validated += 1
        return {}


def test_a_validation_has_verls_names_with_the_values_of_each_source(logged):
    loop = Loop(val_only=True, n_val_batches=2, val_n=2)
    loop.make_daemon = lambda: Validated(loop.events)
    loop.fit()
    metrics = logged[0][1]
    core = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
    # The best of two draws, with replacement, out of 0 and 1: 3/4; verl draws 1,000 times.
    best = {name: core.pop(name) for name in list(core) if "/best@2/" in name}
    assert core == {
        "val-core/math/reward/mean@2": 0.75,
        "val-core/code/reward/mean@2": 0.5,
        "val-core/unknown/reward/mean@2": 0.5,
    }
    assert best == {
        "val-core/math/reward/best@2/mean": pytest.approx((0.75 + 1.0) / 2, abs=0.03),
        "val-core/code/reward/best@2/mean": 0.5,
        "val-core/unknown/reward/best@2/mean": pytest.approx(0.75, abs=0.06),
        "val-core/math/reward/best@2/std": pytest.approx(0.75**0.5 / 4, abs=0.03),
        "val-core/code/reward/best@2/std": 0.0,
        "val-core/unknown/reward/best@2/std": pytest.approx(0.75**0.5 / 2, abs=0.03),
    }
    assert metrics["val-aux/math/reward/std@2"] == 0.25  # of the samples' 0.5 and 0
    assert metrics["val-aux/code/reward/worst@2/mean"] == 0.5
    turns = {name: metrics[f"val-aux/num_turns/{name}"] for name in ("min", "max", "mean")}
    assert turns == {"min": 0, "max": 3, "mean": 10 / 8}
    assert metrics["val/math/reward"] == core["val-core/math/reward/mean@2"]
    assert all(type(value) is float for name, value in metrics.items() if "val-" in name)


def test_one_rollout_a_sample_is_its_own_mean(logged):
    Loop(val_only=True, n_val_batches=2).fit()
    core = {name: value for name, value in logged[0][1].items() if name.startswith("val-core/")}
    assert core == {"val-core/source/reward/mean@1": 0.5}


def test_a_run_that_fails_stops_the_daemon_and_says_so_to_the_loggers(logged, monkeypatch):
    loop = Loop(val_before_train=False)

    def fail(batch: Any, *, n_rollouts: int) -> Any:
        raise RuntimeError("the actor died")

    monkeypatch.setattr(loop, "learn", fail)
    with pytest.raises(RuntimeError, match="the actor died"):
        loop.fit()
    assert loop.events[-1] == "stop"
    assert logged == [(-1, {"exit_code": 1})]


def test_a_run_ends_with_where_its_tokens_went(logged, messages, caplog):
    loop = Loop(val_before_train=False, total_training_steps=2)
    loop.fit()
    assert "2 steps sampled 20 tokens in 0 calls: 100.0% trained." in messages()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_tokens_lost_to_limits_are_a_warning_with_what_would_fit(logged, caplog):
    loop = Loop(val_before_train=False, total_training_steps=1)
    loop.token_metrics |= {
        "training/tokens/trained": 8,
        "training/tokens/truncated": 2,
        "training/limits_that_fit/max_response_length": 77,
    }
    loop.fit()
    assert "Limits took 20.0% of the tokens" in caplog.text
    assert "data.max_response_length=77" in caplog.text


def test_trained_rows_are_written_down_as_text(logged, tmp_path):
    """Into trainer.rollout_data_dir, by verl, on a thread of its own."""
    loop = Loop()
    loop.global_steps = 2
    loop._dump_executor, loop._dump_futures = ThreadPoolExecutor(1), []
    loop.tokenizer = SimpleNamespace(
        batch_decode=lambda ids, skip_special_tokens: [str(row.tolist()) for row in ids]
    )
    tensors = {
        "prompts": torch.tensor([[1, 2], [3, 4]]),
        "responses": torch.tensor([[5], [6]]),
        "token_level_scores": torch.tensor([[0.5], [1.0]]),
    }
    columns = {
        "data_id_list": np.array(["d", "d"], dtype=object),
        "rollout_id_list": np.array(["r0", "r1"], dtype=object),
    }
    loop._dump_rows(Rows(tensors, columns, []), str(tmp_path))
    RayPPOTrainer._shutdown_dump_executor(loop)
    first, second = map(json.loads, (tmp_path / "2.jsonl").read_text().splitlines())
    assert (first["input"], first["output"], first["score"]) == ("[1, 2]", "[5]", 0.5)
    assert (second["rollout_id_list"], second["data_id_list"]) == ("r1", "d")


def test_the_daemon_is_made_as_the_configuration_says():
    settings = documented(
        actor_rollout_ref__rollout__temperature=0.8,
        actor_rollout_ref__rollout__top_p=0.95,
        actor_rollout_ref__rollout__val_kwargs={"temperature": 0.6, "top_p": 0.7, "top_k": 5},
        agentlightning={
            "reward_fillna_value": -1.0,
            "llm_timeout_seconds": 7.0,
            "rollout_deadline_seconds": 8.0,
            "failed_rollouts": "zero",
            "sampling": "allow",
            "proxy": {"port": 8123},
            "trace_aggregator": {"level": "trajectory"},
        },
    )
    trainer = object.__new__(AgentLightningTrainer)
    trainer.config = compose(settings, device="cuda").config
    trainer.tokenizer = SimpleNamespace(pad_token_id=None, eos_token_id=9)
    trainer.processor = None
    trainer.store, trainer.llm_proxy, trainer.adapter = "store", "proxy", "adapter"
    trainer.daemon_cls = lambda *arguments, **keywords: (arguments, keywords)
    (port, n), made = trainer.make_daemon()
    rollout = trainer.config.actor_rollout_ref.rollout
    assert (port, n) == (9999, rollout.n)
    assert made["train_information"] == {
        "model": "some/model",
        "served_model": "some/model",
        "temperature": 0.8,
        "top_p": 0.95,
        "top_k": -1,
    }
    assert made["validation_sampling"] == {"temperature": 0.6, "top_p": 0.7, "top_k": 5}
    assert made["max_tokens"] == trainer.config.data.max_response_length
    assert made["pad_token_id"] == 9
    assert (made["reward_fillna_value"], made["failed_rollouts"]) == (-1.0, "zero")
    assert (made["llm_timeout_seconds"], made["rollout_deadline_seconds"]) == (7.0, 8.0)
    assert (made["sampling"], made["mode"]) == ("allow", "v1")
    assert made["trace_aggregator"]["level"] == "trajectory"
    documented_proxy = trainer.config.agentlightning.proxy
    assert made["proxy_settings"] == {**documented_proxy, "port": 8123}
    assert made["proxy_settings"]["host"] == "127.0.0.1"
    assert made["proxy_settings"]["max_body_bytes"] == 128 * 1024**2
    assert (made["store"], made["llm_proxy"], made["adapter"]) == ("store", "proxy", "adapter")
    assert made["check"] == trainer.check_while_sampling
    assert made["runner_silent_seconds"] == 120.0
    trainer.store = None
    assert trainer.make_daemon()[1]["mode"] == "v0"


@pytest.mark.parametrize("setting", [{"credit": "last_call"}, {"rollout_hook": "os.path:join"}])
def test_credit_needs_a_daemon_that_knows_of_it(setting):
    trainer = object.__new__(AgentLightningTrainer)
    trainer.config = compose(documented(agentlightning=setting), device="cuda").config
    trainer.tokenizer = SimpleNamespace(pad_token_id=0)
    trainer.processor = trainer.store = trainer.llm_proxy = trainer.adapter = None
    trainer.daemon_cls = lambda port, n, check=None, **_: None
    trainer.make_daemon()
    trainer.daemon_cls = type("Old", (), {"__init__": lambda self, port, n: None})
    with pytest.raises(TypeError, match=r"need a daemon that takes `credit`.*Old"):
        trainer.make_daemon()


def test_servers_that_do_not_fall_asleep_end_the_run(monkeypatch):
    loop = Loop()
    loop.config.agentlightning.deadlines.sleep_seconds = 0.2
    rows = SimpleNamespace(batch={}, non_tensor_batch={})
    monkeypatch.setattr(module, "replace", lambda *_, **__: None)
    loop.config.data = {"max_prompt_length": 4, "max_response_length": 4}
    loop.servers_alive = module.ServersAlive([], [], loop.deadlines().server_silent)
    loop.agent_mode_daemon = FakeDaemon(loop.events)
    loop.agent_mode_daemon.last_batch = None
    loop.agent_mode_daemon.get_train_data_batch = lambda **_: (rows, {})
    loop.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: time.sleep(60))
    loop.global_steps = 1
    with pytest.raises(
        TimeoutError,
        match=r"putting the servers to sleep did not finish within 0\.2 s \(agentlightning\.",
    ):
        AgentLightningTrainer.sample(loop, {"task": np.arange(2)})


def test_a_daemon_class_gets_the_keywords_it_takes():
    keywords = {"check": 1, "sampling": 2}

    class Old:
        def __init__(self, port: int, train_rollout_n: int) -> None: ...

    class Passing(AgentModeDaemon):
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    assert module._accepted_keywords(Old, keywords) == {}
    assert module._accepted_keywords(Passing, keywords) == keywords
    assert module._accepted_keywords(AgentModeDaemon, keywords) == keywords
