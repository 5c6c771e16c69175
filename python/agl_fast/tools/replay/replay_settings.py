"""The configuration under which a recording is replayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from agl_fast.recording import Recording
from agl_fast.rows.options import header_to_config
from agl_fast.verl.config import compose
from agl_fast.verl.config.renamed_keys import leaves

# Where a recording without settings says nothing about how it was learned from.
_ADVANTAGES = {"algorithm": {"adv_estimator": "grpo"}}
# They name places of the run, or what is not there in a replay.
_NOT_REPLAYED = (
    "agentlightning.record_dir",
    "agentlightning.trace_aggregator.mismatch_log_dir",
    "trainer.logger",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
)


def replayed_config(recording: Recording, overrides: Mapping[str, Any]) -> Any:
    """The recorded settings with the user's laid over them; resolved, for one process.

    Raises:
        TypeError, ValueError: they cannot work here; the message names the key.
    """
    rows, recorded = recording.about.get("rows"), recording.about.get("settings")
    settings = OmegaConf.merge(
        OmegaConf.create(header_to_config(rows) if rows else {}),
        OmegaConf.create(recorded or {**_ADVANTAGES, **_of_groups(recording)}),
    )
    OmegaConf.set_struct(settings, False)
    for key in _NOT_REPLAYED:
        group, _, name = key.rpartition(".")
        node = OmegaConf.select(settings, group)
        if node is not None and name in node:
            del node[name]
    # What the run had accepted need not be known here; a misspelt override is an error.
    accepted = [key for key, _ in leaves(OmegaConf.to_container(settings))]
    merged = OmegaConf.merge(settings, OmegaConf.create(dict(overrides)))
    config = compose(merged, added=accepted).config
    OmegaConf.resolve(config)
    return config


def _of_groups(recording: Recording) -> dict[str, Any]:
    """One mini-batch of all rollouts, whatever the groups' sizes."""
    n_rollouts = max(1, len(recording.rollouts))
    n_groups = max(1, len({rollout.data_id for rollout in recording.rollouts}))
    return {
        "data": {"train_batch_size": n_groups},
        "actor_rollout_ref": {
            "actor": {"ppo_mini_batch_size": n_groups, "use_dynamic_bsz": True},
            "rollout": {"n": -(-n_rollouts // n_groups), "log_prob_micro_batch_size_per_gpu": 1},
        },
    }
