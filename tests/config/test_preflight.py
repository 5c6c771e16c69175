"""`VERL(config)` says what `fit` would end with."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")

import support.verl_trainer_imports  # noqa: F401
from agl_fast.verl.config import compose
from agl_fast.verl.config.choices import check_choices
from agl_fast.verl.preflight import check_before_the_run
from support.verl_settings import documented

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl, vLLM and what they import

ACTOR = "actor_rollout_ref.actor"


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
    ],
)
def test_what_the_run_would_refuse(
    composed: Any, changes: dict[str, object], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match=r"expected|picks|rewards") as caught:
        check_before_the_run(changed(composed, changes), None)
    assert expected in str(caught.value)


def test_a_critic_may_train_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = compose(
        documented(algorithm__adv_estimator="gae", critic__ppo_micro_batch_size_per_gpu=2),
        device="cpu",
    ).config
    assert config.critic.enable is True
    check_before_the_run(config, None)


def test_a_daemon_that_knows_of_no_credit(composed: Any) -> None:
    config = changed(composed, {"agentlightning.credit": "last_call"})
    old = type("Old", (), {"__init__": lambda self, port, n: None})
    with pytest.raises(TypeError, match=r"need a daemon that takes `credit`.*Old"):
        check_before_the_run(config, old)
    check_before_the_run(composed, old)


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
        check_choices(changed(composed, changes))
