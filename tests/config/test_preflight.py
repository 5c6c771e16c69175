"""`VERL(config)` makes every check of a configuration; `fit` adds none."""

from __future__ import annotations

import ast
import inspect
import os
import sys
import textwrap
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")

from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

import agl_fast
import support.verl_trainer_imports  # noqa: F401

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # litellm's
    from agl_fast import algorithm
    from agl_fast.training import step
    from agl_fast.verl import entrypoint, preflight, ray_cluster

from agl_fast.verl.config import checks, compose
from agl_fast.verl.config.checks import run_checks
from agl_fast.verl.preflight import check_run
from support.verl_settings import documented

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl, vLLM and what they import

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"


@pytest.fixture(scope="module")
def composed() -> Any:
    return compose(documented(), device="cpu").config


def changed(composed: Any, changes: dict[str, object]) -> Any:
    config = composed.copy()
    for key, value in changes.items():
        group, _, name = key.rpartition(".")
        node = config
        for part in group.split("."):
            node = node[part]
        node[name] = value
    return config


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"algorithm.adv_estimator": "nonsense"}, "adv_estimator='nonsense': nobody registered it"),
        ({"algorithm.adv_estimator": "gdpo"}, "adv_estimator='gdpo': it needs several rewards"),
        ({f"{ACTOR}.policy_loss.loss_mode": "clip_cov"}, "loss_mode='clip_cov': it picks tokens"),
        ({f"{ACTOR}.policy_loss.loss_mode": "dro"}, "dro_beta=None: expected a number above 0"),
        ({"ray_kwargs.ray_init.num_cpus": 2}, "num_cpus=2: expected at least 4"),
        (
            {f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2},
            "expected a divisor of trainer.nnodes × trainer.n_gpus_per_node = 1",
        ),
        ({f"{CORRECTION}.rollout_is": "tokens"}, "Invalid rollout_is: tokens"),
        (
            {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": -1},
            "upper bound must be positive",
        ),
        ({f"{CORRECTION}.rollout_rs": "seq_k1"}, "expected what verl can compute"),
        (
            {f"{CORRECTION}.rollout_rs": "token_k1"},
            "rollout_rs_threshold must be explicitly provided",
        ),
        (
            {
                f"{CORRECTION}.rollout_rs": "seq_mean_k1",
                f"{CORRECTION}.rollout_rs_threshold": "2_3",
            },
            "expected thresholds on both sides of ratio 1",
        ),
        (
            {
                "trainer.resume_mode": "resume_path",
                "trainer.resume_from_path": "/nowhere/global_step_5",
            },
            "expected an existing folder global_step_N",
        ),
        (
            {"trainer.default_local_dir": f"{__file__}/checkpoints"},
            "test_preflight.py is a file",
        ),
    ],
)
def test_what_the_run_would_refuse(
    composed: Any, changes: dict[str, object], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(preflight, "get_device_name", lambda: "cpu")
    with pytest.raises(ValueError, match=r"expected|picks|rewards") as caught:
        check_run(changed(composed, changes))
    assert expected in str(caught.value)


def test_a_critic_may_train_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = compose(
        documented(algorithm__adv_estimator="gae", critic__ppo_micro_batch_size_per_gpu=2),
        device="cpu",
    ).config
    assert config.critic.enable is True
    monkeypatch.setattr(preflight, "get_device_name", lambda: "cpu")
    check_run(config)


def test_a_daemon_that_knows_of_no_credit() -> None:
    settings = documented(agentlightning__credit="last_call")
    old = type("Old", (), {"__init__": lambda self, port, n: None})
    with pytest.raises(TypeError, match=r"need a daemon that takes `credit`.*Old"):
        agl_fast.VERL(settings, daemon_cls=old)
    agl_fast.VERL(documented(), daemon_cls=old)


def test_the_device_of_this_process(composed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "get_device_name", lambda: "cuda")
    with pytest.raises(ValueError, match=r"trainer\.device='cpu', and verl in this process has ch"):
        check_run(composed)


def test_a_module_of_the_user_registers_its_estimator(
    composed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "module_of_the_user.py").write_text(
        "from verl.trainer.ppo.core_algos import register_adv_est\n\n\n"
        "@register_adv_est('of_the_user')\n"
        "def estimate(*arguments, **options):\n    raise AssertionError\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(preflight, "get_device_name", lambda: "cpu")
    changes: dict[str, object] = {"algorithm.adv_estimator": "of_the_user"}
    with pytest.raises(ValueError, match="nobody registered it"):
        check_run(changed(composed, changes))
    changes["actor_rollout_ref.model.external_lib"] = "no_such_module"
    with pytest.raises(ValueError, match=r"external_lib='no_such_module': expected a module that"):
        check_run(changed(composed, changes))
    changes["actor_rollout_ref.model.external_lib"] = "module_of_the_user"
    try:
        check_run(changed(composed, changes))
    finally:
        del sys.modules["module_of_the_user"]
        del ADV_ESTIMATOR_REGISTRY["of_the_user"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"algorithm.kl_ctrl.type": "steady"}, "one of fixed, adaptive"),
        ({"algorithm.kl_penalty": "k9"}, "one of kl, k1"),
        ({f"{ACTOR}.optim.lr_scheduler_type": "linear"}, "one of constant, cosine"),
        ({f"{ACTOR}.optim.optimizer": "Adamm"}, "a class of torch.optim"),
        ({f"{ACTOR}.fsdp_config.model_dtype": "int8"}, "one of fp32, float32"),
        ({"trainer.resume_mode": "resume_path"}, "a folder global_step_N"),
        ({"trainer.default_hdfs_dir": "hdfs://a/b"}, "trainer.resume_mode=disable"),
    ],
)
def test_words_that_only_workers_would_look_up(
    composed: Any, changes: dict[str, object], expected: str
) -> None:
    with pytest.raises(ValueError, match=f"expected .*{expected}"):
        run_checks(changed(composed, changes), checks.CHECKS)


@pytest.mark.parametrize("module", [checks, preflight, ray_cluster, step])
def test_every_check_is_in_the_list(module: ModuleType) -> None:
    defined = {
        function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if name.startswith("check_") and name != "check_run"
        if function.__module__ == module.__name__
        if list(inspect.signature(function).parameters) == ["config"]
    }
    assert defined
    assert defined <= set(preflight.CHECKS)
    assert len(preflight.CHECKS) == len(set(preflight.CHECKS))


def test_the_constructor_makes_every_check_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def recorded(check: Any) -> Any:
        def run(config: Any) -> list[str]:
            made.append(check)
            return [check.__name__]

        return run

    monkeypatch.setattr(preflight, "CHECKS", tuple(map(recorded, preflight.CHECKS)))
    notices = agl_fast.VERL(documented()).notices
    assert notices[-len(made) :] == [check.__name__ for check in made]
    monkeypatch.undo()
    assert tuple(made) == preflight.CHECKS
    assert made[: len(checks.CHECKS)] == list(checks.CHECKS)


def test_fit_adds_no_check() -> None:
    """Two are repeated: for another process, and for a model that was only on the hub."""
    called = set()
    for function in (algorithm.VERL.run, entrypoint.run, entrypoint.trainer_arguments):
        source = textwrap.dedent(inspect.getsource(function))
        called |= {
            node.func.id
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
    assert {name for name in called if name.startswith("check_")} == {
        "check_device",
        "check_tree_engine",
    }
