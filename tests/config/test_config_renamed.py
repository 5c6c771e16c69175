"""Keys of verl 0.6.1 and Agent-lightning 0.3 that verl 0.9.1 does not read."""

from __future__ import annotations

from typing import Any

import pytest

from support.paths import DATA

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")

from omegaconf import OmegaConf

from agl_fast.verl.config import compose
from agl_fast.verl.config.user_settings import leaves, nested, rename, renamed_keys
from support.verl_settings import DOCUMENTED, documented

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl, vLLM and what they import

OLD_KEYS = (DATA / "verl_0_6_1_keys.txt").read_text().split()
SERVER = "actor_rollout_ref.rollout.agent.custom_async_server"
ASKS_FOR_NOTHING = ("custom_reward_function", "reward_model", "sandbox_fusion")


@pytest.fixture(scope="module")
def config() -> Any:
    return compose(DOCUMENTED, device="cuda").config


def exists(config: Any, key: str) -> bool:
    group, _, name = key.rpartition(".")
    node = OmegaConf.select(config, group) if group else config
    return OmegaConf.is_dict(node) and name in node


def test_every_new_key_exists(config: Any) -> None:
    news = [entry.new for entry in renamed_keys() if entry.new]
    assert news
    assert [new for new in news if not exists(config, new)] == []


def test_entries_move_or_explain() -> None:
    for entry in renamed_keys():
        assert (entry.new is None) != (entry.why is None), entry
        assert entry.why is not None or entry.ignored == (), entry


def test_every_old_key_exists_or_is_in_the_table(config: Any) -> None:
    assert len(OLD_KEYS) > 400
    lost = []
    for key in OLD_KEYS:
        entry = next((entry for entry in renamed_keys() if entry.fits(key)), None)
        if entry is None:
            # verl 0.9.1 lists its legacy reward keys, all null, and does not read them.
            if not exists(config, key) or key.split(".")[0] in ASKS_FOR_NOTHING:
                lost.append(key)
        elif entry.new is not None:
            assert exists(config, entry.new + key.removeprefix(entry.old)), key
    assert lost == []


def test_no_entry_takes_a_key_that_verl_reads(config: Any) -> None:
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    taken = [
        key
        for key, value in leaves(plain)
        for entry in renamed_keys()
        if entry.fits(key) and key.split(".")[0] not in ASKS_FOR_NOTHING
    ]
    # verl still reads these, and agl_fast has no use for them.
    assert [key for key in taken if not key.startswith(SERVER)] == []


def test_moved_key_says_where_it_went() -> None:
    settings = documented(
        critic={"model": {"fsdp_config": {"param_offload": True}}},
        custom_reward_function={"path": "reward.py"},
        ray_init={"num_cpus": 7},
    )
    composed = compose(settings, device="cuda")
    assert composed.config.critic.fsdp.param_offload is True
    assert composed.config.reward.custom_reward_function.path == "reward.py"
    assert composed.config.ray_kwargs.ray_init.num_cpus == 7
    assert "fsdp_config" not in composed.config.critic.model
    moved = "critic.model.fsdp_config.param_offload is called critic.fsdp.param_offload now"
    assert moved in composed.lines


def test_wrong_type_of_a_moved_key_is_named_by_its_new_name() -> None:
    with pytest.raises(TypeError, match=r"critic\.fsdp\.param_offload='yes': expected true or"):
        compose(documented(critic__model__fsdp_config__param_offload="yes"), device="cuda")


def test_server_of_agent_lightning_is_ignored_and_others_are_refused() -> None:
    patched = {"path": "pkg://agentlightning.verl.async_server", "name": "PatchedvLLMServer"}
    composed = compose(
        documented(actor_rollout_ref__rollout__agent__custom_async_server=patched), device="cuda"
    )
    assert OmegaConf.select(composed.config, f"{SERVER}.path") is None
    assert len([line for line in composed.lines if line.startswith(f"{SERVER}.")]) == 2
    with pytest.raises(ValueError, match=r"custom_async_server\.name='Mine': expected not to be"):
        rename({f"{SERVER}.name": "Mine"})


@pytest.mark.parametrize(
    ("key", "nothing", "something", "hint"),
    [
        ("trainer.use_legacy_worker_impl", "auto", "enable", "no legacy workers"),
        ("reward_model.strategy", "fsdp2", "megatron", "reward.reward_model.rollout"),
        ("data.sampler.class_path", None, "a.b", "order"),
        ("actor_rollout_ref.rollout.skip_rollout", False, True, "agents roll out"),
        ("algorithm.rollout_correction.use_policy_gradient", False, True, "loss_type"),
        ("actor_rollout_ref.actor.profiler.tool_config.torch.step_start", 0, 3, "skip_first"),
        ("actor_rollout_ref.ref.model", {}, {"path": "m"}, "actor_rollout_ref.model"),
    ],
)
def test_key_that_is_gone_is_refused_unless_it_asks_for_nothing(
    key: str, nothing: object, something: object, hint: str
) -> None:
    renamed, lines = rename({key: nothing})
    assert renamed == {}
    assert lines[0].startswith(f"{key}={nothing!r} is ignored: ")
    with pytest.raises(ValueError, match="expected not to be set") as caught:
        rename({key: something})
    assert str(caught.value).startswith(f"{key}={something!r}")
    assert hint in str(caught.value)


def test_false_is_not_zero() -> None:
    with pytest.raises(ValueError, match="skip_rollout=0"):
        rename({"actor_rollout_ref.rollout.skip_rollout": 0})


def test_old_and_new_key_must_agree() -> None:
    old, new = "critic.model.fsdp_config.fsdp_size", "critic.fsdp.fsdp_size"
    assert rename({old: 2, new: 2})[0] == {new: 2}
    with pytest.raises(ValueError, match=f"{old}=2: expected 4 or not to be set"):
        rename({old: 2, new: 4})


def test_leaves_and_nested_are_inverse() -> None:
    tree = {"a": {"b": 1, "c": {}}, "d": {"e": {"f": [1]}}, "g": None}
    assert nested(dict(leaves(tree))) == tree
