"""Rollouts of mode v0: clients take tasks and post triplets."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from agentlightning import LLM

from agl_fast.proxy.llm_proxy import LLMProxy
from agl_fast.rollouts.finished import FinishedRollout
from agl_fast.rollouts.legacy_server import LegacyServer
from agl_fast.rollouts.progress import RolloutEnd
from agl_fast.rows.builder import BatchBuilder
from agl_fast.rows.calls import Call, Rollout

logger = logging.getLogger(__name__)

_NO_IDS = (
    "rollout {rollout_id!r}: none of the {n} triplets that its client posted has token ids. The "
    "client's tracer takes them from the answers (prompt_token_ids, token_ids), which have them "
    "where the server knows return_token_ids, as vLLM does since 0.10.2, and where the agent "
    "does not stream"
)


class LegacySource:
    """Agent-lightning's server of mode v0; calls come from the posted triplets.

    Tasks have no attempts: a client that does not post in time loses the task to the next one, and
    the first post counts.
    """

    def __init__(self, server: LegacyServer, llm_proxy: LLMProxy) -> None:
        self._server = server
        self._llm_proxy = llm_proxy
        self._policy_version = 0

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    async def set_up(self, model: str, temperature: float, policy_version: int) -> str:
        self._policy_version = policy_version
        proxied = self._llm_proxy.as_resource(model=model)
        main_llm = LLM(
            endpoint=f"{proxied.get_base_url(None, None)}/v1",
            model=model,
            api_key=proxied.api_key,
            sampling_parameters={"temperature": temperature},
        )
        return await self._server.publish({"main_llm": main_llm})

    async def enqueue(self, requests: Sequence[Any]) -> list[Any]:
        return await self._server.enqueue(requests)

    async def finished(self, rollout_ids: list[str]) -> list[Any]:
        return await self._server.take_posted()

    async def rollout(self, rollout_id: str) -> Any:
        return self._server.task(rollout_id)

    async def latest_attempt(self, rollout_id: str) -> Any | None:
        return None

    async def workers(self) -> list[Any]:
        return []  # clients send no heartbeats

    def last_call_at(self, rollout_id: str, attempt_id: str) -> float:
        return 0.0  # calls do not name their rollout

    async def give_up_attempt(self, rollout_id: str, attempt_id: str) -> None:
        raise NotImplementedError("tasks have no attempts")

    async def cancel(self, rollout_id: str) -> None:
        self._server.withdraw(rollout_id)

    async def give_up(self, rollout_id: str) -> None:
        self._server.forget(rollout_id)

    async def finished_rollout(self, end: RolloutEnd, sample: Mapping[str, Any]) -> FinishedRollout:
        rollout_id, data_id = end.rollout_id, sample["data_id"]
        task = self._server.task(rollout_id)
        claim = task.attempt
        posted = task.posted
        self._server.forget(rollout_id)
        triplets = [] if posted is None else posted.triplets or []
        if triplets and not any(map(_has_ids, triplets)):
            raise ValueError(_NO_IDS.format(rollout_id=rollout_id, n=len(triplets)))
        parsed = (self._call(rollout_id, index, triplet) for index, triplet in enumerate(triplets))
        calls = [call for call in parsed if call is not None]
        for call in calls:
            call.policy_version = self._policy_version
        reward = None if posted is None else posted.final_reward
        return FinishedRollout(
            rollout_id,
            data_id,
            calls,
            None if reward is None or math.isnan(reward) else reward,
            end.status,
            sample,
            discarded_attempts=0 if claim is None else claim.sequence_id - 1,
            queue_seconds=None if claim is None else claim.start_time - end.queued_at,
            seconds=None if claim is None else end.ended_at - claim.start_time,
        )

    def _call(self, rollout_id: str, index: int, triplet: Any) -> Call | None:
        """The call of a triplet; None, logged and counted, if it is invalid."""
        builder = BatchBuilder(
            level="transition", max_prompt_length=1, max_response_length=1, pad_token_id=0
        )
        try:
            (call,) = Rollout.from_triplets(rollout_id, rollout_id, [triplet]).calls
            without_reward = copy(call)  # rewards are checked with those of the whole rollout
            without_reward.reward = None
            builder.add(Rollout(rollout_id, rollout_id, [without_reward]))
        except (TypeError, ValueError) as error:
            logger.error(
                "Rollout %r, triplet %d of its client is not trained: %s", rollout_id, index, error
            )
            self._llm_proxy.recorder.count("refused_triplets")
            return None
        return call


def _has_ids(triplet: Any) -> bool:
    """Whether prompt or response has ids; a response may be empty."""
    return any(
        isinstance(part, Mapping) and bool(part.get("token_ids"))
        for part in (triplet.prompt, triplet.response)
    )
