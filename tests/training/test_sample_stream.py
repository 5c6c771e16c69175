"""Samples are drawn once per epoch, whatever is in flight when a run is killed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")

from torchdata.stateful_dataloader import StatefulDataLoader

import support.verl_trainer_imports  # noqa: F401
from agl_fast.training.datasets import Samples, columns_of
from agl_fast.training.sample_stream import SampleStream

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl and what it imports

N_SAMPLES, BATCH, EPOCHS = 12, 4, 3


def loader(n_workers: int = 0) -> Any:
    samples = Samples([{"number": number} for number in range(N_SAMPLES)])
    return StatefulDataLoader(
        samples, batch_size=BATCH, collate_fn=columns_of, num_workers=n_workers, drop_last=True
    )


def numbers(samples: Any) -> list[int]:
    return [int(sample["number"]) for sample in samples]


def drawn(stream: SampleStream, n: int | None = None) -> list[dict[str, Any]]:
    samples = []
    while n is None or len(samples) < n:
        sample = stream.draw()
        if sample is None:
            break
        samples.append(sample)
    return samples


def test_every_sample_once_per_epoch_then_none():
    stream = SampleStream(loader(), EPOCHS)
    assert numbers(drawn(stream)) == list(range(N_SAMPLES)) * EPOCHS
    assert stream.draw() is None


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("n_drawn", range(1, N_SAMPLES * 2 + 1, 3))
def test_a_resumed_run_trains_what_was_not_trained(tmp_path, n_workers, n_drawn):
    random = np.random.default_rng(n_drawn)
    stream = SampleStream(loader(n_workers), EPOCHS)
    before = drawn(stream, n_drawn)
    is_trained = random.random(n_drawn) < 0.6
    trained = [sample for sample, done in zip(before, is_trained, strict=True) if done]
    in_flight = [sample for sample, done in zip(before, is_trained, strict=True) if not done]
    stream.save(tmp_path, in_flight)
    drawn(stream, 5)  # after the checkpoint, and lost when the run is killed

    resumed = SampleStream.resumed(loader(n_workers), EPOCHS, tmp_path, epoch=0)
    after = drawn(resumed)
    assert numbers(after)[: len(in_flight)] == numbers(in_flight)
    assert sorted(numbers(trained) + numbers(after)) == sorted(list(range(N_SAMPLES)) * EPOCHS)


def test_a_checkpoint_of_synchronous_collection_begins_with_its_epoch(tmp_path):
    assert len(drawn(SampleStream.resumed(loader(), EPOCHS, tmp_path, epoch=2))) == N_SAMPLES
    assert len(drawn(SampleStream.resumed(loader(), EPOCHS, None, epoch=0))) == N_SAMPLES * EPOCHS
