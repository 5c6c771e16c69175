"""Replay a recording through the trainer's own code."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# First: it disables litellm's download when agentlightning imports it.
import agl_fast.rollouts  # isort: skip

import torch
from omegaconf import OmegaConf

import agl_fast
from agl_fast.recording import Recording, read_recording
from agl_fast.rollouts.training_rows import TrainingRows
from agl_fast.rows.options import header_to_config
from agl_fast.rows.token_summary import TokenSummary
from agl_fast.training.credit import credit_assignment
from agl_fast.training.run_recording import token_summary
from agl_fast.training.step_metrics import configured_widths
from agl_fast.verl.config import compose
from agl_fast.verl.config.user_settings import leaves

# For recordings without settings.
_ADVANTAGES = {"algorithm": {"adv_estimator": "grpo"}}
# Paths and resources of the recorded run.
_NOT_REPLAYED = (
    "agentlightning.record_dir",
    "agentlightning.trace_aggregator.mismatch_log_dir",
    "trainer.logger",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
)


@dataclass(frozen=True, eq=False)
class Replay:
    """Result of a replay. ``print`` shows it.

    Attributes:
        recording: as read.
        batch: its rows.
        metrics: ``training/*``, and with a model those of the step.
        summary: sampled tokens by class, in words.
        weights: after the step, by name; empty without a model.
        fingerprint: SHA-256 of the weights; None without a model.
        seconds: durations of the step's parts, by name as in ``timing_s/*``.
    """

    recording: Recording
    batch: agl_fast.Batch
    metrics: Mapping[str, float]
    summary: TokenSummary
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    fingerprint: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        rollouts = self.recording.rollouts
        n_calls = sum(len(rollout.calls) for rollout in rollouts)
        shape = "×".join(map(str, self.batch.tensors["input_ids"].shape))
        yield (
            f"{self.recording.path}: {len(rollouts)} rollouts, {n_calls} calls, "
            f"{len(self.batch)} rows ({shape})"
        )
        yield str(self.summary)
        for name in sorted(self.metrics):
            yield f"{name}: {self.metrics[name]:.6g}"
        if self.fingerprint is not None:
            yield f"weights after the step: sha256 {self.fingerprint}"


def replay(
    path: str | os.PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    reference: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> Replay:
    """Rebuild a recording's rows; with a model, repeat the training step.

    On one machine's CPU, the same recording, settings, model and seed give a bit-identical update.

    Args:
        path: of the recording.
        overrides: tree of settings laid over the recorded ones. A recording without settings is
            trained with GRPO, all rollouts in one mini-batch.
        model: folder of the weights before the step. None: no step.
        reference: folder of the reference policy, if the settings use one; None: the model.
        seed: of all random generators.

    Raises:
        OSError, RecordingError: the file cannot be read, or is not a valid recording.
        TypeError, ValueError: a setting, or a recorded call, is wrong; the message names it.
        EmptyBatchError: no call has a row.
    """
    recording = read_recording(path)
    settings = OmegaConf.create(dict(overrides or {}))
    if model is not None:
        OmegaConf.update(settings, "actor_rollout_ref.model.path", os.fspath(model), force_add=True)
    config = replayed_config(recording, OmegaConf.to_container(settings))
    rows = _rows(recording, config)
    batch = rows.build(*configured_widths(config), "cpu")
    metrics = {
        **batch.metrics,
        **{f"training/{name}": n for name, n in rows.counts.items()},
    }
    summary = token_summary(config)
    summary.add(metrics)
    if model is None:
        return Replay(recording, batch, metrics, summary)
    return _with_step(
        Replay(recording, batch, metrics, summary),
        config,
        str(Path(model)),
        str(Path(reference or model)),
        seed,
    )


def _rows(recording: Recording, config: Any) -> TrainingRows:
    ours = config.agentlightning
    rows = TrainingRows(
        {**OmegaConf.to_container(ours.trace_aggregator), "mismatch_log_dir": None},
        ours.failed_rollouts,
        credit=credit_assignment(ours),
        tokenizer=None,
        pad_token_id=(recording.about.get("rows") or {}).get("pad_token_id", 0),
        reward_fillna_value=ours.reward_fillna_value,
    )
    for rollout in recording.rollouts:
        rows.add(rollout)
    return rows


def _with_step(built: Replay, config: Any, model: str, reference: str, seed: int) -> Replay:
    # Imported late: only a step needs verl's engine.
    from agl_fast.tools.replay.one_process import OneProcess, fingerprint, one_process
    from agl_fast.training import ppo_step

    if config.critic.enable:
        raise ValueError(
            f"critic.enable=True (algorithm.adv_estimator={config.algorithm.adv_estimator}): "
            "expected no critic, as a recording has no values of one"
        )
    needs_reference = (
        config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss
    )
    with one_process():
        workers = OneProcess(config, model, reference if needs_reference else None, seed=seed)
        step = ppo_step(
            built.batch,
            workers.groups,
            config,
            n_rollouts=len(built.recording.rollouts),
            global_step=int(built.recording.about.get("step", 1)),
            kl_controller=_kl_controller(config),
        )
        weights = workers.weights()
    return Replay(
        built.recording,
        built.batch,
        {**built.metrics, **step.metrics},
        built.summary,
        weights,
        fingerprint(weights),
        step.seconds,
    )


def _kl_controller(config: Any) -> Any:
    if not config.algorithm.use_kl_in_reward:
        return None
    from verl.trainer.ppo.core_algos import get_kl_controller

    return get_kl_controller(config.algorithm.kl_ctrl)


def replayed_config(recording: Recording, overrides: Mapping[str, Any]) -> Any:
    """Compose the recorded settings with the user's overrides, resolved, for one process.

    Raises:
        TypeError, ValueError: a setting is invalid; the message names the key.
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
    # Recorded keys may be unknown to this version; an unknown override is an error.
    accepted = [key for key, _ in leaves(OmegaConf.to_container(settings))]
    merged = OmegaConf.merge(settings, OmegaConf.create(dict(overrides)))
    config = compose(merged, added=accepted).config
    OmegaConf.resolve(config)
    return config


def _of_groups(recording: Recording) -> dict[str, Any]:
    """Settings that put all rollouts into one mini-batch, whatever the group sizes."""
    n_rollouts = max(1, len(recording.rollouts))
    n_groups = max(1, len({rollout.data_id for rollout in recording.rollouts}))
    return {
        "data": {"train_batch_size": n_groups},
        "actor_rollout_ref": {
            "actor": {"ppo_mini_batch_size": n_groups, "use_dynamic_bsz": True},
            "rollout": {"n": -(-n_rollouts // n_groups), "log_prob_micro_batch_size_per_gpu": 1},
        },
    }
