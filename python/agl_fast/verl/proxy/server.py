"""The HTTP server: whose request it is, where it goes, and what becomes of its answer."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias
from urllib.parse import unquote

import aiohttp
from aiohttp import web

from agl_fast.verl.proxy import replies
from agl_fast.verl.proxy.answers import NoTokenIdsError
from agl_fast.verl.proxy.connections import Connections, UnreachableError
from agl_fast.verl.proxy.exchange import (
    AgentGoneError,
    BrokenAnswerError,
    Exchange,
    Origin,
    StoreFailedError,
)
from agl_fast.verl.proxy.fleet import Fleet, NoServerError, Server
from agl_fast.verl.proxy.outgoing import (
    BadRequestError,
    Endpoint,
    Outgoing,
    read_body,
    recordable,
)
from agl_fast.verl.proxy.recorder import Recorder
from agl_fast.verl.proxy.sampling import Phase

logger = logging.getLogger(__name__)

NextSequence: TypeAlias = Callable[[str, str], Awaitable[int]]

# With or without /v1: a base_url of Agent-lightning ends before it, and agents may add it.
_PATH = re.compile(r"(?:/rollout/([^/]+)/attempt/([^/]+))?(?:/v1)?(/[^?]*)")
_RECORDED: dict[str, Endpoint] = {
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
}
_NOT_SUPPORTED = {"/messages", "/responses"}
_NO_IDS = (
    "{reason}. The server was asked with return_token_ids, which vLLM knows since 0.10.2: without "
    "ids there is nothing to train on. Use such a server, and no include_reasoning: false"
)
_TRAINABLE = {"1": True, "true": True, "0": False, "false": False}


class ProxyServer:
    """Serves the agents.

    ``fleet``, ``phase`` and ``next_sequence`` may be replaced from any thread at any time; a
    request uses those that it found when it came.

    Args:
        ids_for_everybody: requests that name no rollout go out as those that do: the run's
            sampling, token ids in the answer. They are not recorded.
    """

    def __init__(
        self, *, api_key: str | None, timeout_seconds: float, ids_for_everybody: bool = False
    ) -> None:
        self.recorder = Recorder()
        self.fleet = Fleet([])
        self.phase = Phase()
        self.next_sequence: NextSequence | None = None
        self._api_key = api_key
        self._timeout_seconds = timeout_seconds
        self._ids_for_everybody = ids_for_everybody
        self._connections: Connections | None = None
        self._hanging_up = False
        self._said: set[str] = set()

    def application(self) -> web.Application:
        """The server as aiohttp runs it, in the event loop of this call's thread."""
        app = web.Application(client_max_size=0)  # images are large
        app.router.add_route("*", "/{path:.*}", self.handle)
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
        match = _PATH.fullmatch(request.rel_url.raw_path)
        if match is None:
            return self._unknown_path(request)
        rollout_id, attempt_id, path = match.groups()
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
            origin = _origin(request, unquote(rollout_id or ""), unquote(attempt_id or ""))
            return await self._record(request, exchange, _RECORDED[path], origin)
        except BadRequestError as error:
            return self._fail(exchange, "bad_requests", 400, "invalid_request_error", str(error))
        except (NoServerError, UnreachableError, BrokenAnswerError) as error:
            return self._fail(exchange, "server_errors", 502, "server_error", str(error))
        except NoTokenIdsError as error:
            message = _NO_IDS.format(reason=error)
            logger.error("%s", message)
            return self._fail(exchange, "without_token_ids", 502, "server_error", message)
        except StoreFailedError as error:
            logger.error("A call of rollout %s is lost: %s", rollout_id, error)
            return self._fail(exchange, "store_errors", 503, "server_error", str(error))
        except asyncio.TimeoutError:  # not yet the builtin one in Python 3.10
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
        self, exchange: Exchange, counted: str, status: int, kind: str, message: str
    ) -> web.StreamResponse:
        self.recorder.count(counted)
        return exchange.instead(replies.error(status, kind, message))

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
            f"vLLM returns no token ids from /v1{path}, so there would be nothing to train on; "
            "use /v1/chat/completions",
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
        phase, fleet = self.phase, self.fleet
        origin.policy_version = phase.policy_version
        body = read_body(await request.read())
        rollout_id = origin.rollout_id or None
        server = fleet.server_for(rollout_id)
        if body.get("model") in (None, fleet.model_name):
            body["model"] = server.model
        outgoing = recordable(body, path, phase, trainable=origin.trainable)
        self._count_sampling(outgoing)
        origin.sampling = outgoing.sampling
        with server.busy():
            response = await self._send(request, server, path, outgoing.json(), rollout_id)
            if response.status == 400 and outgoing.capped:
                response = await self._without_cap(
                    request, server, path, outgoing, response, origin
                )
            async with response:
                if response.status != 200 or rollout_id is None:
                    return await exchange.forward(response)
                if response.content_type == "text/event-stream":
                    return await exchange.record_stream(response, origin, outgoing.choices)
                return await exchange.record_whole(response, origin)

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

    def _count_sampling(self, outgoing: Outgoing) -> None:
        if outgoing.capped:
            self.recorder.count("max_tokens_capped")
        if outgoing.seeded:
            self.recorder.count("seeded")
            self._say_once("seeded", "seed", None)
        for kind, asked in (
            ("overridden", outgoing.overridden),
            ("deviating", outgoing.deviating),
            ("unenforced", dict.fromkeys(outgoing.unenforced)),
        ):
            if asked:
                self.recorder.count(f"sampling_{kind}")
            for name, values in asked.items():
                self.recorder.count(f"sampling_{kind}.{name}")
                self._say_once(kind, name, values)

    def _say_once(self, kind: str, name: str, values: tuple[Any, float] | None) -> None:
        if f"{kind}.{name}" in self._said:
            return
        self._said.add(f"{kind}.{name}")
        if kind == "seeded":
            logger.warning(
                "Agents send a seed: rollouts of one sample that ask the same get the same answer, "
                "and there is nothing to be learned from comparing them."
            )
        elif values is None:
            logger.warning(
                "Agents set %s, which changes what is sampled; the trainer's log-probs know "
                "nothing of it.",
                name,
            )
        elif kind == "overridden":
            logger.warning(
                "Agents ask for %s=%s; training samples with %s=%s (sampling: enforce).",
                name,
                values[0],
                name,
                values[1],
            )
        else:
            logger.warning(
                "Agents sample with %s=%s; the trainer computes log-probs with %s=%s.",
                name,
                values[0],
                name,
                values[1],
            )


def _origin(request: web.Request, rollout_id: str, attempt_id: str) -> Origin:
    train = request.headers.get("X-AGL-Train", "1").strip().lower()
    if train not in _TRAINABLE:
        raise BadRequestError(f"X-AGL-Train must be 0 or 1, got {train!r}")
    return Origin(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        trainable=_TRAINABLE[train],
        agent=request.headers.get("X-AGL-Agent"),
        started_at=time.time(),
    )
