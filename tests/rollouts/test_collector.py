"""Groups in flight: what a checkpoint finds of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")

import support.verl_trainer_imports  # noqa: F401
from agl_fast.rollouts.collector import Collector
from agl_fast.rollouts.group_schedule import GroupSchedule

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl and what it imports


class Numbers:
    """Samples, without end."""

    def __init__(self) -> None:
        self.n_drawn = 0

    def draw(self) -> dict[str, Any]:
        self.n_drawn += 1
        return {"number": self.n_drawn - 1}


def test_a_checkpoint_has_samples_that_are_being_enqueued():
    """Between the drawing of a sample and the store's answer, no group exists yet."""

    async def run() -> None:
        enqueueing, answered = asyncio.Event(), asyncio.Event()
        enqueued: list[list[int]] = []

        async def start(samples: list[dict[str, Any]]) -> Any:
            enqueued.append([sample["number"] for sample in samples])
            enqueueing.set()
            await answered.wait()
            inputs = {
                f"rollout-{sample['number']}-{i}": {**sample, "data_id": str(sample["number"])}
                for sample in samples
                for i in range(2)
            }
            return [SimpleNamespace(rollout_id=each) for each in inputs], inputs

        pending = SimpleNamespace(rollout_ids=[], add=lambda _: None, forget=lambda _: None)
        draws = Numbers()
        collector = Collector(
            SimpleNamespace(give_up=lambda _: asyncio.sleep(0)),
            pending,
            start=start,
            schedule=GroupSchedule(n_groups=2, max_staleness=1, oversample=2.0),
            draws=draws,
            oldest_version=lambda _: None,
            is_kept=lambda _: True,
        )
        await collector.begin(version=0, n_steps=5)
        await enqueueing.wait()
        found: list[int] = []

        def look(samples: list[dict[str, Any]]) -> None:
            found[:] = [sample["number"] for sample in samples]

        await collector.look(look)
        assert found == list(range(draws.n_drawn)) == [0, 1, 2, 3]
        answered.set()
        while len(collector.in_flight) < 4:
            await asyncio.sleep(0.001)
        await collector.look(look)
        assert found == [0, 1, 2, 3]
        # One request for all groups that start together, and each has its own rollouts.
        assert enqueued == [[0, 1, 2, 3]]
        assert [list(each.inputs) for each in collector.in_flight] == [
            [f"rollout-{number}-0", f"rollout-{number}-1"] for number in range(4)
        ]
        await collector.end()

    asyncio.run(asyncio.wait_for(run(), 30))
