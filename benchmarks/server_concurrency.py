"""Throughput of a vLLM server by calls in flight: `python -m benchmarks.server_concurrency URL`.

How many calls must be in flight to fill the server's batch decides how many rollouts the runners
must keep in flight: calls in flight ≈ rollouts in flight × the share of a rollout's time that is a
call (`training/concurrency/call_share`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time

import httpx

LEVELS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TIMEOUT_SECONDS = 600.0


async def throughput(
    client: httpx.AsyncClient, url: str, model: str, options: argparse.Namespace, n: int
) -> float:
    """Sampled tokens a second with `n` calls in flight."""
    draw = random.Random(n)

    async def call() -> None:
        prompt = [draw.randrange(options.vocabulary) for _ in range(options.prompt_tokens)]
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": options.tokens,
            "temperature": 1.0,
            "ignore_eos": True,
        }
        answer = (await client.post(f"{url}/completions", json=body)).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == options.tokens

    async def calls(times: int) -> None:
        for _ in range(times):
            await call()

    await calls(1)
    times = max(1, options.calls // n)
    begin = time.perf_counter()
    await asyncio.gather(*(calls(times) for _ in range(n)))
    return n * times * options.tokens / (time.perf_counter() - begin)


async def measure(options: argparse.Namespace) -> None:
    url = options.url.rstrip("/")
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, limits=limits) as client:
        models = (await client.get(f"{url}/models")).raise_for_status().json()
        model = models["data"][0]["id"]
        levels = [n for n in LEVELS if n <= options.most]
        measured = {n: await throughput(client, url, model, options, n) for n in levels}
    best = max(measured.values())
    print("| calls in flight | tokens a second | of the best |\n| ---: | ---: | ---: |")
    for n, tokens in measured.items():
        print(f"| {n} | {tokens:,.0f} | {tokens / best:.0%} |")
    enough = min(n for n, tokens in measured.items() if tokens >= 0.8 * best)
    print(f"{enough} calls in flight reach 80% of the best throughput.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="base URL of a vLLM server, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64, help="sampled tokens of each call")
    parser.add_argument("--calls", type=int, default=64, help="calls at each level, at least")
    parser.add_argument("--most", type=int, default=64, help="the most calls in flight")
    parser.add_argument("--vocabulary", type=int, default=256, help="prompt ids are below it")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
