"""A run, short of models, whose process group is sent SIGTERM: the script of a test.

Prints the mark of its processes, then "training".
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import ray
from omegaconf import OmegaConf

from agl_fast.verl import entrypoint
from agl_fast.verl.supervision.deadlines import OWN_CONFIG
from agl_fast.verl.supervision.leftovers import RUN_VARIABLE


@ray.remote(num_cpus=1)
class Worker:
    def mark(self) -> str:
        return os.environ[RUN_VARIABLE]

    def train(self) -> None:
        while True:
            pass


class Trainer:
    global_steps = 2
    total_training_steps = 9

    def __init__(self, **_: Any) -> None:
        self.resource_pool_manager = SimpleNamespace(resource_pool_dict={})
        self.actor_rollout_wg = SimpleNamespace(workers=[Worker.remote()])

    def init_workers(self) -> None: ...

    def worker_groups(self) -> None: ...

    def fit(self) -> None:
        (worker,) = self.actor_rollout_wg.workers
        ray.get(worker.__ray_ready__.remote())
        print(ray.get(worker.mark.remote()))
        try:
            print("training", flush=True)  # the signal may come at once
            ray.get(worker.train.remote())
        finally:
            print("the loop has ended", flush=True)


def main() -> None:
    for name in ("require_loadable_weights", "set_objectives"):
        setattr(entrypoint, name, lambda *_: None)
    entrypoint.trainer_arguments = lambda *_: {}
    entrypoint.is_refused_as_tree = lambda _: False
    started = {"num_cpus": 4, "num_gpus": 1, "include_dashboard": False}
    started["object_store_memory"] = 80_000_000
    config = OmegaConf.create(
        {
            "agentlightning": {"deadlines": OmegaConf.load(OWN_CONFIG).agentlightning.deadlines},
            "algorithm": {"adv_estimator": "grpo"},
            "critic": {"enable": False},
            "ray_kwargs": {"ray_init": started},
            "trainer": {"nnodes": 1, "n_gpus_per_node": 1, "device": "cpu"},
            "transfer_queue": {"enable": False},
            "global_profiler": {"tool": None, "steps": None},
        }
    )
    entrypoint.run(config=config, train_dataset=[{}], store=None, trainer_cls=Trainer)
    sys.exit("the run has returned")


if __name__ == "__main__":
    main()
