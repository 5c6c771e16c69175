"""verl's weight sync between two threads: a receiver that fails ends it with the cause."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import support.verl_trainer_imports  # noqa: F401  # isort: skip
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer

from agl_fast.verl.supervision.load_errors import ReportsLoadErrors

# Three buckets of a megabyte.
WEIGHTS = {name: torch.full((200_000,), i, dtype=torch.float32) for i, name in enumerate("abc")}


class Receiving:
    """What verl's extension does with weights, and no vLLM."""

    def __init__(self, address: str, refused: str | None) -> None:
        self.address = address
        self.refused = refused
        self.loaded: dict[str, float] = {}

    def update_weights_from_ipc(self) -> None:
        receiver = transfer.BucketedWeightReceiver(self.address, torch.device("cpu"), use_shm=True)
        receiver.receive_weights(lambda weights, is_last: self._update_weights(weights))
        if len(self.loaded) < len(WEIGHTS):
            raise AssertionError("the work after loading finds weights missing")

    def _update_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == self.refused:
                raise KeyError(f"no parameter {name}")
            self.loaded[name] = float(weight[0])


class Reporting(ReportsLoadErrors, Receiving): ...


def sync(receiving: Any) -> None:
    """Send on a thread of its own; both sides must come to an end."""
    sender = transfer.BucketedWeightSender(receiving.address, bucket_size_mb=1, use_shm=True)
    sending = threading.Thread(
        target=asyncio.run, args=[sender.async_send_weights(iter(WEIGHTS.items()))], daemon=True
    )
    sending.start()
    try:
        receiving.update_weights_from_ipc()
    finally:
        sending.join(20)
        assert not sending.is_alive()


def test_weights_arrive(tmp_path: Path) -> None:
    receiving = Reporting(f"ipc://{tmp_path}/sync", None)
    sync(receiving)
    assert receiving.loaded == {"a": 0.0, "b": 1.0, "c": 2.0}


@pytest.mark.parametrize("refused", ["a", "b", "c"])
def test_a_receiver_that_fails_ends_the_sync_with_the_cause(tmp_path: Path, refused: str) -> None:
    receiving = Reporting(f"ipc://{tmp_path}/sync", refused)
    with pytest.raises(RuntimeError, match=f"cannot load .*no parameter {refused}"):
        sync(receiving)
    receiving.refused = None
    sync(receiving)  # the next sync starts anew
    assert receiving.loaded["c"] == 2.0


def test_errors_of_other_ways_to_load_pass() -> None:
    with pytest.raises(KeyError, match="no parameter a"):
        Reporting("unused", "a")._update_weights(list(WEIGHTS.items()))


@pytest.mark.filterwarnings("ignore")  # of vLLM and what it imports
def test_extensions_of_vllm_report_and_have_the_methods_that_verl_calls() -> None:
    pytest.importorskip("vllm", reason="needs the extra [cpu] or [verl]")
    from agl_fast.verl.platform_cpu.vllm_extension import CpuWorkerExtension
    from agl_fast.verl.vllm_extension import WorkerExtension

    for extension in (CpuWorkerExtension, WorkerExtension):
        verls = extension.__mro__[extension.__mro__.index(ReportsLoadErrors) + 1]
        assert {"update_weights_from_ipc", "_update_weights"} <= vars(verls).keys()
        assert extension.update_weights_from_ipc is ReportsLoadErrors.update_weights_from_ipc
