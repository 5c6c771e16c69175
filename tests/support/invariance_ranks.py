"""One of two data-parallel ranks: python invariance_ranks.py FOLDER, in torch's environment."""

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
    from support import invariance
    from support.plain_actor import PlainActor


class OfOneRank(PlainActor):
    """Takes its gradient for everyone's, although gradients are averaged."""

    def set_loss_fn(self, loss: Any) -> None:
        def of_one(**arguments: Any) -> tuple[torch.Tensor, dict[str, Any]]:
            value, metrics = loss(**arguments)
            return value / dist.get_world_size(), metrics

        self.loss = of_one


def main(folder: Path) -> None:
    config = OmegaConf.load(folder / "config.yaml")
    objectives = [tuple(each) for each in json.loads((folder / "objectives.json").read_text())]
    dist.init_process_group("gloo")
    learned: dict[Any, invariance.Learned] = {}
    for policy_loss, aggregation in objectives:
        asked = invariance.ask_for(config, policy_loss, aggregation)
        for cut in invariance.TWO_RANKS:
            key = ("plain", policy_loss, aggregation, cut)
            learned[key] = invariance.learned_by_plain_model(cut, asked)
    asked = invariance.ask_for(config, "vanilla", "token-mean")
    learned["mutant"] = invariance.learned_by_plain_model(
        invariance.TWO_RANKS[0], asked, actor_cls=OfOneRank
    )
    engines = invariance.Engines(config, folder / "model", folder / "reference")
    for objective in objectives:
        asked = invariance.ask_for(config, *objective)
        _, cut = invariance.cuts_of_engines(objective)
        learned[("engine", *objective)] = engines.learned(cut, asked)
    if dist.get_rank() == 0:
        torch.save(learned, folder / "learned.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
