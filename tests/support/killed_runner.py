"""A runner process whose agent makes one call, and then dies as if the kernel had killed it.

Args: the store's URL.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import httpx

from support.daemon_runs import agentlightning

BEAT_SECONDS = 0.2


@agentlightning.rollout
def dies_between_two_calls(task: dict, llm: agentlightning.LLM) -> float:
    body = {"model": llm.model, "messages": [{"role": "user", "content": "old"}]}
    httpx.post(f"{llm.endpoint}/chat/completions", json=body).raise_for_status()
    time.sleep(3 * BEAT_SECONDS)  # it is known to have lived
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def main() -> None:
    runner = agentlightning.LitAgentRunner(
        tracer=agentlightning.OtelTracer(),
        poll_interval=0.05,
        interval_jitter=0.0,
        heartbeat_interval=BEAT_SECONDS,
    )
    runner.init(dies_between_two_calls)
    runner.init_worker(7, agentlightning.LightningStoreClient(sys.argv[1]))
    asyncio.run(runner.iter())


if __name__ == "__main__":
    main()
