"""One request, sent to one server after another until one answers it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from agl_fast.proxy.answer_checks import BadAnswerError, NoTokenIdsError
from agl_fast.proxy.connections import UnreachableError
from agl_fast.proxy.exchange import (
    AgentGoneError,
    BrokenAnswerError,
    Exchange,
    FailedAnswerError,
)
from agl_fast.proxy.fleet import Fleet, NoServerError, Server, request_key
from agl_fast.proxy.flights import Flight, HeldError, SilentServerError
from agl_fast.proxy.gate import Gate
from agl_fast.proxy.large_json import in_thread_if_large
from agl_fast.proxy.recorder import Recorder

# So many servers are asked for one request. Clients of OpenAI's send it again twice.
SERVERS_A_REQUEST = 3


class DangerousRequestError(RuntimeError):
    """Servers broke on the request one after another, and have not answered since."""


async def first_answer(
    ask: Callable[[Server], Awaitable[web.StreamResponse]],
    *,
    fleet_of_now: Callable[[], Fleet],
    gate: Gate,
    flight: Flight,
    exchange: Exchange,
    recorder: Recorder,
    body: bytes,
) -> web.StreamResponse:
    """Ask servers until one answers.

    A failure moves the request to another server while the agent has seen nothing of an answer.
    Connections that fail, and servers that fall silent, are the server's fault at once. Any other
    failure may be the request's: it counts against a server only when another one answers the same
    request.

    While the gate is closed, the request waits. Then it begins anew, and no server has been tried.

    Args:
        body: the agent's.

    Raises:
        NoServerError: there are no servers.
        DangerousRequestError: the request broke several servers.
        The last server's failure: none answered.
    """
    rollout_id = flight.rollout_id or None
    fleet = fleet_of_now()
    tried: list[Server] = []
    suspects: list[tuple[Server, Exception]] = []
    failure: Exception | None = None
    key: bytes | None = None
    while True:
        if fleet.has_broken:
            key = key or await in_thread_if_large(len(body), request_key, body)
        if key is not None and fleet.is_dangerous(key):
            raise DangerousRequestError(
                "servers broke on this request one after another and have not answered since: it "
                "is not sent to another one"
            ) from failure
        if await gate.wait(flight):
            if failure is not None:
                recorder.count(_counted(failure))
            fleet, tried, failure = fleet_of_now(), [], None
        try:
            server = fleet.server_for(rollout_id, tried)
        except NoServerError:
            if failure is None:
                raise
            raise failure from None
        if failure is not None:
            recorder.count("moved")
            recorder.count(_counted(failure))
        tried.append(server)
        flight.goes_to(server)
        with server.busy(), gate.asking(flight):
            try:
                reply = await ask(server)
            except HeldError:
                recorder.count("repeated")
                continue
            except (UnreachableError, BrokenAnswerError, SilentServerError) as error:
                if error.breaks_connection:
                    if key is None:
                        key = await in_thread_if_large(len(body), request_key, body)
                    fleet.broke(key, server, flight.sent_at)
                failure = error
                is_certain = True
            except (BadAnswerError, FailedAnswerError) as error:
                failure = error
                is_certain = exchange.has_begun or server.is_probed
            except (AgentGoneError, asyncio.CancelledError):
                if not flight.has_begun and server.answered_at < flight.sent_at:
                    fleet.leave(server, rollout_id)
                    server.is_doubted = True
                raise
            else:
                if exchange.ended_with_error:
                    recorder.count("servers_out", fleet.failed(server, rollout_id, "error event"))
                    return reply
                fleet.answered(server)
                for suspect, why in suspects:
                    recorder.count("servers_out", fleet.failed(suspect, None, why))
                return reply
            if is_certain:
                recorder.count("servers_out", fleet.failed(server, rollout_id, failure))
            else:
                fleet.leave(server, rollout_id)
                suspects.append((server, failure))
        has_tried_enough = len(tried) == SERVERS_A_REQUEST and not gate.is_held
        if exchange.has_begun or has_tried_enough:
            raise failure


def may_have_sampled(flight: Flight, failure: BaseException) -> bool:
    """Whether the server may have sampled tokens for a request that failed so."""
    if isinstance(failure, UnreachableError):
        return failure.breaks_connection
    if isinstance(failure, FailedAnswerError):
        return failure.response.status >= 500
    return flight.is_sent


def _counted(failure: Exception) -> str:
    if isinstance(failure, NoTokenIdsError):
        return "without_token_ids"
    return "refused_answers" if isinstance(failure, BadAnswerError) else "server_errors"
