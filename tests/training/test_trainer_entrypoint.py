"""What surrounds a run: the event loop it is called in, signals, Ray's start and placements."""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import transformers
from omegaconf import OmegaConf

import support.verl_trainer_imports  # noqa: F401

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # litellm's
    from agl_fast.verl import entrypoint, preflight, ray_cluster

from agl_fast.proxy.answer_checks import ModelLimits
from agl_fast.verl.config.checks import run_checks
from agl_fast.verl.supervision.deadlines import OWN_CONFIG
from agl_fast.verl.supervision.interrupts import Interrupts, interruptible
from agl_fast.verl.supervision.run_scope import RunScope
from agl_fast.verl.supervision.waits import Limit


async def called_in_a_loop(function: Any) -> Any:
    return function()


def test_an_algorithm_may_run_loops_although_it_is_called_in_one():
    async def answer() -> int:
        return 42

    def algorithm() -> int:
        with entrypoint.outside_event_loop():
            return asyncio.run(answer())

    assert asyncio.run(called_in_a_loop(algorithm)) == 42

    async def still_running() -> bool:
        algorithm()
        await asyncio.sleep(0)
        return asyncio.get_running_loop().is_running()

    assert asyncio.run(still_running())


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_the_first_signal_ends_what_runs_in_a_loop_that_stands_still(number, expected):
    ended = []

    def algorithm() -> None:
        try:
            with entrypoint.interruptible():
                os.kill(os.getpid(), number)
                time.sleep(30)
        except expected:
            ended.append(True)

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(called_in_a_loop(algorithm))
    assert ended == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def terminated_after_ray_init() -> None:
    with interruptible() as interrupts:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as ray.init does with its own
        interrupts.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)


def test_sigterm_comes_to_who_listened_before_and_is_taken_back_from_who_took_it():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with pytest.raises(SystemExit):
            terminated_after_ray_init()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


@pytest.mark.parametrize("reaped", [True, False])
def test_ray_is_lost_once_a_process_of_it_is_dead(reaped):
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    interrupts = Interrupts()
    daemons = ray_cluster.Daemons([psutil.Process(daemon.pid)], interrupts)
    assert not daemons.is_lost()
    daemon.kill()
    os.waitid(os.P_PID, daemon.pid, os.WEXITED | os.WNOWAIT)
    if reaped:
        daemon.wait()
    assert daemons.is_lost()
    daemon.wait()
    interrupts.terminated = True
    assert not ray_cluster.Daemons(
        [], interrupts
    ).is_lost()  # another's cluster is not in the group


def test_a_run_on_another_thread_says_that_it_cannot_be_interrupted(caplog):
    def run() -> None:
        with entrypoint.interruptible():
            pass

    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert "main_thread='algorithm'" in caplog.text


def config(**ray_init: Any) -> Any:
    ours = OmegaConf.load(OWN_CONFIG)
    return OmegaConf.merge(ours, OmegaConf.create({"ray_kwargs": {"ray_init": ray_init}}))


