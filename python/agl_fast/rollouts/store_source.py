"""Rollouts of mode v1: those of Agent-lightning's store, with the calls that the proxy recorded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from agentlightning import LightningStore

from agl_fast.proxy.llm_proxy import LLMProxy
from agl_fast.rollouts.call_filter import CallFilter
from agl_fast.rollouts.finished import SUCCEEDED, Outcome
from agl_fast.rollouts.progress import DEADLINE, Finished
from agl_fast.rollouts.store_access import StoreAccess
from agl_fast.rollouts.store_rewards import assign_rewards
from agl_fast.verl.failure_reasons import METADATA_KEY
from agl_fast.verl.membership import RunIdentity, current_run
from agl_fast.verl.supervision.deadlines import Deadlines

logger = logging.getLogger(__name__)


class StoreSource(StoreAccess):
    """Agent-lightning's store, and the proxy that recorded the calls."""

    def __init__(
        self,
        store: LightningStore,
        llm_proxy: LLMProxy,
        call_filter: CallFilter | None,
        deadlines: Deadlines,
    ) -> None:
        super().__init__(store, deadlines)
        self._llm_proxy = llm_proxy
        self._call_filter = call_filter
        self._named: set[str | None] = set()

    def start(self) -> None: ...

    def stop(self) -> None: ...

    async def set_up(self, model: str, temperature: float, policy_version: int) -> str:
        main_llm = self._llm_proxy.as_resource(
            model=model, sampling_parameters={"temperature": temperature}
        )
        return await self.add_resources({"main_llm": main_llm})

    def last_call_at(self, rollout_id: str, attempt_id: str) -> float:
        return self._llm_proxy.recorder.last_call_at(rollout_id, attempt_id)

    async def give_up(self, rollout_id: str) -> None:
        """Cancel it, abort its requests, and forget its calls."""
        await self.cancel(rollout_id)
        await self._llm_proxy.abort(rollout_id)
        self._llm_proxy.recorder.discard(rollout_id)

    async def give_up_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """Give it up in the store, and abort its requests."""
        await super().give_up_attempt(rollout_id, attempt_id)
        await self._llm_proxy.abort(rollout_id, attempt_id)

    async def outcome(self, finished: Finished, sample: Mapping[str, Any]) -> Outcome | None:
        rollout_id = finished.rollout_id
        # Nobody waits for what it still asks the servers.
        await self._llm_proxy.abort(rollout_id)
        attempt = await self.latest_attempt(rollout_id)
        if attempt is None:  # cancelled before anyone began it
            return Outcome(rollout_id, sample["data_id"], sample, finished.status, [], None)
        recorder = self._llm_proxy.recorder
        run = current_run()
        has_run = finished.status not in (DEADLINE, "cancelled")
        if run is not None and has_run and not run.owns(attempt.worker_id):
            # A store of the user's, in another process, hands out work to whoever asks.
            # The calls stay until the rollout ends: after a discard the recorder takes no more.
            self._warn_of(attempt.worker_id, run)
            await self.queue_again(rollout_id)
            return None
        calls = recorder.take(rollout_id, attempt.attempt_id)
        recorder.discard(rollout_id)
        spans = await self.spans(rollout_id, attempt.attempt_id)
        reward = assign_rewards(spans, calls)
        # Only a whole trace can be held against the calls.
        if self._call_filter is not None and finished.status == SUCCEEDED:
            self._call_filter.apply(rollout_id, spans, calls)
        # "failed" says less than what the attempt came to: timeout or unresponsive.
        status = attempt.status if finished.status == "failed" else finished.status
        return Outcome(
            rollout_id,
            sample["data_id"],
            sample,
            status,
            [each.call for each in calls],
            reward,
            attempt.sequence_id - 1,
            attempt.start_time - finished.queued_at,
            finished.ended_at - attempt.start_time,
            sum(each.finished_at - each.started_at for each in calls),
            None if status == SUCCEEDED else (attempt.metadata or {}).get(METADATA_KEY),
        )

    def _warn_of(self, worker_id: str | None, run: RunIdentity) -> None:
        if worker_id in self._named:
            return
        self._named.add(worker_id)
        logger.warning(
            "Runner %r took rollouts of %s and is not of it: what it did is not trained, and the "
            "rollouts are queued again. One store can serve one run at a time.",
            worker_id,
            run,
        )
