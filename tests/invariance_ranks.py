"""One of two data-parallel ranks: python invariance_ranks.py FOLDER, in torch's environment."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl's, torch's and transformers' own
    import invariance


def main(folder: Path) -> None:
    config = OmegaConf.load(folder / "config.yaml")
    dist.init_process_group("gloo")
    learned: dict[Any, invariance.Learned] = {}
    for policy_loss, aggregation in invariance.OBJECTIVES:
        asked = invariance.ask_for(config, policy_loss, aggregation)
        for cut in invariance.TWO_RANKS:
            key = ("plain", policy_loss, aggregation, cut)
            learned[key] = invariance.learned_by_plain_model(cut, asked)
    engines = invariance.Engines(config, folder / "model", folder / "reference")
    for policy_loss, aggregation in invariance.OF_ENGINES:
        asked = invariance.ask_for(config, policy_loss, aggregation)
        for cut in invariance.TWO_RANKS:
            key = ("engine", policy_loss, aggregation, cut)
            learned[key] = engines.learned(cut, asked)
    if dist.get_rank() == 0:
        torch.save(learned, folder / "learned.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
