"""Where a checkpoint's weights lie, and how its shards go together."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

LATEST = "latest_checkpointed_iteration.txt"
_FSDP_CONFIG = "fsdp_config.json"


def actor_folder(checkpoint: Path) -> Path:
    """The actor's folder.

    Args:
        checkpoint: that folder, or `global_step_N` around it, or the run's folder, of which the
            latest step is taken.

    Raises:
        FileNotFoundError: there is none.
    """
    candidates = [checkpoint, checkpoint / "actor"]
    latest = checkpoint / LATEST
    if latest.is_file():
        candidates.append(checkpoint / f"global_step_{latest.read_text().strip()}" / "actor")
    for folder in candidates:
        if (folder / _FSDP_CONFIG).is_file():
            return folder
    raise FileNotFoundError(
        f"{checkpoint}: expected a checkpoint of verl's FSDP actor (a folder with {_FSDP_CONFIG}, "
        f"global_step_N, or a run's folder with {LATEST})"
    )


def whole_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The actor's weights by name, as they were trained.

    Raises:
        OSError, ValueError: a shard is missing, or they do not fit together.
    """
    world_size = int(json.loads((folder / _FSDP_CONFIG).read_text())["world_size"])
    shards = [_shard(folder, world_size, rank) for rank in range(world_size)]
    names = list(shards[0])
    if any(shard.keys() != shards[0].keys() for shard in shards):
        raise ValueError(f"{folder}: the shards name different weights")
    # One by one out of the shards, so that no more than one weight is there twice.
    return {name: _whole(name, [shard.pop(name) for shard in shards]) for name in names}


def _shard(folder: Path, world_size: int, rank: int) -> dict[str, Any]:
    path = folder / f"model_world_size_{world_size}_rank_{rank}.pt"
    try:
        # Tensors and DTensors only: the file runs no code.
        shard: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors, and loading it could run code: {error}"
        ) from error
    return shard


def _whole(name: str, parts: Sequence[Any]) -> torch.Tensor:
    if not isinstance(parts[0], DTensor):
        first: torch.Tensor = parts[0]
        if any(not torch.equal(first, part) for part in parts[1:]):
            raise ValueError(f"{name}: expected the same values on every rank")
        return first
    cuts = [each for each in parts[0].placements if not isinstance(each, Replicate)]
    if not cuts:
        return parts[0].to_local()
    cut = cuts[0]
    if len(cuts) > 1 or not isinstance(cut, Shard) or type(cut) is not Shard:
        raise ValueError(f"{name}: expected to be cut in one dimension, got {cuts}")
    # With replicas (HSDP) every group of ranks has all parts: one group's are enough.
    group = parts[0].device_mesh.mesh.shape[-1]
    locals_ = [part.to_local() for part in parts[:group]]
    whole = torch.cat(locals_, dim=cut.dim)
    if whole.shape != parts[0].shape:
        raise ValueError(f"{name}: expected {tuple(parts[0].shape)}, got {tuple(whole.shape)}")
    return whole
