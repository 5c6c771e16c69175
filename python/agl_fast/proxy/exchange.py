"""One request's answer: to the agent, byte for byte, and into the recorder."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from agl_fast.proxy import replies
from agl_fast.proxy.announced import AnnouncedRollout
from agl_fast.proxy.answer_checks import BadAnswerError, NoTokenIdsError
from agl_fast.proxy.answers import AnswerCollector, Choice
from agl_fast.proxy.events import EventReader
from agl_fast.proxy.flights import AbortedError, Flight, HeldError
from agl_fast.proxy.large_json import in_thread_if_large
from agl_fast.proxy.recorder import RecordedCall, Recorder
from agl_fast.rows.calls import Call


class AgentGoneError(ConnectionResetError):
    """The agent closed its connection before it had the whole answer."""


class StoreFailedError(RuntimeError):
    """A call cannot be told apart from what its rollout did before and after."""


class BrokenAnswerError(RuntimeError):
    """A server's answer ended before it was complete, or is none.

    Attributes:
        breaks_connection: the connection broke.
    """

    def __init__(self, message: str, *, breaks_connection: bool = True) -> None:
        super().__init__(message)
        self.breaks_connection = breaks_connection


class FailedAnswerError(RuntimeError):
    """A server answered with an error of its own.

    Attributes:
        response, body: to be passed on where no other server answers.
    """

    def __init__(self, response: aiohttp.ClientResponse, body: bytes) -> None:
        super().__init__(f"status {response.status}: {body[:200]!r}")
        self.response = response
        self.body = body


# What is written at once.
_PIECE_BYTES = 256 << 10
# Another server may answer better. Other statuses below 500 are the request's own fault.
_OF_ONE_SERVER = {401, 403, 404, 405}


@dataclass(slots=True)
class Origin:
    """Whose request it is, and what its calls have in common.

    Attributes:
        rollout_id, attempt_id: "" where the request names none.
        rollout: as it was announced.
        policy_version: of the servers when the request was sent to the one that answers.
        is_train: its tokens count when they are lost.
    """

    rollout_id: str
    attempt_id: str
    trainable: bool
    agent: str | None
    started_at: float
    rollout: AnnouncedRollout | None = None
    policy_version: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    is_train: bool = False


class Exchange:
    """An agent's request whose answer is coming in.

    Args:
        next_sequence: the store's, of (rollout id, attempt id). None: calls are numbered by time.
        flight: its waits for the server can be interrupted.
        withholds: the agent gets nothing before the answer is complete, so that until then the
            request can be repeated. Events of a stream come all at once.

    Attributes:
        has_answer: the agent has all that it needs, and may leave.
        ended_with_error: a stream's last event was the server's error.
        is_counted: tokens of the server's answer are recorded or counted.
    """

    def __init__(
        self,
        request: web.BaseRequest,
        recorder: Recorder,
        next_sequence: Callable[[str, str], Awaitable[int]] | None,
        flight: Flight,
        *,
        withholds: bool = False,
    ) -> None:
        self._request = request
        self._recorder = recorder
        self._next_sequence = next_sequence
        self._flight = flight
        self._withholds = withholds
        self._begun: web.StreamResponse | None = None
        self.has_answer = False
        self.ended_with_error = False
        self.is_counted = False

    @property
    def has_begun(self) -> bool:
        """The agent has a part of an answer."""
        return self._begun is not None

    def instead(self, reply: web.Response) -> web.StreamResponse:
        """The reply; where an answer has begun, that one cut off, as it must not pass for whole."""
        if self._begun is None:
            return reply
        if self._request.transport is not None:
            self._request.transport.abort()
        return self._begun

    async def require_working(self, response: aiohttp.ClientResponse) -> None:
        """
        Raises:
            FailedAnswerError: the status is one that another server may not give.
            BrokenAnswerError: and its answer breaks off; or it is a redirect, with which the agent
                would go past the proxy.
        """
        if 300 <= response.status < 400:
            message = f"the server redirects with status {response.status}"
            raise BrokenAnswerError(message, breaks_connection=False)
        if response.status >= 500 or response.status in _OF_ONE_SERVER:
            raise FailedAnswerError(response, await self._whole(response))

    async def forward(
        self, response: aiohttp.ClientResponse, body: bytes | None = None
    ) -> web.StreamResponse:
        """Pass the answer on as it arrives.

        Args:
            body: of an error that was read already.
        """
        reply = self._reply(response)
        if response.content_length is not None:
            reply.content_length = response.content_length
        if response.status >= 400 or body is not None:
            kind = "client_errors" if 400 <= response.status < 500 else "server_errors"
            self._recorder.count(kind)
            await self._write(reply, await self._whole(response) if body is None else body)
        elif self._withholds:
            await self._write(reply, await self._whole(response))
        else:
            async for chunk in self._chunks(response):
                await self._write(reply, chunk)
        await self._finish(reply)
        return reply

    async def record_whole(
        self, response: aiohttp.ClientResponse, origin: Origin, collector: AnswerCollector
    ) -> web.StreamResponse:
        """Read the answer, record it, hand it over.

        Raises:
            BadAnswerError: the answer lacks ids, or cannot be a row.
            BrokenAnswerError, AgentGoneError, TimeoutError: nothing is recorded.
        """
        body = await self._whole(response)
        try:
            choices = await in_thread_if_large(len(body), collector.read_whole, body)
            added = await self._add(origin, collector, choices)
        except BaseException as error:
            self.count_lost(error, collector.n_sampled, origin)
            raise
        reply = self._reply(response)
        reply.content_length = len(body)
        try:
            await self._write(reply, body)
            await self._finish(reply)
        except BaseException:
            self._recorder.withdraw(origin.rollout_id, origin.attempt_id, added)
            raise
        return reply

    async def record_stream(
        self, response: aiohttp.ClientResponse, origin: Origin, collector: AnswerCollector
    ) -> web.StreamResponse:
        """Pass events on as they arrive, the first with the first ids. The last, with which every
        choice has its finish reason, waits until the stream has ended and the call is recorded;
        where answers are withheld, all wait until then.

        Raises:
            As ``record_whole``; the agent may have a part of the answer then. If the answer cannot
            be a row, an error event follows that part.
        """
        self._recorder.count("streams")
        reply = self._reply(response)
        added: list[str] | None = None
        withheld: list[bytes] = []
        try:
            async for held in self._events(response, collector):
                if collector.failed and not self.has_begun:
                    body = b"".join([*withheld, held, await self._whole(response)])
                    raise FailedAnswerError(response, body)
                if added is None and collector.complete and not collector.failed:
                    self._flight.is_repeatable = False
                    added = await self._add(origin, collector, collector.choices())
                if self._withholds:
                    withheld.append(held)
                    continue
                if held:
                    await self._write(reply, held)
                self.has_answer = added is not None
            if withheld:
                await self._write(reply, b"".join(withheld))
                self.has_answer = added is not None
            if added is None:  # the agent has the server's own error event
                self.ended_with_error = True
                self._recorder.count("server_errors")
                self._count_lost_as("incomplete", collector.n_sampled, origin)
            await self._finish(reply)
        except BaseException as error:
            if added is None:
                self.count_lost(error, collector.n_sampled, origin)
            elif not self.has_answer:
                self._recorder.withdraw(origin.rollout_id, origin.attempt_id, added)
            if isinstance(error, BadAnswerError) and self._begun is not None:
                with contextlib.suppress(AgentGoneError):
                    await self._write(reply, replies.error_event("server_error", str(error)))
            raise
        return reply

    async def _events(
        self, response: aiohttp.ClientResponse, collector: AnswerCollector
    ) -> AsyncIterator[bytes]:
        """Bytes of the answer that the agent may have, once ``collector`` has read them.

        The rest comes at once, and last, when the answer is complete.
        """
        events = EventReader()
        held = b""
        ended = False
        async for chunk in self._chunks(response):
            for event in events.feed(chunk):
                is_usage = False
                data = (event.data or b"").strip()  # an event without data says nothing
                if data == b"[DONE]":
                    ended = True
                elif data and not ended:
                    is_usage = collector.add(data)
                if not is_usage or collector.asked.wants_usage:
                    held += event.raw
            if collector.begun and not collector.has_prompt_ids and not collector.failed:
                raise NoTokenIdsError("the stream begins without prompt_token_ids")
            may_pass = collector.has_ids and (ended or not collector.complete)
            if collector.failed or may_pass:
                yield held
                held = b""
            if ended and not collector.failed and not collector.complete:
                break
        if not collector.failed and not collector.complete:
            raise BrokenAnswerError("the server's stream ended before the answer did")
        yield held + events.rest

    def count_lost(self, error: BaseException, n_tokens: int, origin: Origin) -> None:
        """Count the sampled tokens of an answer that is not recorded.

        Args:
            n_tokens: as far as the answer says; 0: it says nothing, and is counted as unseen.
        """
        if isinstance(error, (BadAnswerError, StoreFailedError)):
            name = "refused"
        elif isinstance(error, (AgentGoneError, asyncio.CancelledError)):
            name = "client_gone"
        elif isinstance(error, AbortedError):
            name = "aborted"
        elif isinstance(error, HeldError):
            name = "repeated"
        else:
            name = "incomplete"
        self._count_lost_as(name, n_tokens, origin)

    def _count_lost_as(self, name: str, n_tokens: int, origin: Origin) -> None:
        self.is_counted = True
        self._recorder.count_lost(name, n_tokens, is_train=origin.is_train)

    async def _add(
        self, origin: Origin, collector: AnswerCollector, choices: list[Choice]
    ) -> list[str]:
        response_id = collector.response_id
        finished_at = time.time()
        if self._next_sequence is None:
            sequence = time.monotonic_ns()
        else:
            try:
                sequence = await self._next_sequence(origin.rollout_id, origin.attempt_id)
            except Exception as error:  # whatever a store of the user's raises
                raise StoreFailedError(f"the store gives the call no number: {error!r}") from error
        calls = [
            RecordedCall(
                Call(
                    choice.prompt_ids,
                    choice.response_ids,
                    choice.log_probs,
                    response_id=_unique_id(response_id, choice, len(choices)),
                    finish_reason=choice.finish_reason,
                    policy_version=origin.policy_version,
                    sampling=origin.sampling,
                    agent=origin.agent,
                    trainable=origin.trainable,
                ),
                sequence,
                origin.started_at,
                finished_at,
                response_id,
                is_train=origin.is_train,
                missing_log_probs=choice.missing_log_probs,
            )
            for choice in choices
        ]
        self.is_counted = True
        rollout = origin.rollout
        added = self._recorder.add(
            origin.rollout_id,
            origin.attempt_id,
            calls,
            is_closed=rollout is not None and rollout.is_closed,
        )
        if rollout is not None:
            rollout.recorded += len(added)
        return added

    def _reply(self, response: aiohttp.ClientResponse) -> web.StreamResponse:
        headers = replies.headers_for_agent(response.headers, response.status)
        return web.StreamResponse(status=response.status, reason=response.reason, headers=headers)

    async def _chunks(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        try:
            while True:
                with self._flight.waiting():
                    chunk = await response.content.readany()
                if not chunk:
                    self._flight.is_read = True
                    return
                yield chunk
        except aiohttp.ClientError as error:
            raise BrokenAnswerError(f"the server's answer broke off: {error}") from error

    async def _whole(self, response: aiohttp.ClientResponse) -> bytes:
        if response.content.at_eof():  # it was read before
            return await response.read()
        chunks = [chunk async for chunk in self._chunks(response)]
        # Joined without the interpreter lock.
        return await in_thread_if_large(sum(map(len, chunks)), b"".join, chunks)

    async def _write(self, reply: web.StreamResponse, chunk: bytes) -> None:
        try:
            if not reply.prepared:
                self._begun = reply
                self._flight.is_repeatable = False
                await reply.prepare(self._request)
            for begin in range(0, len(chunk), _PIECE_BYTES):
                await reply.write(memoryview(chunk)[begin : begin + _PIECE_BYTES])
        except ConnectionError as error:
            raise AgentGoneError(str(error)) from error

    async def _finish(self, reply: web.StreamResponse) -> None:
        try:
            await reply.prepare(self._request)  # an empty answer was not begun
            await reply.write_eof()
        except ConnectionError as error:
            raise AgentGoneError(str(error)) from error


def _unique_id(response_id: str, choice: Choice, choices: int) -> str | None:
    if not response_id:
        return None
    return response_id if choices == 1 else f"{response_id}#{choice.index}"
