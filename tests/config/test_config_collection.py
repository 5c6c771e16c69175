"""`agentlightning.collection`: what is refused, and what is filled in."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")

from agl_fast.verl.config.composition import compose
from support.verl_settings import documented

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl and what it imports


def composed(device: str = "cpu", n: int = 4, algorithm: Any = None, **collection: Any) -> Any:
    settings = documented(
        agentlightning__collection=collection,
        actor_rollout_ref__rollout__n=n,
        algorithm={"adv_estimator": "grpo", **(algorithm or {})},
    )
    return compose(settings, device=device)


@pytest.mark.parametrize(
    ("collection", "message"),
    [
        ({"mode": "overlap", "max_staleness": 0, "oversample": 1.0}, "max_staleness=0: .* least 1"),
        ({"mode": "partial", "oversample": 4.0}, r"oversample=4.0: .* max_staleness \+ 1 = 3"),
        ({"mode": "partial", "oversample": 0.5}, "oversample=0.5: expected at least 1"),
        ({"mode": "overlapped"}, "mode='overlapped': expected one of sync, partial, overlap"),
        ({"mode": "partial", "max_staleness": -1}, "max_staleness=-1: expected at least 0"),
        ({"mode": "partial", "on_stale": "wait"}, "on_stale='wait': expected one of train, drop"),
        ({"mode": "partial", "drain_seconds": -1.0}, "drain_seconds=-1.0: expected a finite"),
    ],
)
def test_impossible_values_are_refused(collection, message):
    with pytest.raises(ValueError, match=message):
        composed(**collection)


def test_overlap_needs_servers_on_their_own_devices():
    with pytest.raises(ValueError, match=r"rollout\.nnodes=0: expected at least 1"):
        composed("cuda", mode="overlap")


def test_only_overlap_on_gpus_has_servers_on_other_devices():
    rollout = "actor_rollout_ref__rollout__"
    own = {f"{rollout}nnodes": 1, f"{rollout}checkpoint_engine__backend": "nccl"}
    settings = {"agentlightning__collection__mode": "overlap", "algorithm__adv_estimator": "grpo"}
    found = compose(documented(**own, **settings), device="cuda").config
    assert found.actor_rollout_ref.rollout.nnodes == 1
    for key, value in own.items():
        name = key.replace("__", ".").replace(".", r"\.")
        with pytest.raises(ValueError, match=f"{name}={value!r}: expected .* share the GPUs"):
            compose(documented(**{key: value}), device="cuda")


def test_a_critic_is_refused():
    with pytest.raises(ValueError, match="'gae': expected an estimator without a critic"):
        composed(algorithm={"adv_estimator": "gae"}, mode="partial")


@pytest.mark.parametrize(("mode", "expected"), [("sync", None), ("partial", "token")])
def test_stale_tokens_are_weighted_unless_the_user_chooses(mode, expected):
    assert composed(mode=mode).config.algorithm.rollout_correction.rollout_is == expected
    chosen = composed(algorithm={"rollout_correction": {"rollout_is": "sequence"}}, mode=mode)
    assert chosen.config.algorithm.rollout_correction.rollout_is == "sequence"


def test_group_filtering_is_honoured_with_the_reward():
    filters = {"enable": True, "max_num_gen_batches": 3}
    found = composed(algorithm={"filter_groups": filters}).config
    assert found.algorithm.filter_groups.enable
    for n, metric, message in ((4, "acc", "metric='acc': expected 'reward'"), (1, "reward", "n=1")):
        with pytest.raises(ValueError, match=message):
            composed(n=n, algorithm={"filter_groups": {**filters, "metric": metric}})