def test_a_cluster_of_its_own_is_local(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    variables = {"env_vars": {"TORCHDYNAMO_DISABLE": "1"}}
    options = ray_cluster._init_options(
        config(num_cpus=16, num_gpus=None, runtime_env=variables), Path("/short")
    )
    assert options["address"] == "local"
    assert options["num_cpus"] == 16
    assert "num_gpus" not in options
    assert options["_temp_dir"] == "/short"
    environment = options["runtime_env"]["env_vars"]
    assert environment["TORCHDYNAMO_DISABLE"] == "1"
    assert "TOKENIZERS_PARALLELISM" in environment  # verl's


def test_vllm_waits_for_its_engine_as_long_as_the_run_does(monkeypatch):
    monkeypatch.delenv(ray_cluster.READY_VARIABLE, raising=False)
    settings = config()
    settings.agentlightning.deadlines.start_seconds = 5000.5

    def variables(**ray_init: Any) -> Any:
        settings.ray_kwargs.ray_init = ray_init
        return ray_cluster._init_options(settings, Path("/short"))["runtime_env"]["env_vars"]

    assert variables()[ray_cluster.READY_VARIABLE] == "5001"
    of_user = {"runtime_env": {"env_vars": {ray_cluster.READY_VARIABLE: "60"}}}
    assert variables(**of_user)[ray_cluster.READY_VARIABLE] == "60"
    monkeypatch.setenv(ray_cluster.READY_VARIABLE, "70")
    assert ray_cluster.READY_VARIABLE not in variables()


def test_local_is_a_new_cluster_although_another_is_there(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    options = ray_cluster._init_options(config(address="local", num_cpus=16), Path("/short"))
    assert options["address"] == "local"
    assert options["num_cpus"] == 16
    assert options["_temp_dir"] == "/short"


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_cluster_that_is_there_keeps_its_resources(monkeypatch, by_variable):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    address = {"address": "10.0.0.1:6379"}
    if by_variable:
        monkeypatch.setenv("RAY_ADDRESS", address.pop("address"))
    options = ray_cluster._init_options(
        config(num_cpus=16, log_to_driver=True, **address), Path("/short")
    )
    assert options.get("address") == address.get("address")
    assert "num_cpus" not in options
    assert "_temp_dir" not in options
    assert options["log_to_driver"] is True


def test_a_start_that_timed_out_is_tried_again(monkeypatch):
    tried = []

    def init(**_: Any) -> None:
        tried.append(True)
        if len(tried) < 3:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray_cluster.ray, "init", init)
    ray_cluster._start({})
    assert len(tried) == 3

    def refuse(**_: Any) -> None:
        raise ValueError("no such option")

    monkeypatch.setattr(ray_cluster.ray, "init", refuse)
    with pytest.raises(ValueError, match="no such option"):
        ray_cluster._start({})


def test_a_placement_that_does_not_come_names_what_is_missing(monkeypatch):
    table = {
        "made": {"state": "CREATED", "bundles": {0: {"CPU": 3.0}}},
        "waits": {"state": "PENDING", "bundles": {0: {"CPU": 3.0, "GPU": 1.0}, 1: {"GPU": 1.0}}},
    }
    others = {"another user's": {"state": "PENDING", "bundles": {0: {"CPU": 99.0}}}}
    tables = [others]
    monkeypatch.setattr(ray_cluster, "placement_group_table", lambda: tables[-1])
    free, there = {"CPU": 8.0, "GPU": 1.0}, {"CPU": 11.0, "GPU": 1.0}
    monkeypatch.setattr(ray_cluster.ray, "available_resources", lambda: free)
    monkeypatch.setattr(ray_cluster.ray, "cluster_resources", lambda: there)
    placements, impatient = (ray_cluster.Placements(Limit(limit)) for limit in (600.0, 0.0))
    tables.append(others | table)
    placements()
    impatient()
    time.sleep(0.01)
    placements()
    with pytest.raises(RuntimeError, match="needs GPU 2, available 1 of 1"):
        impatient()
    table["waits"]["state"] = "CREATED"
    placements()


class PlacementGroup:
    """As Ray's: there once the cluster has room for it."""

    made: list[PlacementGroup]
    removed: list[PlacementGroup]
    free: dict[str, float]

    def __init__(self, bundles: list[dict[str, float]], *, strategy: str) -> None:
        assert strategy == "STRICT_PACK"
        self.bundle_specs = bundles
        self.made.append(self)

    def wait(self, seconds: float) -> bool:
        total: collections.Counter[str] = collections.Counter()
        for bundle in self.bundle_specs:
            total.update(bundle)
        if all(self.free[name] >= amount for name, amount in total.items()):
            return True
        time.sleep(seconds)
        return False


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> type[PlacementGroup]:
    """A cluster that is there, joined."""

    class Group(PlacementGroup):
        made: list[PlacementGroup] = []  # noqa: RUF012
        removed: list[PlacementGroup] = []  # noqa: RUF012
        free = {"CPU": 1.0, "GPU": 1.0}  # noqa: RUF012

    ray = ray_cluster.ray
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 16.0, "GPU": 1.0})
    monkeypatch.setattr(ray, "available_resources", lambda: Group.free)
    monkeypatch.setattr(ray_cluster, "placement_group", Group)
    monkeypatch.setattr(ray_cluster, "remove_placement_group", Group.removed.append)
    monkeypatch.setattr(ray_cluster, "ROOM_CHECK_SECONDS", 0.05)
    return Group


def joined(*, n_gpus: int = 1, room_seconds: float = 0.2) -> Any:
    settings = config(address="10.0.0.1:6379")
    settings.trainer = {"nnodes": 1, "n_gpus_per_node": n_gpus}
    settings.agentlightning.deadlines.room_seconds = room_seconds
    return ray_cluster.ray_cluster(settings, RunScope("run", Path("/short"), []), Interrupts())


@pytest.mark.parametrize("n_cpus", [1, 3])
def test_a_cluster_without_room_is_said_at_once_and_ends_the_run_soon(cluster, caplog, n_cpus):
    """verl would wait for three CPUs a GPU, or with them, for the CPU of its server."""
    cluster.free["CPU"] = float(n_cpus)
    with pytest.raises(RuntimeError) as raised, joined():
        raise AssertionError("nothing starts")
    for said in (str(raised.value), caplog.text):
        assert "the run needs CPU: 4, GPU: 1" in said
        assert f"needs CPU 4, available {n_cpus} of 16" in said
    assert len(caplog.records) == 1
    assert cluster.removed == cluster.made


