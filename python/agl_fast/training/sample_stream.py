"""Samples of the training data, one by one, and what a checkpoint needs to continue with them."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agl_fast.rollouts.batch_runner import samples_of

FILE = "collection.pkl"


class SampleStream:
    """Draw the samples of verl's data loader, epoch after epoch.

    Use it from one thread: while rollouts are collected, the daemon's.

    Args:
        loader: yields batches, columns by name; iterated once per epoch. `save` needs its
            `state_dict`, as of torchdata's StatefulDataLoader.
        n_epochs: `trainer.total_epochs`.
        unfinished: samples that an earlier run drew and did not train, which come first.
        epoch: of the loader's next batch.

    Attributes:
        epoch: of the last sample drawn.
    """

    def __init__(
        self,
        loader: Any,
        n_epochs: int,
        *,
        unfinished: Iterable[dict[str, Any]] = (),
        epoch: int = 0,
    ) -> None:
        self.epoch = epoch
        self._loader = loader
        self._n_epochs = n_epochs
        self._drawn = deque(unfinished)
        self._batches: Iterator[Mapping[str, Any]] | None = None

    def draw(self) -> dict[str, Any] | None:
        """The next sample; None after the last one of the last epoch."""
        while not self._drawn:
            if self.epoch >= self._n_epochs:
                return None
            if self._batches is None:
                self._batches = iter(self._loader)
            columns = next(self._batches, None)
            if columns is None:
                self._batches = None
                self.epoch += 1
            else:
                self._drawn.extend(samples_of(columns))
        return self._drawn.popleft()

    def save(self, folder: Path, in_flight: Iterable[dict[str, Any]]) -> None:
        """Save what is not trained yet, and the loader's position, as one state.

        Args:
            folder: of the checkpoint.
            in_flight: samples that were drawn and not trained, in the order of drawing.
        """
        state = {
            "epoch": self.epoch,
            "loader": self._loader.state_dict(),
            "unfinished": [*in_flight, *self._drawn],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_bytes(pickle.dumps(state))

    @classmethod
    def resumed(cls, loader: Any, n_epochs: int, folder: Path | None, epoch: int) -> SampleStream:
        """The stream that continues a checkpoint.

        Args:
            loader: verl has loaded its state, except at the end of an epoch.
            folder: of the checkpoint; None: the run starts from scratch.
            epoch: of a checkpoint of synchronous collection, in which nothing is in flight.
        """
        if folder is None or not (folder / FILE).is_file():
            return cls(loader, n_epochs, epoch=epoch)
        state = pickle.loads((folder / FILE).read_bytes())
        loader.load_state_dict(state["loader"])
        return cls(loader, n_epochs, unfinished=state["unfinished"], epoch=state["epoch"])
