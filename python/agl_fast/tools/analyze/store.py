"""Read finished rollouts and their calls from an Agent-lightning store."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from agentlightning import (
    LightningStoreClient,
    LlmProxyTraceToTriplet,
    TracerTraceToTriplet,
    Triplet,
)
from agentlightning.emitter.reward import get_reward_value

from agl_fast.rows.calls import Rollout
from agl_fast.rows.levels import LEVELS
from agl_fast.rows.options import limits_of
from agl_fast.tools.analyze.traces import Traces

_FINISHED = ("succeeded", "failed", "cancelled")


class StoreError(ValueError):
    """A store has nothing to analyze; the message gives the reason."""


def read_store(url: str, given: Mapping[str, int | None] | None = None) -> Traces:
    """Query a store for its finished rollouts and the spans of their latest attempts.

    Token ids come from the spans. Agent-lightning's tracers record what the agent's client
    received, its LLM proxy what the server returned.

    Args:
        url: of a LightningStoreServer.
        given: limits by name; None: not given.

    Raises:
        ConnectionError: no store answers at the URL.
        StoreError: no rollout is finished, or no call has token ids.
    """
    return asyncio.run(_read(url, given))


async def _read(url: str, given: Mapping[str, int | None] | None) -> Traces:
    client = LightningStoreClient(url, retry_delays=(), health_retry_delays=())
    try:
        found = await client.query_rollouts(status_in=_FINISHED, sort_by="start_time")
        rollouts, n_calls = [], 0
        for each in found.items:
            attempt = await client.get_latest_attempt(each.rollout_id)
            if attempt is None:  # cancelled before it started
                continue
            spans = await client.query_spans(each.rollout_id, attempt.attempt_id)
            in_order = sorted(spans.items, key=lambda span: span.sequence_id)
            triplets = _triplets(in_order)
            n_calls += len(triplets)
            rollouts.append(_rollout(each, in_order, triplets))
    except aiohttp.ClientError as error:
        raise ConnectionError(
            f"store={url!r} does not answer: {error!r}; expected the address of Agent-lightning's "
            "store, http://host:port"
        ) from error
    finally:
        await client.close()
    if not rollouts:
        raise StoreError(f"store={url!r} has no finished rollout")
    n_with_ids = sum(len(rollout.calls) for rollout in rollouts)
    if not n_with_ids:
        raise StoreError(
            f"store={url!r}: none of the {n_calls} calls of its {len(rollouts)} finished rollouts "
            "has token ids. agl_fast's proxy keeps them to itself: set agentlightning.record_dir, "
            "and analyze the files of the run. Agent-lightning's tracers have them where the "
            "server knows return_token_ids, as vLLM does, and the agent does not stream"
        )
    notes = []
    if n_calls > n_with_ids:
        notes.append(f"{n_calls - n_with_ids:,} calls without token ids are left out")
    limits = {level: limits_of(level, None, given) for level in LEVELS}
    return Traces(url, rollouts, limits, notes)


def _triplets(spans: Sequence[Any]) -> list[Triplet]:
    """Read triplets from both kinds of spans of the same calls; return the larger set."""
    if not spans:
        return []
    traced: list[Triplet] = TracerTraceToTriplet().adapt(spans)
    proxied: list[Triplet] = LlmProxyTraceToTriplet().adapt(spans)
    return proxied if len(proxied) > sum(map(_has_ids, traced)) else traced


def _has_ids(triplet: Triplet) -> bool:
    return bool(triplet.prompt.get("token_ids") and triplet.response.get("token_ids"))


def _rollout(found: Any, spans: Sequence[Any], triplets: Sequence[Triplet]) -> Rollout:
    emitted = [get_reward_value(span) for span in spans]
    rewards = [each for each in emitted if each is not None and not math.isnan(each)]
    data_id = (found.metadata or {}).get("data_id")
    return Rollout.from_triplets(
        found.rollout_id,
        found.rollout_id if data_id is None else str(data_id),
        [triplet for triplet in triplets if _has_ids(triplet)],
        rewards[-1] if rewards else None,
        status=found.status,
    )