def test_a_cluster_that_grows_or_becomes_free_is_waited_for(cluster, caplog):
    grows = threading.Timer(1.0, cluster.free.update, [{"CPU": 4.0}])
    grows.start()
    with joined(room_seconds=60.0):
        assert cluster.removed == cluster.made
    grows.join()
    assert len(cluster.made) == 1
    assert "waiting 60 s (agentlightning.deadlines.room_seconds)" in caplog.text


def test_what_was_reserved_is_free_again_when_the_run_starts(cluster, monkeypatch):
    """verl asks at once, and Ray takes its time."""
    seen: list[dict[str, float]] = []
    cluster.free.update(CPU=4.0)

    def available() -> dict[str, float]:
        seen.append({"CPU": 4.0} | ({"GPU": 1.0} if len(seen) >= 2 else {}))
        return seen[-1]

    monkeypatch.setattr(ray_cluster.ray, "available_resources", available)
    with joined():
        assert cluster.removed == cluster.made
        assert seen[-1] == {"CPU": 4.0, "GPU": 1.0}
    assert len(seen) == 3


def test_room_for_every_gpu_of_a_node_and_a_server(cluster):
    cluster.free.update(CPU=7.0, GPU=2.0)
    with joined(n_gpus=2):
        (group,) = cluster.made
    gpu = {"CPU": 3.0, "GPU": 1.0}
    assert group.bundle_specs == [gpu, gpu, {"CPU": 1.0}]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("algorithm.adv_estimator", "remax"),
        ("algorithm.rollout_correction", {"bypass_mode": True, "loss_type": "reinforce"}),
        ("algorithm.use_pf_ppo", True),
        ("ray_kwargs.ray_init.num_cpus", 3),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(key, value, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(preflight, "get_device_name", lambda: "cpu")
    refused = OmegaConf.create(
        {
            "algorithm": {"adv_estimator": "grpo"},
            "actor_rollout_ref": {"actor": {"policy_loss": {}}},
            "critic": {"enable": False},
            "ray_kwargs": {"ray_init": {}},
            "trainer": {"nnodes": 1, "n_gpus_per_node": 1, "device": "cpu"},
        }
    )
    OmegaConf.update(refused, key, value, force_add=True)
    with pytest.raises(ValueError, match=key.split(".")[-1]):
        run_checks(refused, (preflight.check_config, preflight.check_cpus))


def model_with(config: Any, end_id: int | None = 7) -> Any:
    """As verl's HFModelConfig."""
    return SimpleNamespace(hf_config=config, tokenizer=SimpleNamespace(eos_token_id=end_id))


def test_what_the_answers_of_the_servers_are_held_against():
    qwen = transformers.Qwen2Config(vocab_size=151936, max_position_embeddings=32768)
    assert entrypoint.model_limits(model_with(qwen, 151645), None) == ModelLimits(
        vocabulary_size=151936, context_length=32768, end_ids=frozenset({151645})
    )
    # What the servers are told comes before the model's own.
    limits = entrypoint.model_limits(model_with(qwen, 0), 4096, 512)
    assert limits == ModelLimits(151936, 4096, frozenset({0}), 512)
    assert entrypoint.model_limits(model_with(qwen, None), 4096).end_ids == frozenset()


def test_a_model_with_images_has_the_limits_of_its_language_model():
    text = {"vocab_size": 262208, "max_position_embeddings": 131072}
    gemma = transformers.Gemma3Config(text_config=text)
    assert not hasattr(gemma, "max_position_embeddings")
    assert entrypoint.model_limits(model_with(gemma, 1), None) == ModelLimits(
        262208, 131072, frozenset({1})
    )


def test_a_model_that_names_no_context_has_none():
    bloom = transformers.BloomConfig(vocab_size=50)
    limits = entrypoint.model_limits(model_with(bloom), None)
    assert (limits.vocabulary_size, limits.context_length) == (50, None)


@pytest.mark.parametrize(
    ("mode", "saved", "said"),
    [
        ("auto", "4", "Step 4 is saved in {}: the same command continues from it (trainer.res"),
        ("disable", "4", "Step 4 is saved in {}: trainer.resume_mode=auto continues from it"),
        ("auto", None, "No step is saved yet (trainer.save_freq=2)"),
    ],
)
def test_an_ended_run_says_which_step_is_saved_and_how_to_go_on(tmp_path, mode, saved, said):
    if saved is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(saved)
    trainer = {"default_local_dir": str(tmp_path), "save_freq": 2, "resume_mode": mode}
    how = entrypoint.how_to_go_on(OmegaConf.create({"trainer": trainer}))
    assert how.startswith(said.format(tmp_path / "global_step_4"))
    trainer["save_freq"] = -1
    assert entrypoint.how_to_go_on(OmegaConf.create({"trainer": trainer})) == ""
