"""One of two data-parallel ranks: python fsdp_ranks.py FOLDER, in torch's environment.

The engine for trees under FSDP1 and FSDP2: log-probs of trees and of plain rows, and those after a
step of three mini-batches. Runs on CPUs have FSDP2 only; here FSDP1 shards over gloo, too.
"""

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
    from torch.distributed.fsdp import _init_utils
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from agl_fast.training.step_rows import Rows
    from agl_fast.training.worker_groups import policy_log_probs
    from agl_fast.tree.tree_workers import CpuTreeTrainingWorker
    from agl_fast.verl.platform_cpu.engines import CpuLanguageModelEngine
    from support import engine_workers, invariance
    from support.invariance import Cut

CUTS = {
    "tree": Cut("tree", 2, branched=True, tree_max_tokens=60),
    "trajectory": Cut("trajectory", 3),
}
STRATEGIES = ("fsdp", "fsdp2")


def log_probs(worker: Any, config: Any, cut: Cut) -> torch.Tensor:
    """Of the trained tokens, in the order of rows."""
    rows = Rows.of(invariance.cut_into_rows(cut))
    found, _ = policy_log_probs(rows, engine_workers.worker_groups(worker), config)
    return found["old_log_probs"][rows.response_mask.bool()]


def main(folder: Path) -> None:
    config = OmegaConf.load(folder / "config.yaml")
    config = invariance.ask_for(config, "vanilla", "token-mean")
    dist.init_process_group("gloo")
    CpuLanguageModelEngine._build_fsdp_module = FSDPEngineWithLMHead._build_fsdp_module
    # It wants the first rank's weights to be sent from GPUs.
    _init_utils._check_module_states_for_sync_module_states = lambda module: None
    found: dict[tuple[str, str, str], torch.Tensor] = {}
    for strategy in STRATEGIES:
        config.actor_rollout_ref.actor.strategy = strategy
        config.actor_rollout_ref.actor.fsdp_config.strategy = strategy
        for name, cut in CUTS.items():
            worker = engine_workers.engine_worker(config, CpuTreeTrainingWorker)
            found[strategy, name, "before"] = log_probs(worker, config, cut)
            invariance.learn(cut, engine_workers.worker_groups(worker, worker), config)
            found[strategy, name, "after"] = log_probs(worker, config, cut)
    if dist.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
