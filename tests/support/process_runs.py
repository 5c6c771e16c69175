"""Runs of the process that train nothing, and whose processes tests kill.

A run has what a real one has, short of verl's workers: an agentlightning.Trainer with runner
processes, the store behind HTTP, the proxy, the daemon and rows. It goes through the phases of a
step (sampling, update, sync, save), and continues after the last saved step.

Processes are forked from a server that has imported everything, so that a test takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

PHASES = ("sampling", "update", "sync", "save")
STORE_AWAY_SECONDS = 4.0
SECONDS = 240.0  # the first process imports everything; a busy machine is slow
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["support.process_runs", "support.daemon_runs", "agl_fast.algorithm"]
)


@dataclass(frozen=True)
class Options:
    """What a run is made of.

    Attributes:
        label: begins every message of its agents.
        folder: of the log and the saved step.
        server: `host:port` of the fake vLLM.
        hold: the phase in which step 1 stands still for ever; sampling: held by the server.
        role: of Agent-lightning's strategy.
        store: the port of a store that another process serves.
        proxy_port: of a proxy that is where the one before was.
    """

    label: str
    folder: Path
    port: int
    server: str
    steps: int = 3
    hold: str | None = None
    role: str = "both"
    n_runners: int = 2
    store: int | None = None
    proxy_port: int | None = None
    daemon: dict[str, Any] = field(default_factory=dict)


def talker(label: str) -> Any:
    import httpx

    from support.daemon_runs import agentlightning

    @agentlightning.rollout
    def talk(task: dict, llm: Any) -> float:
        body = {
            "model": llm.model,
            "messages": [{"role": "user", "content": f"{label} {task['question']}"}],
        }
        answer = httpx.post(f"{llm.endpoint}/chat/completions", json=body, timeout=SECONDS)
        answer.raise_for_status()
        return 1.0

    return talk


def trainer_of(options: Options, algorithm: Any = None, role: str | None = None) -> Any:
    from support.daemon_runs import agentlightning

    store = None
    if options.store is not None:
        store = agentlightning.LightningStoreClient(f"http://127.0.0.1:{options.store}")
    return agentlightning.Trainer(
        algorithm=algorithm,
        store=store,
        n_runners=options.n_runners,
        tracer=agentlightning.OtelTracer(),
        runner={
            "type": "agentlightning.LitAgentRunner",
            "poll_interval": 0.1,
            "interval_jitter": 0.0,
            "heartbeat_interval": 0.3,
        },
        strategy={
            "type": "cs",
            "role": role or options.role,
            "server_host": "127.0.0.1",
            "server_port": options.port,
            "graceful_timeout": 2.0,
            "terminate_timeout": 2.0,
            "managed_store": store is None,
        },
    )


def drive(options: Options) -> None:
    """The driver's process."""
    from agl_fast.algorithm import VERL
    from agl_fast.verl.supervision.deadlines import default_deadlines
    from agl_fast.verl.supervision.interrupts import interruptible
    from agl_fast.verl.supervision.waits import Limit
    from support.daemon_runs import new_daemon
    from support.verl_settings import documented

    class Steps(VERL):
        """Its calls become rows, and that is all."""

        def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            with interruptible():
                self._run()

        def _run(self) -> None:
            saved = options.folder / "saved"
            first = int(saved.read_text()) + 1 if saved.exists() else 0
            settings = {
                "train_rollout_n": 1,
                "runner_silent_seconds": 3.0,
                "proxy_settings": {"port": options.proxy_port},
                "deadlines": replace(default_deadlines(), store_away=Limit(STORE_AWAY_SECONDS)),
                **options.daemon,
            }
            daemon = new_daemon(self.get_store(), **settings)
            try:
                for step in range(first, options.steps):
                    for phase in PHASES:
                        say(f"{phase} {step}")
                        if phase == "sampling":
                            data = {"question": [f"step {step} task {i}" for i in range(4)]}
                            daemon.set_up_data_and_server(data, [options.server])
                            daemon.run_until_all_finished(verbose=False)
                            rows, _ = daemon.get_train_data_batch(64, 64, "cpu", step)
                            say(f"{len(rows)} rows of step {step}")
                        elif step == 1 and options.hold == phase:
                            wait_while_held(options.folder)
                    saved.write_text(str(step))
            finally:
                daemon.stop()

    algorithm = Steps(documented()) if options.role != "runner" else None
    trainer_of(options, algorithm).fit(talker(options.label), [{}])
    say("the end")


def wait_while_held(folder: Path) -> None:
    """Until there is a file `go`."""
    while not (folder / "go").exists():
        time.sleep(0.05)


def serve_store(port: int) -> None:
    """`agl store`."""
    from agentlightning.cli.store import main

    main(["--host", "127.0.0.1", "--port", str(port), "--log-level", "WARNING"])


def join(options: Options, arguments: list[str]) -> int:
    """`python -m agl_fast join` with a script of the run's agent."""
    from agl_fast.__main__ import main as command

    script = options.folder / f"{options.label}_agent.py"
    script.write_text(
        "from support import process_runs\n"
        f"options = process_runs.Options({options.label!r}, None, {options.port}, '',"
        f" n_runners={options.n_runners})\n"
        "process_runs.trainer_of(options, role='runner')"
        f".fit(process_runs.talker({options.label!r}))\n"
        "process_runs.say('after fit')\n"
    )
    sys.path.insert(0, "")  # the command puts the script's folder in the place of the first one
    return command(["join", f"--port={options.port}", "--host=127.0.0.1", *arguments, str(script)])


def say(line: str) -> None:
    print(line, flush=True)


class Program:
    """A process of a session of its own, its output, and all that it started."""

    def __init__(self, folder: Path, name: str, main: Callable[..., Any], *arguments: Any) -> None:
        self.log = folder / f"{name}.log"
        self.log.touch()
        self.process: ForkServerProcess = _CONTEXT.Process(
            target=_in_session, args=(str(self.log), main, *arguments), name=name
        )
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = SECONDS) -> None:
        end = time.monotonic() + seconds
        while text not in self.output:
            alive = self.process.is_alive()
            assert alive or text in self.output, f"{text!r} is not in:\n{self.output}"
            assert time.monotonic() < end, f"{text!r} is not in:\n{self.output}"
            time.sleep(0.05)

    def ended(self, seconds: float = SECONDS) -> int | None:
        """Exit status."""
        self.process.join(seconds)
        assert not self.process.is_alive(), f"runs on after {seconds:g} s:\n{self.output}"
        return self.process.exitcode

    def session(self) -> list[psutil.Process]:
        """Living processes of it, whatever became of their parents; the oldest first."""
        found = []
        for process in psutil.process_iter(["create_time"]):
            try:
                if os.getsid(process.pid) == self.pid and process.status() != "zombie":
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return sorted(found, key=lambda each: each.create_time())

    def runners(self) -> list[psutil.Process]:
        return [each for each in self.session() if each.pid != self.pid]

    def is_gone(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.session() and time.monotonic() < end:
            time.sleep(0.1)
        return not self.session()

    def kill(self) -> None:
        for process in self.session():
            process.kill()
        self.process.join(10)


def _in_session(log: str, main: Callable[..., Any], *arguments: Any) -> None:
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # as in a program
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    try:
        sys.exit(main(*arguments))
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
