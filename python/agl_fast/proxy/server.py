"""The HTTP server: whose request it is, where it goes, and what becomes of its answer."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeAlias
from urllib.parse import unquote

import aiohttp
from aiohttp import web

from agl_fast.printable import shown
from agl_fast.proxy import replies
from agl_fast.proxy.agent_connections import AgentConnection, AgentServer
from agl_fast.proxy.announced import AnnouncedRollout, AnnouncedRollouts
from agl_fast.proxy.answer_checks import Asked, BadAnswerError, ModelLimits, NoTokenIdsError
from agl_fast.proxy.answers import AnswerCollector
from agl_fast.proxy.connections import Connections, UnreachableError
from agl_fast.proxy.engines import DEFAULT_ENGINE, Engine, engine_named
from agl_fast.proxy.engines.base import CHAT, COMPLETIONS, Endpoint
from agl_fast.proxy.exchange import (
    AgentGoneError,
    BrokenAnswerError,
    Exchange,
    FailedAnswerError,
    Origin,
    StoreFailedError,
)
from agl_fast.proxy.fleet import Fleet, NoServerError, Server
from agl_fast.proxy.flights import AbortedError, Flight, Flights, SilentServerError
from agl_fast.proxy.gate import Gate
from agl_fast.proxy.health import HealthMonitor
from agl_fast.proxy.incoming import origin_of, split_path
from agl_fast.proxy.large_json import in_thread_if_large
from agl_fast.proxy.limits import HttpLimits, RefusedBodyError, read_limited
from agl_fast.proxy.notices import Notices
from agl_fast.proxy.outgoing import BadRequestError, Outgoing, read_body, recordable
from agl_fast.proxy.recorder import Recorder
from agl_fast.proxy.sampling import Phase
from agl_fast.proxy.tries import DangerousRequestError, first_answer, may_have_sampled

logger = logging.getLogger(__name__)

NextSequence: TypeAlias = Callable[[str, str], Awaitable[int]]
LatestAttempt: TypeAlias = Callable[[str], Awaitable[str | None]]

_RECORDED: dict[str, Endpoint] = {"/chat/completions": CHAT, "/completions": COMPLETIONS}
_NOT_SUPPORTED = {"/messages", "/responses"}
_NO_IDS = "the server's answer: {reason}. {since}: without ids there is nothing to train on"
_UNKNOWN_ROLLOUT = (
    "rollout {rollout_id!r} is in no batch that runs now: it has ended, or belongs to another run. "
    " Agents get their base_url from the resource main_llm of their own rollout"
)
_UNKNOWN_MODEL = (
    "the servers know no model {asked}: ask for {ours!r}, the `model` of the resource main_llm"
)
_MISNAMED_MODEL = (
    "the {engine} servers do not know the policy by the name {name!r} (404): check {key}"
)
_PAUSED = (
    "no rollouts are running: the inference servers sleep while the trainer updates the weights. A "
    "call after its rollout has ended is not answered"
)
# Between two looks whether a rollout has been announced.
_LOOK_SECONDS = 0.01
# A busy server may take its time.
MOVE_AFTER_SECONDS = 30.0


class UnknownRolloutError(LookupError):
    """A request names a rollout that was not announced, or is closed."""


class PausedError(RuntimeError):
    """A request came while the servers sleep."""


class ProxyServer:
    """Serves the agents.

    ``fleet``, ``policy_version``, ``limits`` and ``next_sequence`` may be replaced from any thread
    at any time.

    Args:
        timeout_seconds: the longest an answer may take, also where several servers are tried.
        move_after_seconds: requests move away from a server that has accepted no connection, or
            not answered ``/health``, for so long.
        ids_for_everybody: requests that name no rollout go out as those that do: the run's
            sampling, token ids in the answer. They are not recorded.
        engine: of the servers, a module of ``agl_fast.proxy.engines``.

    Attributes:
        announced: the rollouts whose calls are answered.
        policy_version: of the weights that the servers hold; None: unknown.
        gate: between the agents' requests and the servers.
        withholds_answers: agents get nothing of an answer before it is complete.
    """

    def __init__(
        self,
        *,
        api_key: str | None,
        timeout_seconds: float,
        move_after_seconds: float = MOVE_AFTER_SECONDS,
        http_limits: HttpLimits | None = None,
        ids_for_everybody: bool = False,
        engine: str = DEFAULT_ENGINE,
    ) -> None:
        self.engine: Engine = engine_named(engine)
        self.recorder = Recorder()
        self.fleet = Fleet([])
        self.announced = AnnouncedRollouts()
        self.policy_version: int | None = None
        self.next_sequence: NextSequence | None = None
        self.limits = ModelLimits()
        self._refused: set[str] = set()  # causes
        self.latest_attempt: LatestAttempt | None = None
        self.leave_store: Callable[[], Awaitable[None]] | None = None  # at the end
        self.is_paused = False
        self.flights = Flights()
        self.gate = Gate()
        self.withholds_answers = False
        self._api_key = api_key
        self._timeout_seconds = timeout_seconds
        self._move_after_seconds = move_after_seconds
        self._http_limits = http_limits or HttpLimits()
        self._ids_for_everybody = ids_for_everybody
        self._connections: Connections | None = None
        self._monitoring: asyncio.Task[None] | None = None
        self._hanging_up = False
        self._notices = Notices(self.recorder, self.engine)

    def http_server(self) -> AgentServer:
        """What aiohttp runs, in the event loop of this call's thread."""
        return AgentServer(self._serve, self._http_limits, self.recorder)

    async def open(self) -> None:
        self._hanging_up = False
        self._connections = Connections(
            self.recorder, self._move_after_seconds, self.engine.KEEP_ALIVE_SECONDS
        )
        monitor = HealthMonitor(
            self._connections.session,
            lambda: self.fleet,
            self.flights,
            self.recorder,
            self._move_after_seconds,
            self.engine.HEALTH_PATH,
        )
        self._monitoring = asyncio.create_task(monitor.run())

    def hang_up(self) -> None:
        """Agents' connections will be closed: it is not they that leave."""
        self._hanging_up = True

    async def close(self) -> None:
        if self._monitoring is not None:
            self._monitoring.cancel()
        if self._connections is not None:
            await self._connections.close()
        if self.leave_store is not None:
            await self.leave_store()

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, AgentConnection)
        connection.begin_request()
        try:
            return await self.handle(request)
        finally:
            connection.end_request()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/health":
            return web.json_response({"status": "ok"})
        if not self._may_enter(request):
            self.recorder.count("unauthorized")
            return replies.error(401, "authentication_error", "the proxy's api_key is required")
        parts = split_path(request.rel_url.raw_path)
        if parts is None:
            return self._unknown_path(request)
        rollout_id, attempt_id, path = parts
        if path in _NOT_SUPPORTED:
            return self._not_supported(path)
        flying = self.flights.of(unquote(rollout_id or ""), unquote(attempt_id or ""))
        with self.recorder.request(), flying as flight:
            exchange = Exchange(
                request,
                self.recorder,
                self.next_sequence,
                flight,
                withholds=self.withholds_answers,
            )
            return await self._answer(request, exchange, flight, path, (rollout_id, attempt_id))

    async def _answer(
        self,
        request: web.BaseRequest,
        exchange: Exchange,
        flight: Flight,
        path: str,
        ids: tuple[str | None, str | None],
    ) -> web.StreamResponse:
        try:
            if path == "/models" and request.method == "GET":
                return await self._pass_on(request, exchange, flight, "/v1/models")
            if path not in _RECORDED or request.method != "POST":
                return self._unknown_path(request)
            if not flight.rollout_id:
                self.recorder.count("unrecorded")
                if not self._ids_for_everybody:
                    self._require_awake()
                    return await self._pass_on(request, exchange, flight, _RECORDED[path])
            origin = origin_of(request.headers, *ids)
            rollout = origin.rollout = await self._rollout_of(flight)
            # A proxy without a daemon knows no version: all of its calls count.
            origin.is_train = rollout.phase.name == "train" or self.policy_version is None
            self.recorder.attribute("train" if origin.is_train else "val")
            self._require_awake()
            await self._abort_superseded(flight)
            return await self._record(request, exchange, flight, _RECORDED[path], origin, rollout)
        except RefusedBodyError as error:
            kind = "timeout_error" if error.status == 408 else "invalid_request_error"
            reply = self._fail(exchange, "bad_requests", error.status, kind, str(error))
            reply.force_close()
            return reply
        except BadRequestError as error:
            return self._fail(exchange, "bad_requests", 400, "invalid_request_error", str(error))
        except RecursionError:
            message = "the body is not a JSON object: it is nested too deeply"
            return self._fail(exchange, "bad_requests", 400, "invalid_request_error", message)
        except UnknownRolloutError as error:
            return self._fail(exchange, "unknown_rollouts", 404, "not_found_error", str(error))
        except PausedError as error:
            return self._fail(exchange, "refused_while_paused", 503, "server_error", str(error))
        except AbortedError as error:
            return self._fail(exchange, "aborted", 409, "rollout_ended", str(error))
        except (NoServerError, UnreachableError, BrokenAnswerError, SilentServerError) as error:
            return self._fail(
                exchange, "server_errors", 502, "server_error", str(error), retry=True
            )
        except DangerousRequestError as error:
            return self._fail(exchange, "dangerous", 502, "server_error", str(error))
        except NoTokenIdsError as error:
            message = _NO_IDS.format(reason=error, since=self.engine.TOKEN_IDS_SINCE)
            logger.error("%s", message)
            # Another server may have them.
            retry = len(self.fleet.servers) > 1
            return self._fail(
                exchange, "without_token_ids", 502, "server_error", message, retry=retry
            )
        except BadAnswerError as error:
            return self._refuse(exchange, error)
        except StoreFailedError as error:
            logger.error("A call of rollout %s is lost: %s", flight.rollout_id, error)
            return self._fail(exchange, "store_errors", 503, "server_error", str(error), retry=True)
        except asyncio.TimeoutError:  # not yet the builtin one in Python 3.10
            # The store gives up the attempt after the same time.
            message = f"no answer within {self._timeout_seconds:g} s"
            return self._fail(exchange, "timeouts", 504, "timeout_error", message)
        except AgentGoneError:
            self._count_gone(exchange)
            return exchange.instead(replies.error(499, "client_gone", "nobody reads this"))
        except asyncio.CancelledError:
            self._count_gone(exchange)  # then aiohttp cancels the handler
            raise

    async def abort(self, rollout_id: str, attempt_id: str | None) -> None:
        """End a rollout's requests, or those of one of its attempts."""
        flights = self.flights.of_rollout(rollout_id)
        if attempt_id is not None:
            flights = [each for each in flights if each.attempt_id == attempt_id]
        await self.flights.abort(flights, f"rollout {rollout_id!r} has ended")

    async def close_rollouts(self, rollout_ids: Collection[str]) -> None:
        """Abort their requests, refuse further ones, and forget them."""
        self.announced.refuse(rollout_ids)
        flights = [flight for each in rollout_ids for flight in self.flights.of_rollout(each)]
        await self.flights.abort(flights, "the rollout has ended")
        self.forget(rollout_ids)

    def forget(self, rollout_ids: Collection[str]) -> None:
        """Close rollouts that have no requests."""
        self.announced.close(rollout_ids)
        self.recorder.forget_all_but(self.announced.ids)
        self.fleet.forget(rollout_ids)

    async def abort_all(self) -> None:
        await self.flights.abort(list(self.flights), _PAUSED)

    async def _abort_superseded(self, flight: Flight) -> None:
        """Two attempts at one rollout make calls: only the store's latest one counts."""
        flights = self.flights.of_rollout(flight.rollout_id) if flight.rollout_id else []
        if self.latest_attempt is None or len({each.attempt_id for each in flights}) < 2:
            return
        latest = await self.latest_attempt(flight.rollout_id)
        stale = [each for each in flights if each.attempt_id != latest]
        for each in stale:
            each.interrupt(AbortedError(f"attempt {each.attempt_id!r} was replaced by {latest!r}"))

    async def release(self, policy_version: int) -> None:
        """Open the gate; the servers have other weights."""
        self.policy_version = policy_version
        self.gate.release()

    def _count_gone(self, exchange: Exchange) -> None:
        if not exchange.has_answer and not self._hanging_up:
            self.recorder.count("client_gone")

    def _fail(
        self,
        exchange: Exchange,
        counted: str,
        status: int,
        kind: str,
        message: str,
        *,
        retry: bool = False,
    ) -> web.StreamResponse:
        self.recorder.count(counted)
        return exchange.instead(replies.error(status, kind, message, retry=retry))

    async def _rollout_of(self, flight: Flight) -> AnnouncedRollout:
        """The rollout of a request; a rollout may run before its announcement.

        Raises:
            UnknownRolloutError: it was not announced, or has ended.
        """
        while True:
            are_coming = self.announced.are_coming
            rollout = self.announced.find(flight.rollout_id)
            if rollout is not None:
                return rollout
            if not are_coming:
                raise UnknownRolloutError(_UNKNOWN_ROLLOUT.format(rollout_id=flight.rollout_id))
            with flight.waiting():
                await asyncio.sleep(_LOOK_SECONDS)

    def _require_awake(self) -> None:
        if self.is_paused:
            raise PausedError(_PAUSED)

    def _may_enter(self, request: web.BaseRequest) -> bool:
        if self._api_key is None:
            return True
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        offered = request.headers.get("X-API-Key", bearer)
        # aiohttp decodes headers with surrogates where they are not UTF-8.
        key = offered.encode(errors="surrogateescape")
        return hmac.compare_digest(key, self._api_key.encode())

    def _unknown_path(self, request: web.BaseRequest) -> web.Response:
        self.recorder.count("bad_requests")
        return replies.error(
            404,
            "not_found_error",
            f"{request.method} {request.path}: the proxy serves POST /v1/chat/completions, "
            "POST /v1/completions and GET /v1/models, also after /rollout/{id}/attempt/{id}",
        )

    def _not_supported(self, path: str) -> web.Response:
        self.recorder.count("not_supported")
        return replies.error(
            501,
            "not_supported_error",
            f"the proxy does not record /v1{path}, so there would be nothing to train on; use "
            "/v1/chat/completions",
        )

    async def _pass_on(
        self, request: web.BaseRequest, exchange: Exchange, flight: Flight, path: str
    ) -> web.StreamResponse:
        """Forward without recording."""
        body = await read_limited(request, self._http_limits)

        async def ask(server: Server) -> web.StreamResponse:
            response = await self._send(request, flight, server, path, [body] if body else None)
            async with response:
                await exchange.require_working(response)
                return await exchange.forward(response)

        return await self._first_answer(ask, exchange, flight, body)

    async def _record(
        self,
        request: web.BaseRequest,
        exchange: Exchange,
        flight: Flight,
        path: Endpoint,
        origin: Origin,
        rollout: AnnouncedRollout,
    ) -> web.StreamResponse:
        limits = self.limits
        raw = await read_limited(request, self._http_limits)
        body, outgoing = await in_thread_if_large(
            len(raw), _read_request, raw, path, rollout.phase, self.engine, origin.trainable
        )
        fleet, asked = self.fleet, body.get("model")
        if flight.rollout_id and outgoing.recorded:
            outgoing = replace(outgoing, body={**outgoing.body, **self.engine.usage_options(body)})
        self._notices.count(outgoing)
        if not outgoing.recorded:
            self.recorder.count("unrecorded")

        async def ask(server: Server) -> web.StreamResponse:
            exchange.is_counted = False
            try:
                return await answer_of(server)
            except BaseException as error:
                is_recorded = bool(flight.rollout_id) and outgoing.recorded
                if is_recorded and not exchange.is_counted and may_have_sampled(flight, error):
                    exchange.count_lost(error, 0, origin)
                raise

        async def answer_of(server: Server) -> web.StreamResponse:
            names_policy = asked in (None, fleet.model_name)
            sent = outgoing.for_model(server.model) if names_policy else outgoing
            origin.sampling = sent.sampling
            origin.policy_version = self.policy_version
            response = await self._send(request, flight, server, path, sent.json())
            if response.status == 400 and sent.capped:
                response = await self._without_cap(
                    request, flight, server, path, sent, response, origin
                )
            async with response:
                await exchange.require_working(response)
                if response.status >= 300 or not flight.rollout_id or not sent.recorded:
                    return await exchange.forward(response)
                collector = AnswerCollector(
                    self.engine, _asked(body, sent, origin, path, self.engine), limits
                )
                if response.content_type == "text/event-stream":
                    return await exchange.record_stream(response, origin, collector)
                return await exchange.record_whole(response, origin, collector)

        return await self._first_answer(ask, exchange, flight, raw, asked, rollout)

    async def _first_answer(
        self,
        ask: Callable[[Server], Awaitable[web.StreamResponse]],
        exchange: Exchange,
        flight: Flight,
        body: bytes,
        model: object = None,
        rollout: AnnouncedRollout | None = None,
    ) -> web.StreamResponse:
        try:
            return await first_answer(
                ask,
                fleet_of_now=lambda: self.fleet,
                gate=self.gate,
                flight=flight,
                exchange=exchange,
                recorder=self.recorder,
                body=body,
            )
        except FailedAnswerError as error:
            if error.response.status == 404 and flight.server is not None:
                return self._unknown_model(model, self.fleet, flight.server, rollout)
            return await exchange.forward(error.response, error.body)

    def _unknown_model(
        self, asked: object, fleet: Fleet, server: Server, rollout: AnnouncedRollout | None
    ) -> web.Response:
        """In place of a server's 404, which does not say what to ask for."""
        self.recorder.count("client_errors")
        self.recorder.count("unknown_models")
        if asked in (None, fleet.model_name):
            message = _MISNAMED_MODEL.format(
                engine=self.engine.NAME, name=server.model, key=self.engine.SERVED_MODEL_KEY
            )
        else:
            message = _UNKNOWN_MODEL.format(asked=shown(asked), ours=fleet.model_name)
        if rollout is not None:
            rollout.unknown_models[message] += 1
        return replies.error(404, "not_found_error", message)

    def _refuse(self, exchange: Exchange, error: BadAnswerError) -> web.StreamResponse:
        """Another try may bring an answer that is whole."""
        name = f"refused_answers.{error.cause}"
        self.recorder.count(name)
        message = f"the server's answer cannot be trained on: {error}"
        if name not in self._refused:
            self._refused.add(name)
            logger.error("%s. Further ones are only counted (training/proxy/%s).", message, name)
        return self._fail(exchange, "refused_answers", 502, "server_error", message, retry=True)

    async def _without_cap(
        self,
        request: web.BaseRequest,
        flight: Flight,
        server: Server,
        path: str,
        outgoing: Outgoing,
        refusal: aiohttp.ClientResponse,
        origin: Origin,
    ) -> aiohttp.ClientResponse:
        """A server may refuse a prompt after which the whole limit does not fit. Without one it
        fills up what the context leaves, which is then less than the limit."""
        with flight.waiting():
            message = await refusal.read()
        if not self.engine.exceeds_context(message):
            return refusal
        self.recorder.count("max_tokens_cap_lifted")
        sampling = outgoing.sampling
        origin.sampling = {name: sampling[name] for name in sampling if name != "max_tokens"}
        return await self._send(request, flight, server, path, outgoing.json_without_cap())

    async def _send(
        self,
        request: web.BaseRequest,
        flight: Flight,
        server: Server,
        path: str,
        body: Sequence[bytes | memoryview] | None,
    ) -> aiohttp.ClientResponse:
        assert self._connections is not None
        with flight.waiting():
            flight.is_sent = True
            response = await self._connections.request(
                server,
                request.method,
                path,
                headers=replies.headers_for_server(
                    request.headers, server.api_key, self.engine.HEADERS_OF_ONE_ANSWER
                ),
                body=body,
                seconds=flight.seconds_left(self._timeout_seconds),
            )
        flight.has_begun = True
        return response


def _read_request(
    raw: bytes, path: Endpoint, phase: Phase, engine: Engine, trainable: bool
) -> tuple[dict[str, Any], Outgoing]:
    body = read_body(raw)
    return body, recordable(body, path, phase, engine, trainable=trainable)


def _asked(
    body: dict[str, Any], outgoing: Outgoing, origin: Origin, path: Endpoint, engine: Engine
) -> Asked:
    """What was asked of the answer, once it is known whether the run's limit was lifted."""
    sent = dict(outgoing.body)
    if outgoing.capped:
        sent["max_tokens"] = origin.sampling.get("max_tokens")
    return engine.asked(body, sent, path, outgoing.choices)
