"""How long other agents wait while one request is large: `python -m benchmarks.proxy_latency`.

The proxy, a server that reads and sends bytes, and the clients have a process each. One client
sends small calls one after another; another one sends a large call in between.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import http.client
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from aiohttp import web

MEGABYTE = 1 << 20
PATH = "/rollout/{}/attempt/a/v1{}"
CHAT, COMPLETIONS = "/chat/completions", "/completions"
LARGE_ANSWER = "X-Answer-Bytes"


def message_of(n_bytes: int) -> bytes:
    text = json.dumps("lorem ipsum dolor sit amet. " * (n_bytes // 28)).encode()
    return b'{"model":"policy","messages":[{"role":"user","content":' + text + b"}]}"


def messages_of(n_bytes: int) -> bytes:
    one = b'{"role":"user","content":"lorem \\"ipsum\\"\\n dolor sit amet, consectetur elit"}'
    many = b",".join([one] * (n_bytes // (len(one) + 1)))
    return b'{"model":"policy","messages":[' + many + b"]}"


def ids_of(n_bytes: int) -> bytes:
    return b'{"model":"policy","prompt":[' + b"15496," * (n_bytes // 6) + b"0]}"


SMALL = message_of(28)
# Name, endpoint, body, whether it is the answer that is large.
CASES: list[tuple[str, str, Callable[[int], bytes], bool]] = [
    ("a message", CHAT, message_of, False),
    ("many messages", CHAT, messages_of, False),
    ("a prompt of ids", COMPLETIONS, ids_of, False),
    ("an answer with top log-probs", CHAT, lambda _: SMALL, True),
]


def answer_of(n_bytes: int) -> bytes:
    """A chat completion with the 20 likeliest tokens of every position."""
    likeliest = b",".join([b'{"token":" the","logprob":-3.25,"bytes":[32,116,104,101]}'] * 20)
    token = b'{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[' + likeliest + b"]}"
    n = max(1, n_bytes // len(token))
    ids = b",".join([b"11"] * n)
    return (
        b'{"id":"x","prompt_token_ids":[1,2],"usage":{"completion_tokens":%d},'
        b'"choices":[{"index":0,"message":{"role":"assistant","content":"a"},'
        b'"finish_reason":"length","token_ids":[%b],"logprobs":{"content":[%b]}}]}'
        % (n, ids, b",".join([token] * n))
    )


def serve_bytes(port: Connection) -> None:
    small = answer_of(1)
    made: dict[int, bytes] = {}

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        async for _ in request.content.iter_any():
            pass
        n_bytes = int(request.headers.get(LARGE_ANSWER, 0))
        if n_bytes and n_bytes not in made:
            made[n_bytes] = answer_of(n_bytes)
        body = made.get(n_bytes, small)
        if request.path.endswith(COMPLETIONS) and not request.path.endswith(CHAT):
            body = body.replace(b'"finish', b'"prompt_token_ids":[1],"finish').replace(
                b'{"content":[{', b'{"token_logprobs":[-0.5],"ignored":[{'
            )
        reply = web.StreamResponse(headers={"Content-Type": "application/json"})
        reply.content_length = len(body)
        await reply.prepare(request)
        for begin in range(0, len(body), MEGABYTE):
            await reply.write(memoryview(body)[begin : begin + MEGABYTE])
        return reply

    async def serve() -> None:
        runner = web.ServerRunner(web.Server(handle))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())


def serve_proxy(server_port: int, port: Connection) -> None:
    from agl_fast.proxy.announced import AnnouncedRollout
    from agl_fast.proxy.fleet import Fleet
    from agl_fast.proxy.limits import HttpLimits
    from agl_fast.proxy.sampling import Phase, SamplingPolicy
    from agl_fast.proxy.server import ProxyServer
    from agl_fast.proxy.serving import ServingThread

    limits = HttpLimits(max_body_bytes=1 << 30)
    server = ProxyServer(api_key=None, timeout_seconds=600.0, http_limits=limits)
    entry = {"api_base": f"http://127.0.0.1:{server_port}/v1"}
    server.fleet = Fleet([{"model_name": "policy", "litellm_params": entry}])
    phase = Phase("train", SamplingPolicy(temperature=1.0, top_p=1.0, top_k=-1))
    server.policy_version = 1
    server.announced.others = AnnouncedRollout(phase, 1)
    port.send(ServingThread(server).start("127.0.0.1", None))
    threading.Event().wait()


class Client:
    def __init__(self, port: int, rollout: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600.0)
        self._rollout = rollout

    def ask(self, body: bytes, endpoint: str = CHAT, answer_bytes: int = 0) -> float:
        """Seconds until the whole answer is there."""
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        if answer_bytes:
            headers[LARGE_ANSWER] = str(answer_bytes)
        view = memoryview(body)
        pieces = [view[begin : begin + MEGABYTE] for begin in range(0, len(body), MEGABYTE)]
        begin = time.perf_counter()
        self._connection.request("POST", PATH.format(self._rollout, endpoint), pieces, headers)
        answer = self._connection.getresponse()
        while answer.read(MEGABYTE):
            pass
        assert answer.status == 200, answer.status
        return time.perf_counter() - begin


def beside(others: Client, large: Callable[[], float]) -> tuple[float, list[float]]:
    """Seconds of the large call, and of small ones while it is under way."""
    own: list[float] = []
    thread = threading.Thread(target=lambda: own.append(large()))
    thread.start()
    seconds = []
    while thread.is_alive():
        seconds.append(others.ask(SMALL))
        time.sleep(0.002)
    return own[0], seconds


def measure(port: int, n_bytes: int) -> None:
    others, client = Client(port, "others"), Client(port, "large")
    alone = [others.ask(SMALL) for _ in range(200)][50:]
    print(f"Small calls alone: median {1e3 * statistics.median(alone):.1f} ms.")
    print("\n| large | its own seconds | other calls: worst ms | median ms |")
    print("| --- | ---: | ---: | ---: |")
    for name, endpoint, make, is_answer in CASES:
        answer_bytes = n_bytes if is_answer else 0
        client.ask(SMALL, CHAT, answer_bytes)  # the server makes its answer
        body = make(n_bytes)
        own, seconds = beside(others, functools.partial(client.ask, body, endpoint, answer_bytes))
        worst, median = max(seconds), statistics.median(seconds)
        print(f"| {name} | {own:.2f} | {1e3 * worst:.0f} | {1e3 * median:.1f} |", flush=True)


def started(target: Callable[..., None], *arguments: int) -> tuple[multiprocessing.Process, int]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=target, args=(*arguments, theirs), daemon=True
    )
    process.start()
    return process, ours.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100, help="of the large body or answer")
    n_bytes = parser.parse_args().megabytes * MEGABYTE
    server, server_port = started(serve_bytes)
    proxy, port = started(serve_proxy, server_port)
    try:
        measure(port, n_bytes)
    finally:
        proxy.terminate()
        server.terminate()


if __name__ == "__main__":
    main()
