"""The engine for trees under FSDP1 and FSDP2, two ranks over gloo, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from agl_fast.tree.tree_workers import CpuTreeTrainingWorker
from support import engine_workers, fsdp_ranks, invariance
from support.paths import SUPPORT

# verl's, torch's and transformers' own.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

IN_FLOAT32 = 5e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    model = invariance.tiny_model(folder / "model", 3)
    OmegaConf.save(invariance.configured(model), folder / "config.yaml")
    return folder


@pytest.fixture(scope="module")
def of_two_ranks(folder: Path) -> dict[Any, torch.Tensor]:
    script = SUPPORT.joinpath("fsdp_ranks.py")
    with engine_workers.two_ranks(script, folder) as ranks:
        engine_workers.wait_for(ranks, folder)
    found: dict[Any, torch.Tensor] = torch.load(folder / "found.pt", weights_only=True)
    return found


@pytest.fixture(scope="module")
def of_one_process(folder: Path, of_two_ranks: Any) -> Iterator[dict[Any, torch.Tensor]]:
    config = invariance.ask_for(OmegaConf.load(folder / "config.yaml"), "vanilla", "token-mean")
    found = {}
    with engine_workers.one_rank():
        dist.init_process_group("gloo")
        for name, cut in fsdp_ranks.CUTS.items():
            worker = engine_workers.engine_worker(config, CpuTreeTrainingWorker)
            found[name, "before"] = fsdp_ranks.log_probs(worker, config, cut)
            invariance.learn(cut, engine_workers.worker_groups(worker, worker), config)
            found[name, "after"] = fsdp_ranks.log_probs(worker, config, cut)
        yield found


@pytest.mark.parametrize("strategy", fsdp_ranks.STRATEGIES)
@pytest.mark.parametrize("cut", sorted(fsdp_ranks.CUTS))
def test_ranks_learn_what_one_process_learns(of_two_ranks, of_one_process, strategy, cut):
    before, after = (of_one_process[cut, when] for when in ("before", "after"))
    assert (after - before).abs().max() > 1e-3
    assert (of_two_ranks[strategy, cut, "before"] - before).abs().max() < IN_FLOAT32
    assert (of_two_ranks[strategy, cut, "after"] - after).abs().max() < 4 * IN_FLOAT32
