"""Token traces of real agents (tests/data/README.md), and the ways in which a batch gets them."""

from __future__ import annotations

import gzip
import json
from functools import cache

import numpy as np

from support.paths import DATA
from support.plain_rollouts import Containers, PlainCall, PlainRollout
from support.simulated_agents import views_of_shared_bases

TRACES = ["swe_plain", "swe_nothink", "swe_think"]
CONTAINERS = ["lists", "arrays", "views"]


@cache
def trace(name: str) -> list[PlainRollout]:
    rollouts = []
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt") as lines:
        for line in lines:
            recorded = json.loads(line)
            context: list[int] = []
            calls = []
            for keep, tail, response in recorded["calls"]:
                call = PlainCall(context[:keep] + tail, response)
                calls.append(call)
                context = call.context
            rollouts.append(
                PlainRollout(calls, recorded["id"], recorded["group"], recorded["reward"])
            )
    return rollouts


def held(rollout: PlainRollout, container: str) -> Containers | None:
    if container == "lists":
        return None
    ids = (
        views_of_shared_bases(rollout.calls, "int32_views")
        if container == "views"
        else [
            (np.array(call.prompt_ids, np.int32), np.array(call.response_ids, np.int32))
            for call in rollout.calls
        ]
    )
    return Containers(ids, [None] * len(rollout.calls))
