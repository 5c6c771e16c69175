"""verl's actor on its FSDP2 engine for the CPU, without Ray: every rank runs the driver's code."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

import support.verl_trainer_imports  # noqa: F401
from agl_fast.training import WorkerGroups
from agl_fast.verl.config import compose

TEMPERATURE = 0.9
SECONDS = 300  # that two ranks may take


def configured(
    model: Path,
    *,
    n_groups: int,
    group_size: int,
    widths: tuple[int, int],
    actor: Mapping[str, Any],
    algorithm: Mapping[str, Any] | None = None,
    agentlightning: Mapping[str, Any] | None = None,
) -> Any:
    """The whole configuration, resolved."""
    composed = compose(
        {
            "algorithm": {"adv_estimator": "grpo", **(algorithm or {})},
            "data": {
                "train_batch_size": n_groups,
                "max_prompt_length": widths[0],
                "max_response_length": widths[1],
            },
            "actor_rollout_ref": {
                "model": {"path": str(model), "enable_gradient_checkpointing": False},
                "actor": {
                    "ppo_mini_batch_size": n_groups,
                    "use_dynamic_bsz": True,
                    "ppo_max_token_len_per_gpu": max(128, sum(widths)),
                    **actor,
                },
                "rollout": {
                    "n": group_size,
                    "temperature": TEMPERATURE,
                    "log_prob_micro_batch_size_per_gpu": 3,
                },
            },
            "agentlightning": dict(agentlightning or {}),
        },
        device="cpu",
    )
    OmegaConf.resolve(composed.config)
    return composed.config


@contextmanager
def one_rank() -> Iterator[None]:
    """The environment of a process group with this process alone, which is ended afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    of_rank = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "RAY_LOCAL_WORLD_SIZE": 1}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in of_rank.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    try:
        yield
    finally:
        dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def two_ranks(script: Path, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes of `script FOLDER`, in torch's environment; they write rank-….log there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = []
    for rank in range(2):
        of_rank = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 2,
            "RAY_LOCAL_WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
        }
        environment = os.environ | {name: str(value) for name, value in of_rank.items()}
        output = (folder / f"rank-{rank}.log").open("wb")
        ranks.append(
            subprocess.Popen(
                [sys.executable, script, folder], env=environment, stdout=output, stderr=output
            )
        )
        output.close()
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def wait_for(ranks: list[subprocess.Popen[bytes]], folder: Path) -> None:
    for rank, process in enumerate(ranks):
        code = process.wait(SECONDS)
        assert code == 0, (folder / f"rank-{rank}.log").read_text()[-4000:]


def engine_worker(config: Any, worker_cls: type[Any] | None = None) -> Any:
    """verl's training worker with the actor's model and optimiser, on this rank.

    Args:
        worker_cls: None: the one of the platform.
    """
    from agl_fast.tools.replay.one_process import actor_worker
    from agl_fast.verl.platform_cpu.cpu_workers import CpuTrainingWorker

    return actor_worker(config, worker_cls or CpuTrainingWorker)


def critic_worker(config: Any, worker_cls: type[Any] | None = None) -> Any:
    """verl's training worker with the critic's model and optimiser, on this rank."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import TrainingWorkerConfig

    from agl_fast.verl.platform_cpu.cpu_workers import CpuTrainingWorker

    critic = omega_conf_to_dataclass(config.critic)
    engine = critic.engine
    engine.infer_max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    engine.max_token_len_per_gpu = critic.ppo_max_token_len_per_gpu
    worker = (worker_cls or CpuTrainingWorker)(
        TrainingWorkerConfig(
            model_type="value_model",
            model_config=critic.model,
            engine_config=engine,
            optimizer_config=critic.optim,
            checkpoint_config=critic.checkpoint,
        )
    )
    worker.reset()
    return worker


def plain_values(worker: Any, model: Path, batch: Any) -> torch.Tensor:
    """A critic's values of trained tokens, row after row by transformers with its weights."""
    import transformers

    module = transformers.AutoModelForTokenClassification.from_pretrained(
        model, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    )
    weights = worker.engine.module.named_parameters()
    module.load_state_dict({name: each.full_tensor() for name, each in weights}, strict=True)
    module.eval()
    values, tensors = [], batch.tensors
    for row in range(len(batch)):
        real = tensors["attention_mask"][row].bool()
        n_prompt = int(real[: tensors["prompts"].shape[1]].sum())
        trained = tensors["response_mask"][row].bool().nonzero()[:, 0]
        with torch.no_grad():
            of_row = module(tensors["input_ids"][row][real][None]).logits[0, :, 0]
        values.append(of_row[n_prompt - 1 + trained])
    return torch.cat(values)


class EveryRank:
    """Stands for a worker group: this rank computes its share and gets the others' as well.

    Args:
        worker: of this rank, with `infer_batch`, `train_mini_batch` and `set_loss_fn`.
        reference: of this rank, with `infer_batch`.
    """

    def __init__(self, worker: Any, reference: Any = None) -> None:
        self.worker = worker
        self.reference = reference

    def compute_log_prob(self, rows: Any) -> Any:
        return _everyones(self.worker.infer_batch(_share(rows)))

    def compute_ref_log_prob(self, rows: Any) -> Any:
        return _everyones(self.reference.infer_batch(_share(rows)))

    def update_actor(self, rows: Any) -> Any:
        return self.worker.train_mini_batch(_share(rows))

    def set_loss_fn(self, loss: Any) -> None:
        self.worker.set_loss_fn(loss)

    def trains_trees(self) -> list[bool]:
        return [_trains_trees(part) for part in (self.worker, self.reference) if part is not None]


class EveryRanksCritic:
    """Stands for the critic's worker group, whose answers are promises."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def infer_batch(self, rows: Any) -> Any:
        values = _everyones(self.worker.infer_batch(_share(rows)))
        return SimpleNamespace(get=lambda: values)

    def train_mini_batch(self, rows: Any) -> Any:
        metrics = self.worker.train_mini_batch(_share(rows))
        return SimpleNamespace(get=lambda: metrics)

    def set_loss_fn(self, loss: Any) -> None:
        self.worker.set_loss_fn(loss)

    def trains_trees(self) -> list[bool]:
        return [_trains_trees(self.worker)]


def worker_groups(worker: Any, reference: Any = None, critic: Any = None) -> WorkerGroups:
    group, n_ranks = EveryRank(worker, reference), dist.get_world_size()
    return WorkerGroups(
        group,
        n_ranks,
        reference=None if reference is None else group,
        critic=None if critic is None else EveryRanksCritic(critic),
        n_critic_ranks=n_ranks,
    )


def _trains_trees(worker: Any) -> bool:
    return hasattr(worker, "trains_trees") and worker.trains_trees()


def _share(rows: Any) -> Any:
    from verl.utils import tensordict_utils as tu

    n_ranks = dist.get_world_size()
    return rows if n_ranks == 1 else tu.chunk_tensordict(rows, n_ranks)[dist.get_rank()]


def _everyones(output: Any) -> Any:
    """The nested values of all ranks, one after the other."""
    from verl.utils import tensordict_utils as tu

    if dist.get_world_size() == 1:
        return output
    names = [name for name in list(output.keys()) if isinstance(tu.get(output, name), torch.Tensor)]
    mine = {name: [row.clone() for row in tu.get(output, name).unbind()] for name in names}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    values = {
        name: torch.nested.as_nested_tensor(
            [row for of_rank in of_ranks for row in of_rank[name]], layout=torch.jagged
        )
        for name in names
    }
    return tu.get_tensordict(values, {"metrics": tu.get(output, "metrics")})
