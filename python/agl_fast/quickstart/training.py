"""An agent is trained with `VERL` while a `RunLog` is told what happens."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import agentlightning as agl

from agl_fast.algorithm import VERL
from agl_fast.quickstart.reporting import reporting_to
from agl_fast.quickstart.run_log import RunLog

N_RUNNERS = 2


def train_agent(
    agent: Any,
    settings: Mapping[str, Any],
    log: RunLog,
    *,
    train_dataset: list[dict[str, Any]],
    val_dataset: list[dict[str, Any]],
) -> None:
    """Run all steps of `log`.

    Args:
        settings: for `VERL`.

    Raises:
        RuntimeError: the run ended before its last step.
    """
    trainer_cls, daemon_cls = reporting_to(log)
    algorithm = VERL(settings, trainer_cls=trainer_cls, daemon_cls=daemon_cls)
    log.say("starting Ray, FSDP2 and vLLM (one to two minutes) ...")
    agl.Trainer(
        algorithm=algorithm,
        n_runners=N_RUNNERS,
        # By default a runner that found nothing to do waits for five seconds.
        runner={
            "type": "agentlightning.LitAgentRunner",
            "poll_interval": 0.2,
            "interval_jitter": 0.1,
        },
        # The default one records every call of openai, too; VERL's proxy does that already.
        tracer=agl.OtelTracer(),
        strategy={"type": "cs", "server_port": free_port()},
    ).fit(agent, train_dataset=train_dataset, val_dataset=val_dataset)
    if len(log.rewards) < log.steps:
        # Agent-lightning's Trainer returns, too, when Ctrl-C ends its algorithm.
        raise RuntimeError(f"the run ended after {len(log.rewards)} of {log.steps} steps")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
