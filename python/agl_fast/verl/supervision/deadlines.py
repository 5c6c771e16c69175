"""`agentlightning.deadlines`: how long each wait of a run may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import OmegaConf

from agl_fast.verl.config import OWN_CONFIG
from agl_fast.verl.model_files import total_bytes
from agl_fast.verl.supervision.waits import Limit

GROUP = "agentlightning.deadlines"
# Of a model whose files are not on this machine: 70 billion parameters in bfloat16.
UNKNOWN_BYTES = 140 * 10**9
# A deadline that grows with the model: seconds, plus how often its files pass at bytes_per_second.
# Starting: a download, the trainer's copy and the servers'. A checkpoint: float32 parameters, their
# gradients' two moments and the Hugging Face files, of parameters that the files hold in bfloat16.
BY_SIZE = {
    "start_seconds": (1800.0, 3),
    "checkpoint_seconds": (3600.0, 8),
    "sync_seconds": (300.0, 2),
}


@dataclass(frozen=True)
class Deadlines:
    """The limits of a run. `config.yaml` says what each one ends."""

    start: Limit
    room: Limit
    placement: Limit
    checkpoint: Limit
    sync: Limit
    update: Limit
    sleep: Limit
    server_silent: Limit
    enqueue: Limit
    cancel: Limit
    store_answer: Limit
    store_away: Limit
    record: Limit
    leave: Limit

    @classmethod
    def of(cls, config: Any) -> Deadlines:
        """Those of a composed configuration; what it leaves open follows the model's size."""
        settings = OmegaConf.select(config, GROUP)
        return cls.sized(settings, str(OmegaConf.select(config, "actor_rollout_ref.model.path")))

    @classmethod
    def sized(cls, settings: Mapping[str, Any], model: str) -> Deadlines:
        """Those of the group's keys.

        Args:
            settings: the group.
            model: a folder, or a name on the Hugging Face hub.
        """
        limits = {}
        for field in fields(cls):
            name = f"{field.name}_seconds"
            seconds = settings[name]
            if seconds is None:
                least, passes = BY_SIZE[name]
                n_bytes = total_bytes(model) or UNKNOWN_BYTES
                seconds = least + passes * n_bytes / settings["bytes_per_second"]
            limits[field.name] = Limit(float(seconds), f"{GROUP}.{name}")
        return cls(**limits)


def default_deadlines() -> Deadlines:
    """Of a run whose configuration sets none, for a model of unknown size."""
    return Deadlines.sized(OmegaConf.select(OmegaConf.load(OWN_CONFIG), GROUP), "")
