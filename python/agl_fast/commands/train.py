"""`python -m agl_fast key=value …`: a run whose agents are other processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# First: it keeps litellm, which agentlightning imports, off the internet.
from agl_fast.algorithm import VERL  # isort: skip

import agentlightning
from omegaconf import OmegaConf

from agl_fast.commands.dataset_files import load_samples
from agl_fast.commands.overrides import parse_overrides
from agl_fast.commands.wrong_input import wrong_input
from agl_fast.verl.membership import require_free_port


def main(arguments: Sequence[str]) -> int:
    """Train on data.train_files; a LightningStore on agentlightning.store_port gives out rollouts.

    Agents join from processes of their own, on this machine or others: `python -m agl_fast join
    my_agent.py`, where my_agent.py has `agentlightning.Trainer(n_runners=8).fit(agent)`. The store
    listens on the host that AGL_SERVER_HOST names (localhost).
    """
    with wrong_input("train", ValueError, TypeError):
        algorithm = VERL(parse_overrides(arguments))
        data = algorithm.config.data
        train = load_samples(_plain(data.train_files), "data.train_files")
        val = None
        if _is_there(data.val_files):
            val = load_samples(_plain(data.val_files), "data.val_files")
    train_on(algorithm, train, val)
    return 0


def train_on(algorithm: Any, train: list[Any], val: list[Any] | None) -> None:
    """Run the algorithm beside a store, or in mode v0 without one.

    Raises:
        OSError: the store's port is taken; the message names the key.
    """
    ours = algorithm.config.agentlightning
    if ours.mode == "v0":
        algorithm.run(train, val)
        return
    host = os.environ.get("AGL_SERVER_HOST", "localhost")
    require_free_port(host, ours.store_port, "agentlightning.store_port")
    print(
        f"agl_fast: agents join with python -m agl_fast join --port {ours.store_port} my_agent.py",
        flush=True,
    )
    trainer = agentlightning.Trainer(
        algorithm=algorithm,
        tracer=agentlightning.OtelTracer(),  # of runners, which are elsewhere
        strategy={
            "type": "cs",
            "role": "algorithm",
            "server_host": host,
            "server_port": ours.store_port,
        },
    )
    trainer.fit(agentlightning.LitAgent(), train, val_dataset=val)


def _plain(files: Any) -> Any:
    return OmegaConf.to_container(files) if OmegaConf.is_config(files) else files


def _is_there(files: Any) -> bool:
    """False where verl's default names a file that nobody made."""
    default = Path(str(files)).expanduser()
    return files is not None and not (
        isinstance(files, str) and files.startswith("~/data/rlhf/") and not default.exists()
    )
