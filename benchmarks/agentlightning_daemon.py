"""Agent-lightning 0.3.0's own batch building, read from the installed wheel to be compared with.

`agentlightning.verl` does not import beside verl 0.9 (a name it needs has moved), so `daemon.py`
is loaded by path, with the parts of Agent-lightning that only its servers need replaced by
placeholders. The code that is measured and compared is the wheel's, unchanged.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

VERSION = "0.3.0"

_SERVER_NAMES = {
    "agentlightning": ("LLM", "AgentLightningServer", "NamedResources", "RolloutLegacy"),
    "agentlightning.adapter": (),
    "agentlightning.adapter.triplet": ("TracerTraceToTriplet", "TraceToTripletBase"),
    "agentlightning.llm_proxy": ("LLMProxy", "ModelConfig"),
    "agentlightning.store": (),
    "agentlightning.store.base": ("LightningStore",),
    "agentlightning.types": ("EnqueueRolloutRequest", "Rollout", "RolloutConfig", "Task"),
}


@functools.cache
def daemon_module() -> ModuleType:
    """The wheel's `agentlightning/verl/daemon.py` as a module."""
    installed = importlib.metadata.version("agentlightning")
    if installed != VERSION:
        raise RuntimeError(f"comparing with agentlightning {VERSION}, but {installed} is installed")
    import verl  # noqa: F401  (its plugins must meet the real agentlightning, if any)

    package = importlib.util.find_spec("agentlightning")
    path = Path(package.submodule_search_locations[0]) / "verl" / "daemon.py"
    spec = importlib.util.spec_from_file_location("agentlightning_030_daemon", path)
    module = importlib.util.module_from_spec(spec)
    with _placeholders():
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _placeholders():
    before = {name: sys.modules.get(name) for name in _SERVER_NAMES}
    for name, members in _SERVER_NAMES.items():
        sys.modules[name] = ModuleType(name)
        for member in members:
            setattr(sys.modules[name], member, type(member, (), {}))
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def triplet(prompt_ids: list[int], response_ids: list[int]) -> SimpleNamespace:
    """One call as 0.3.0's daemon reads it."""
    return SimpleNamespace(prompt={"token_ids": prompt_ids}, response={"token_ids": response_ids})


def finished_rollout(
    rollout_id: str, data_id: str, calls: list[tuple[list[int], list[int]]], reward: float | None
) -> SimpleNamespace:
    """A rollout as 0.3.0's daemon keeps it, with the sample it came from."""
    triplets = [triplet(prompt, response) for prompt, response in calls]
    return SimpleNamespace(
        rollout_id=rollout_id, data_id=data_id, triplets=triplets, final_reward=reward
    )


class Daemon:
    """What `AgentModeDaemon.get_train_data_batch` reads of its daemon, without the servers."""

    is_train = True
    _use_mrope = False

    def __init__(
        self,
        rollouts: list[SimpleNamespace],
        *,
        level: str,
        pad_token_id: int,
        reward_fillna_value: float | None = 0.0,
        tokenizer: Any = None,
    ):
        self._completed_rollouts_v0 = {rollout.rollout_id: rollout for rollout in rollouts}
        self._task_id_to_original_sample = {r.rollout_id: {"data_id": r.data_id} for r in rollouts}
        self._total_tasks_queued = len(rollouts)
        self.pad_token_id = pad_token_id
        self.reward_fillna_value = reward_fillna_value
        self.tokenizer = tokenizer
        self.trace_aggregator = {"level": level, "debug": tokenizer is not None}

    def _fillna_reward(self, rollout: SimpleNamespace) -> float:
        return daemon_module().AgentModeDaemon._fillna_reward(self, rollout)

    def get_train_data_batch(self, max_prompt_length: int, max_response_length: int) -> tuple:
        """0.3.0's `(DataProto, metrics)` for these rollouts; its warnings on stdout are dropped."""
        with contextlib.redirect_stdout(io.StringIO()):
            return daemon_module().AgentModeDaemon.get_train_data_batch(
                self, max_prompt_length, max_response_length, torch.device("cpu"), 0
            )


def tensors_of(data_proto: Any) -> dict[str, torch.Tensor]:
    """The tensors of a DataProto as a plain dict."""
    return dict(data_proto.batch.items())


def columns_of(data_proto: Any) -> dict[str, np.ndarray]:
    """The numpy columns of a DataProto."""
    return dict(data_proto.non_tensor_batch)
