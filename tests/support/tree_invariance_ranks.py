"""One of two data-parallel ranks: python tree_invariance_ranks.py FOLDER, in torch's environment.

The engine's layers are checkpointed, and its logits come in chunks.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl's, torch's and transformers' own
    from agl_fast.tree import scores
    from agl_fast.tree.tree_workers import CpuTreeTrainingWorker
    from support import invariance
    from support.invariance import Cut
    from support.plain_tree_actor import PlainTreeActor

TREES = Cut("tree", 2, branched=True, shuffled=True, tree_max_tokens=60)


def main(folder: Path) -> None:
    config = OmegaConf.load(folder / "config.yaml")
    objectives = [tuple(each) for each in json.loads((folder / "objectives.json").read_text())]
    dist.init_process_group("gloo")
    learned: dict[Any, invariance.Learned] = {}
    for objective in objectives:
        asked = invariance.ask_for(config, *objective)
        learned[("plain", *objective)] = invariance.learned_by_plain_model(
            TREES, asked, actor_cls=PlainTreeActor
        )
    scores.LOGITS_AT_ONCE = 1000
    config.actor_rollout_ref.model.enable_gradient_checkpointing = True
    engines = invariance.Engines(
        config, folder / "model", folder / "reference", CpuTreeTrainingWorker
    )
    for objective in objectives:
        asked = invariance.ask_for(config, *objective)
        learned[("engine", *objective)] = engines.learned(TREES, asked)
    if dist.get_rank() == 0:
        torch.save(learned, folder / "learned.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
