"""A scripted stand-in for vLLM's OpenAI server, on a thread and a port of its own.

    with FakeOpenAIServer() as server:
        server.answer_next(Answer(text="4", token_ids=[7]), Answer(status=429))
        ...  # requests to server.url
        assert server.requests[0].body["logprobs"] is True

Without a script it answers ``Answer()`` for ever; ``server.respond`` may be a function of the
request. Prompt ids are the same for the same prompt, and those of a longer conversation extend
those of a shorter one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Any, Literal

from aiohttp import web


@dataclass(frozen=True)
class Request:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Answer:
    """How one request is answered.

    Attributes:
        token_ids: of every choice, ``+ index`` so that choices differ.
        prompt_token_ids: None: made of the request.
        log_probs: None: -0.5 for each token.
        tool_calls: OpenAI's dicts, for chat answers.
        status: other than 200: an error body, or ``error_body``.
        delay: seconds before the first byte.
        chunk_delay: seconds between the events of a stream.
        without: leave out what vLLM returns: "prompt_token_ids", "token_ids", "logprobs".
        hang_up: close the connection before the first byte, or in the middle of the answer.
        error_event: in a stream, end with vLLM's error event instead of the rest.
        usage: completion_tokens that it claims; None: as many as there are ids.
        stop_reason: vLLM's.
    """

    text: str = "hello"
    token_ids: Sequence[int] = (11, 12, 13)
    prompt_token_ids: Sequence[int] | None = None
    log_probs: Sequence[float] | None = None
    finish_reason: str | None = "stop"
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    response_id: str | None = None
    status: int = 200
    error_body: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    chunk_delay: float = 0.0
    without: frozenset[str] = frozenset()
    hang_up: Literal["before", "midway"] | None = None
    error_event: bool = False
    usage: int | None = None
    stop_reason: int | str | None = None


class FakeOpenAIServer:
    """Serves between ``__enter__`` and ``__exit__``; every request is kept in ``requests``."""

    def __init__(self, model: str = "policy", port: int = 0) -> None:
        self.model = model
        self.port = port  # 0: the system chooses
        self.requests: list[Request] = []
        self.connections = 0
        self.sampled = 0  # tokens in what was sent
        self.is_frozen = False  # /health is not answered either
        self.aborted = 0  # requests whose client went away before the answer was complete
        self.respond: Callable[[Request], Answer] = lambda request: Answer()
        self._script: deque[Answer] = deque()
        self._lock = Lock()
        self._ids = itertools.count()
        self._seen: set[int] = set()
        self._ready: Future[int] = Future()

    def answer_next(self, *answers: Answer) -> None:
        with self._lock:
            self._script.extend(answers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        """``host:port``, as verl names its servers."""
        return f"127.0.0.1:{self.port}"

    def model_entry(self, model_name: str = "policy") -> dict[str, Any]:
        """This server in an ``LLMProxy``'s model list."""
        parameters = {"model": f"hosted_vllm/{self.model}", "api_base": f"{self.url}/v1/"}
        return {"model_name": model_name, "litellm_params": parameters}

    def bodies(self, path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
        return [request.body for request in self.requests if request.path == path]

    def __enter__(self) -> FakeOpenAIServer:
        self._thread = Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        self.port = self._ready.result(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the port and every connection; twice does no harm."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, backlog=1024).start()
        self._ready.set_result(runner.addresses[0][1])
        await self._stop.wait()
        await runner.cleanup()

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        if id(http.transport) not in self._seen:
            self._seen.add(id(http.transport))
            self.connections += 1
        if http.path == "/health":
            if self.is_frozen:
                await asyncio.sleep(60)
            return web.Response()
        raw = await http.read()
        request = Request(
            http.method, http.path, dict(http.headers), json.loads(raw) if raw else {}
        )
        with self._lock:
            self.requests.append(request)
            answer = self._script.popleft() if self._script else self.respond(request)
        if http.path == "/v1/models":
            entry = {"id": self.model, "object": "model", "created": 0, "owned_by": "vllm"}
            return web.json_response({"object": "list", "data": [entry]})
        try:
            return await self._answer(http, request, answer)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise

    async def _answer(
        self, http: web.Request, request: Request, answer: Answer
    ) -> web.StreamResponse:
        await asyncio.sleep(answer.delay)
        if answer.hang_up == "before":
            return _hang_up(http)
        if answer.status != 200:
            error = {"message": "scripted", "type": "Scripted", "code": answer.status}
            return web.json_response(
                answer.error_body or {"error": error}, status=answer.status, headers=answer.headers
            )
        if request.body.get("stream"):
            return await self._stream(http, request, answer)
        whole = json.dumps(self._whole(request, answer)).encode()
        reply = web.StreamResponse(headers={"Content-Type": "application/json", **answer.headers})
        reply.content_length = len(whole)
        await reply.prepare(http)
        if answer.hang_up == "midway":
            await reply.write(whole[: len(whole) // 2])
            return _hang_up(http)
        self._count_sampled(json.loads(whole))
        await reply.write(whole)
        return reply

    def _count_sampled(self, part: dict[str, Any]) -> None:
        with self._lock:
            self.sampled += sum(len(each.get("token_ids") or []) for each in part["choices"])

    def _whole(self, request: Request, answer: Answer) -> dict[str, Any]:
        parts = list(self._parts(request, answer))
        first = parts[0]
        chat = request.path.endswith("/chat/completions")
        choices: dict[int, dict[str, Any]] = {}
        for part in parts:
            for piece in part["choices"]:
                index = piece["index"]
                choice = choices.setdefault(index, {"index": index, "finish_reason": None})
                _join(choice, piece)
        for choice in choices.values():
            if chat:
                message = choice.pop("delta")
                choice["message"] = {"role": "assistant", **message}
        whole = {key: value for key, value in first.items() if key != "choices"}
        whole["object"] = "chat.completion" if chat else "text_completion"
        whole["choices"] = list(choices.values())
        whole["usage"] = _usage(answer, parts)
        return whole

    async def _stream(
        self, http: web.Request, request: Request, answer: Answer
    ) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream", **answer.headers})
        await reply.prepare(http)
        parts = list(self._parts(request, answer))
        if answer.hang_up or answer.error_event:
            parts = parts[: len(parts) // 2]
        options = request.body.get("stream_options") or {}
        if options.get("include_usage") and not (answer.hang_up or answer.error_event):
            first = {key: parts[0][key] for key in ("id", "created", "model", "object")}
            parts.append({**first, "choices": [], "usage": _usage(answer, parts)})
        for part in parts:
            self._count_sampled(part)
            await reply.write(b"data: " + json.dumps(part).encode() + b"\n\n")
            await asyncio.sleep(answer.chunk_delay)
        if answer.hang_up:
            return _hang_up(http)
        if answer.error_event:
            error = {"error": {"message": "engine died", "type": "InternalServerError"}}
            await reply.write(b"data: " + json.dumps(error).encode() + b"\n\n")
        await reply.write(b"data: [DONE]\n\n")
        return reply

    def _next_id(self, chat: bool) -> str:
        return f"{'chatcmpl' if chat else 'cmpl'}-{self.port}-{next(self._ids)}"

    def _parts(self, request: Request, answer: Answer) -> Iterator[dict[str, Any]]:
        """The events of a stream, one token each; a whole answer is made of them, too."""
        body = request.body
        chat = request.path.endswith("/chat/completions")
        response_id = answer.response_id or self._next_id(chat)
        base = {"id": response_id, "created": 0, "model": body.get("model") or self.model}
        base["object"] = "chat.completion.chunk" if chat else "text_completion"
        wants_ids = bool(body.get("return_token_ids"))
        prompts = [body["messages"]] if chat else _prompts(body["prompt"])
        n = body.get("n") or 1
        for index in range(len(prompts) * n):
            prompt_ids = answer.prompt_token_ids or prompt_ids_of(prompts[index // n])
            with_prompt = wants_ids and "prompt_token_ids" not in answer.without
            if chat:
                first = {**base, "choices": [_piece(chat, index, role="assistant", content="")]}
                if with_prompt and index == 0:
                    first["prompt_token_ids"] = list(prompt_ids)
                yield first
            ids = [token + index for token in answer.token_ids]
            log_probs = answer.log_probs or [-0.5] * len(ids)
            for position, (token, log_prob) in enumerate(zip(ids, log_probs, strict=True)):
                last = position == len(ids) - 1
                piece = _piece(chat, index, content=answer.text if position == 0 else "")
                if wants_ids and "token_ids" not in answer.without:
                    piece["token_ids"] = [token]
                    if not chat and position == 0 and with_prompt:
                        piece["prompt_token_ids"] = list(prompt_ids)
                wanted = body.get("logprobs")  # 0 is wanted, too
                if wanted is not None and wanted is not False and "logprobs" not in answer.without:
                    piece["logprobs"] = _log_probs(chat, token, log_prob)
                if last:
                    piece["finish_reason"] = answer.finish_reason
                    piece["stop_reason"] = answer.stop_reason
                    if answer.tool_calls:
                        piece["delta"]["tool_calls"] = answer.tool_calls
                yield {**base, "choices": [piece]}


def prompt_ids_of(prompt: Any) -> list[int]:
    """Ids of a prompt: its own where it is made of ids, otherwise one a character and message."""
    if isinstance(prompt, str):
        return [ord(character) for character in prompt]
    if prompt and isinstance(prompt[0], int):
        return list(prompt)
    messages = [message for message in prompt if isinstance(message, dict)]
    texts = [f"{message['role'][0]}{message.get('content') or ''}\n" for message in messages]
    return [ord(character) for text in texts for character in text]


def _usage(answer: Answer, parts: list[dict[str, Any]]) -> dict[str, int]:
    n = sum(len(each.get("token_ids") or []) for part in parts for each in part["choices"])
    n = n if answer.usage is None else answer.usage
    return {"prompt_tokens": 1, "completion_tokens": n, "total_tokens": n + 1}


def _prompts(prompt: Any) -> list[Any]:
    many = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return prompt if many else [prompt]


def _piece(chat: bool, index: int, **delta: str) -> dict[str, Any]:
    piece: dict[str, Any] = {"index": index, "finish_reason": None}
    return {**piece, "delta": delta} if chat else {**piece, "text": delta["content"]}


def _log_probs(chat: bool, token: int, log_prob: float) -> dict[str, Any]:
    if chat:
        entry = {"token": str(token), "logprob": log_prob, "bytes": [48], "top_logprobs": []}
        return {"content": [entry]}
    return {"tokens": [str(token)], "token_logprobs": [log_prob], "text_offset": [0]}


def _join(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    for key, value in piece.items():
        if isinstance(value, dict):
            _join(choice.setdefault(key, {}), value)
        elif isinstance(value, list | str) and key not in ("role", "finish_reason"):
            choice[key] = choice[key] + value if key in choice else value
        elif value is not None:
            choice[key] = value


def _hang_up(http: web.Request) -> web.Response:
    assert http.transport is not None
    http.transport.abort()
    return web.Response()
