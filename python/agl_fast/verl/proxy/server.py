"""The HTTP server: whose request it is, where it goes, and what becomes of its answer."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeAlias

import aiohttp
from aiohttp import web

from agl_fast.verl.proxy import replies
from agl_fast.verl.proxy.answers import AnswerCollector
from agl_fast.verl.proxy.checks import (
    Asked,
    BadAnswerError,
    ModelLimits,
    NoTokenIdsError,
    usage_options,
)
from agl_fast.verl.proxy.connections import Connections, UnreachableError
from agl_fast.verl.proxy.exchange import (
    AgentGoneError,
    BrokenAnswerError,
    Exchange,
    Origin,
    StoreFailedError,
)
from agl_fast.verl.proxy.fields import CHAT, COMPLETIONS, Endpoint
from agl_fast.verl.proxy.fleet import Fleet, NoServerError, Server
from agl_fast.verl.proxy.incoming import origin_of, split_path
from agl_fast.verl.proxy.notices import Notices
from agl_fast.verl.proxy.outgoing import BadRequestError, Outgoing, read_body, recordable
from agl_fast.verl.proxy.recorder import Recorder
from agl_fast.verl.proxy.sampling import Phase

logger = logging.getLogger(__name__)

NextSequence: TypeAlias = Callable[[str, str], Awaitable[int]]

_RECORDED: dict[str, Endpoint] = {"/chat/completions": CHAT, "/completions": COMPLETIONS}
_NOT_SUPPORTED = {"/messages", "/responses"}
_NO_IDS = (
    "the server's answer: {reason}. The server was asked with return_token_ids, which vLLM knows "
    "since 0.10.2: without ids there is nothing to train on"
)
_UNKNOWN_ROLLOUT = (
    "rollout {rollout_id!r} is not in the batch that runs now: it has ended, or belongs to "
    "another run. Agents get their base_url from the resource main_llm of their own rollout"
)
_UNKNOWN_MODEL = (
    "the servers know no model {asked!r}: ask for {ours!r}, the `model` of the resource main_llm"
)
_MISNAMED_MODEL = (
    "the vLLM servers do not know the policy by the name {name!r} (404): check "
    "actor_rollout_ref.rollout.engine_kwargs.vllm.served_model_name"
)


class UnknownRolloutError(LookupError):
    """A request names a rollout that is not in the open batch."""


class ProxyServer:
    """Serves the agents.

    ``fleet``, ``phase``, ``limits``, ``next_sequence``, ``rollouts`` and ``unknown_models`` may be
    replaced from any thread at any time; a request uses those that it found when it came.

    Args:
        ids_for_everybody: requests that name no rollout go out as those that do: the run's
            sampling, token ids in the answer. They are not recorded.

    Attributes:
        rollouts: ids of the rollouts that are served; None: every one is.
        unknown_models: how often the servers answered that they do not know a model, by the name
            that the agents asked for.
    """

    def __init__(
        self, *, api_key: str | None, timeout_seconds: float, ids_for_everybody: bool = False
    ) -> None:
        self.recorder = Recorder()
        self.fleet = Fleet([])
        self.phase = Phase()
        self.next_sequence: NextSequence | None = None
        self.rollouts: frozenset[str] | None = None
        self.unknown_models: Counter[str] = Counter()
        self.limits = ModelLimits()
        self._refused: set[str] = set()  # causes
        self._api_key = api_key
        self._timeout_seconds = timeout_seconds
        self._ids_for_everybody = ids_for_everybody
        self._connections: Connections | None = None
        self._hanging_up = False
        self._notices = Notices(self.recorder)

    def application(self) -> web.Application:
        """The server as aiohttp runs it, in the event loop of this call's thread."""
        app = web.Application(client_max_size=0)  # images are large
        app.router.add_route("*", r"/{path:[\s\S]*}", self.handle)  # "." matches no line break
        app.on_startup.append(self._open)
        app.on_shutdown.append(self._hang_up)
        app.on_cleanup.append(self._close)
        return app

    async def _open(self, _: web.Application) -> None:
        self._hanging_up = False
        self._connections = Connections(self.recorder, self._timeout_seconds)

    async def _hang_up(self, _: web.Application) -> None:
        self._hanging_up = True

    async def _close(self, _: web.Application) -> None:
        if self._connections is not None:
            await self._connections.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
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
        exchange = Exchange(request, self.recorder, self.next_sequence)
        try:
            if path == "/models" and request.method == "GET":
                return await self._pass_on(request, exchange, "/v1/models", rollout_id)
            if path not in _RECORDED or request.method != "POST":
                return self._unknown_path(request)
            if rollout_id is None:
                self.recorder.count("unrecorded")
                if not self._ids_for_everybody:
                    return await self._pass_on(request, exchange, _RECORDED[path], None)
            origin = origin_of(request.headers, rollout_id, attempt_id)
            self._require_known(origin)
            return await self._record(request, exchange, _RECORDED[path], origin)
        except BadRequestError as error:
            return self._fail(exchange, "bad_requests", 400, "invalid_request_error", str(error))
        except UnknownRolloutError as error:
            return self._fail(exchange, "unknown_rollouts", 404, "not_found_error", str(error))
        except (NoServerError, UnreachableError, BrokenAnswerError) as error:
            return self._fail(
                exchange, "server_errors", 502, "server_error", str(error), retry=True
            )
        except NoTokenIdsError as error:
            message = _NO_IDS.format(reason=error)
            logger.error("%s", message)
            # Another server may have them.
            retry = len(self.fleet.servers) > 1
            return self._fail(
                exchange, "without_token_ids", 502, "server_error", message, retry=retry
            )
        except BadAnswerError as error:
            return self._refuse(exchange, error)
        except StoreFailedError as error:
            logger.error("A call of rollout %s is lost: %s", rollout_id, error)
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

    def _require_known(self, origin: Origin) -> None:
        known = self.rollouts
        if origin.rollout_id and known is not None and origin.rollout_id not in known:
            raise UnknownRolloutError(_UNKNOWN_ROLLOUT.format(rollout_id=origin.rollout_id))

    def _may_enter(self, request: web.Request) -> bool:
        if self._api_key is None:
            return True
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        offered = request.headers.get("X-API-Key", bearer)
        # aiohttp decodes headers with surrogates where they are not UTF-8.
        key = offered.encode(errors="surrogateescape")
        return hmac.compare_digest(key, self._api_key.encode())

    def _unknown_path(self, request: web.Request) -> web.Response:
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
        self, request: web.Request, exchange: Exchange, path: str, rollout_id: str | None
    ) -> web.StreamResponse:
        """Forward without recording."""
        server = self.fleet.server_for(rollout_id)
        body = await request.read() or None
        with server.busy():
            response = await self._send(request, server, path, body, rollout_id)
            async with response:
                return await exchange.forward(response)

    async def _record(
        self, request: web.Request, exchange: Exchange, path: Endpoint, origin: Origin
    ) -> web.StreamResponse:
        phase, fleet, limits = self.phase, self.fleet, self.limits
        origin.policy_version = phase.policy_version
        # A proxy without a daemon knows no version: all of its calls count.
        origin.is_train = phase.name == "train" or phase.policy_version is None
        body = read_body(await request.read())
        rollout_id = origin.rollout_id or None
        server = fleet.server_for(rollout_id)
        asked = body.get("model")
        if asked in (None, fleet.model_name):
            body["model"] = server.model
        outgoing = recordable(body, path, phase, trainable=origin.trainable)
        if rollout_id is not None and outgoing.recorded:
            outgoing = replace(outgoing, body={**outgoing.body, **usage_options(body)})
        self._notices.count(outgoing)
        if not outgoing.recorded:
            self.recorder.count("unrecorded")
        origin.sampling = outgoing.sampling
        with server.busy():
            response = await self._send(request, server, path, outgoing.json(), rollout_id)
            if response.status == 400 and outgoing.capped:
                response = await self._without_cap(
                    request, server, path, outgoing, response, origin
                )
            async with response:
                if response.status == 404:
                    return self._unknown_model(asked, fleet, server)
                if response.status != 200 or rollout_id is None or not outgoing.recorded:
                    return await exchange.forward(response)
                collector = AnswerCollector(_asked(body, outgoing, origin, path), limits)
                if response.content_type == "text/event-stream":
                    return await exchange.record_stream(response, origin, collector)
                return await exchange.record_whole(response, origin, collector)

    def _unknown_model(self, asked: object, fleet: Fleet, server: Server) -> web.Response:
        """In place of a server's 404, which does not say what to ask for."""
        self.recorder.count("client_errors")
        self.recorder.count("unknown_models")
        if asked in (None, fleet.model_name):
            message = _MISNAMED_MODEL.format(name=server.model)
        else:
            message = _UNKNOWN_MODEL.format(asked=asked, ours=fleet.model_name)
        self.unknown_models[message] += 1
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
        request: web.Request,
        server: Server,
        path: str,
        outgoing: Outgoing,
        refusal: aiohttp.ClientResponse,
        origin: Origin,
    ) -> aiohttp.ClientResponse:
        """vLLM refuses a prompt after which the whole limit does not fit. Without one it fills up
        what the context leaves, which is then less than the limit."""
        if b"maximum context length" not in await refusal.read():
            return refusal
        self.recorder.count("max_tokens_cap_lifted")
        sampling = outgoing.sampling
        origin.sampling = {name: sampling[name] for name in sampling if name != "max_tokens"}
        return await self._send(request, server, path, outgoing.json_without_cap(), None)

    async def _send(
        self,
        request: web.Request,
        server: Server,
        path: str,
        body: bytes | None,
        rollout_id: str | None,
    ) -> aiohttp.ClientResponse:
        assert self._connections is not None
        try:
            return await self._connections.request(
                server,
                request.method,
                path,
                headers=replies.headers_for_server(request.headers, server.api_key),
                body=body,
            )
        except UnreachableError:
            self.fleet.failed(server, rollout_id)
            raise


def _asked(body: dict[str, Any], outgoing: Outgoing, origin: Origin, path: Endpoint) -> Asked:
    """What was asked of the answer, once it is known whether the run's limit was lifted."""
    sent = dict(outgoing.body)
    if outgoing.capped:
        sent["max_tokens"] = origin.sampling.get("max_tokens")
    return Asked.of(body, sent, is_chat=path == CHAT, choices=outgoing.choices)
