"""A run with asynchronous collection, without Ray or models: its weights are what it has trained.

python -m support.collected_run FOLDER MODE   # resumes from FOLDER's last checkpoint
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

from torchdata.stateful_dataloader import StatefulDataLoader

from agl_fast.training.datasets import Samples, columns_of
from agl_fast.training.step_rows import Rows
from support.daemon_runs import Run, hello, new_daemon, new_store, scripted_runners
from support.fake_openai_server import FakeOpenAIServer
from support.training_loop import Loop, agent_lightning

N_SAMPLES, BATCH, EPOCHS, N_ROLLOUTS = 12, 3, 3, 2
N_STEPS = N_SAMPLES * EPOCHS // BATCH


def agent(run: Run) -> float:
    """Calls between pauses of random length, a few of them long."""
    texts = ["x"]
    for _ in range(random.choice([1, 2, 3])):
        run.ask(*texts)
        texts += ["hello", "y"]
        time.sleep(random.choice([0.0, 0.0, 0.01, 0.15]))
    return random.random()


class CollectedLoop(Loop):
    """Trains sample numbers.

    Attributes:
        trained: (step, sample number, oldest version) of every trained group, in order.
    """

    def __init__(self, folder: Path, fake: FakeOpenAIServer, store: Any, **collection: Any) -> None:
        super().__init__(
            total_training_steps=N_STEPS,
            total_epochs=EPOCHS,
            val_before_train=False,
            default_local_dir=str(folder),
            resume_mode="auto",
            save_freq=1,
        )
        self.config.data = {"train_batch_size": BATCH, "max_prompt_length": 64}
        self.config.data.max_response_length = 64
        self.config.algorithm = {"filter_groups": collection.pop("filter_groups", None)}
        self.config.actor_rollout_ref.rollout.n = N_ROLLOUTS
        settings = {
            "mode": "partial",
            "oversample": 2.0,
            "max_staleness": 2,
            "on_stale": "train",
            "drain_seconds": 0.02,
        }
        self.config.agentlightning.collection = {**settings, **collection}
        self.train_dataloader = StatefulDataLoader(
            Samples([{"number": number} for number in range(N_SAMPLES)]),
            batch_size=BATCH,
            collate_fn=columns_of,
            drop_last=True,
        )
        self.validates = False
        self.fake, self.store_in_use = fake, store
        self.folder = folder
        self.trained: list[list[int]] = []
        self.llm_server_manager = SimpleNamespace(
            get_addresses=lambda: [fake.address], server_handles=[]
        )
        self.checkpoint_manager = SimpleNamespace(
            update_weights=lambda step: None, sleep_replicas=lambda: None
        )

    def make_daemon(self) -> Any:
        return new_daemon(
            self.store_in_use, train_rollout_n=N_ROLLOUTS, trace_aggregator={"level": "transition"}
        )

    def _load_checkpoint(self) -> None:
        tracker = self.folder / "last"
        if tracker.is_file():
            self.global_steps = int(tracker.read_text())
            weights = self.folder / f"global_step_{self.global_steps}" / "weights"
            self.trained = json.loads(weights.read_text())

    def _save_checkpoint(self) -> None:
        folder = self.folder / f"global_step_{self.global_steps}"
        assert self.collection is not None
        self.collection.save(folder)
        (folder / "weights").write_text(json.dumps(self.trained))
        following = self.folder / "following"
        following.write_text(str(self.global_steps))
        following.rename(self.folder / "last")

    def learn(self, batch: Any, *, n_rollouts: int) -> Any:
        rows = Rows.of(batch)
        for group in dict.fromkeys(rows.group_of_row):
            of_group = [i for i, each in enumerate(rows.group_of_row) if each == group]
            oldest = min(int(rows.columns["policy_version_min_list"][i]) for i in of_group)
            self.trained.append([self.global_steps, self.numbers[group], oldest])
        time.sleep(0.02)
        return SimpleNamespace(metrics={"actor/loss": 0.0}, rows=None, seconds={}, empty=None)

    @property
    def numbers(self) -> dict[str, int]:
        """Sample numbers by data id."""
        rollouts = self.store_in_use.rollouts.values()
        return {each.input["data_id"]: each.input["number"] for each in rollouts}


def run(folder: Path, **collection: Any) -> CollectedLoop:
    """Train to the end, from the last checkpoint in the folder."""
    alive = lambda *_: MagicMock()  # noqa: E731  # nobody asks the fake server whether it lives
    with FakeOpenAIServer() as fake, patch.object(agent_lightning, "ServersAlive", alive):
        fake.respond = hello
        store = RememberingStore(new_store())
        loop = CollectedLoop(folder, fake, store, **collection)
        with scripted_runners(store, agent, 6):
            loop.fit()
    return loop


class RememberingStore:
    """A store that keeps its rollouts."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.rollouts: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def enqueue_many_rollouts(self, requests: Any) -> Any:
        rollouts = await self._store.enqueue_many_rollouts(requests)
        self.rollouts |= {each.rollout_id: each for each in rollouts}
        return rollouts


if __name__ == "__main__":
    run(Path(sys.argv[1]), mode=sys.argv[2])
