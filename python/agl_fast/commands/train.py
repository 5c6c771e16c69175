"""`python -m agl_fast key=value …`: a run whose agents are other processes."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_fast.commands.wrong_input import wrong_input

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from agl_fast.algorithm import VERL

DESCRIPTION = """\
Train a model on samples from files, behind Agent-lightning's store. Agents join from processes of
their own: python -m agl_fast join --port 4747 my_agent.py

  key=value   a key of verl or agl_fast, as hydra reads it
  +key=value  a key that only your own code reads

Keys that every run needs:
  actor_rollout_ref.model.path=…            the model: a folder, or a name on the Hugging Face hub
  data.train_files=…                        .parquet, .json or .jsonl; [a,b]: several files

Keys that most runs set, with their defaults:
  data.val_files=null                       samples to validate on
  data.train_batch_size=1024                samples of a step
  data.max_prompt_length=512                tokens
  data.max_response_length=512              tokens of an answer
  algorithm.adv_estimator=gae               grpo, rloo, …: without a critic
  actor_rollout_ref.rollout.n=1             rollouts of each sample
  actor_rollout_ref.actor.ppo_mini_batch_size=256
                                            samples of an update
  agentlightning.trace_aggregator.level=transition
                                            what a row is: transition, trajectory, tree
  agentlightning.record_dir=null            a folder that gets all rollouts
  agentlightning.store_port=4747            of the store, on the host AGL_SERVER_HOST (localhost)
  trainer.total_epochs=30                   passes over the samples
  trainer.save_freq=-1                      steps from one checkpoint to the next; -1: none

All keys: docs/configuration.md
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m agl_fast [train] key=value …"
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("settings", nargs="*", help=argparse.SUPPRESS)


def is_setting(word: str) -> bool:
    """Whether the word is `key=value`, `+key=value` or `~key` (refused later, with a reason)."""
    return word.startswith("~") or ("=" in word and not word.startswith("-"))


def run(options: argparse.Namespace) -> int:
    """Train on data.train_files; a LightningStore on agentlightning.store_port gives out rollouts.

    Agents join from processes of their own, on this machine or others: `python -m agl_fast join
    my_agent.py`, where my_agent.py has `agentlightning.Trainer(n_runners=8).fit(agent)`. The store
    listens on the host that AGL_SERVER_HOST names (localhost).
    """
    for word in options.settings:
        if not is_setting(word):
            options.parser.error(f"{word!r}: expected key=value")
    # Only now: verl takes half a minute to load. VERL first: it keeps litellm, which agentlightning
    # imports, off the internet.
    from agl_fast.algorithm import VERL
    from agl_fast.commands.dataset_files import load_samples
    from agl_fast.commands.overrides import parse_overrides

    with wrong_input(options.parser, ValueError, TypeError):
        algorithm = VERL(parse_overrides(options.settings))
        data = algorithm.config.data
        train = load_samples(_plain(data.train_files), "data.train_files")
        val = None
        if _is_there(data.val_files):
            val = load_samples(_plain(data.val_files), "data.val_files")
    train_on(algorithm, train, val)
    return 0


def train_on(algorithm: VERL, train: list[Any], val: list[Any] | None) -> None:
    """Run the algorithm beside a store, or in mode v0 without one.

    Raises:
        OSError: the store's port is taken; the message names the key.
    """
    import agentlightning

    from agl_fast.verl.membership import require_free_port

    ours = algorithm.config.agentlightning
    if ours.mode == "v0":
        algorithm.run(train, val)
        return
    host = os.environ.get("AGL_SERVER_HOST", "localhost")
    require_free_port(host, ours.store_port, "agentlightning.store_port")
    logger.info("agents join with python -m agl_fast join --port %d my_agent.py", ours.store_port)
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
    from omegaconf import OmegaConf

    return OmegaConf.to_container(files) if OmegaConf.is_config(files) else files


def _is_there(files: Any) -> bool:
    """False for the missing file of verl's default."""
    default = Path(str(files)).expanduser()
    return files is not None and not (
        isinstance(files, str) and files.startswith("~/data/rlhf/") and not default.exists()
    )
