"""`python -m agl_fast join SCRIPT`: a program's agents as runners of a run elsewhere."""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from agl_fast.commands.store_errors import quiet_store_errors

logger = logging.getLogger(__name__)

WAIT_SECONDS = 60.0
CHECK_SECONDS = 1.0
CONNECT_SECONDS = 5.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a script whose agentlightning.Trainer(...).fit(agent) joins the store of a run, and "
        "end it after that run."
    )
    parser.add_argument("--host", help="of the store (default: AGL_SERVER_HOST, or localhost)")
    parser.add_argument("--port", type=int, help="(default: AGL_SERVER_PORT, or 4747)")
    parser.add_argument(
        "--wait",
        type=float,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help="end after the store was unreachable for this long (default: %(default)g)",
    )
    parser.add_argument(
        "--run",
        dest="run_id",  # options.run is the command
        metavar="ID",
        help="serve only this run (default: the first one there that has no runners of its own)",
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def run(options: argparse.Namespace) -> int:
    """Run the script as a runner until the run whose store it joins has ended."""
    if not options.script.is_file():
        options.parser.error(f"{options.script}: expected a Python script, there is none")
    environment = {
        "AGL_CURRENT_ROLE": "runner",
        "AGL_SERVER_HOST": options.host or os.environ.get("AGL_SERVER_HOST", "localhost"),
        "AGL_SERVER_PORT": str(options.port or os.environ.get("AGL_SERVER_PORT", 4747)),
    }
    os.environ.update(environment)
    # Only now, and not with agl_fast.VERL: agents need no verl.
    from agl_fast.verl.agentlightning_patches import patch_agentlightning
    from agl_fast.verl.membership import JOIN_VARIABLE, bind_runners_to_runs

    patch_agentlightning()
    quiet_store_errors()
    bind_runners_to_runs(lambda _: False)
    if options.run_id:
        os.environ[JOIN_VARIABLE] = options.run_id
    store = (environment["AGL_SERVER_HOST"], int(environment["AGL_SERVER_PORT"]))
    return _run(options.script, options.arguments, _StoreWatch(store, options.wait))


def _run(script: Path, arguments: Sequence[str], watch: _StoreWatch) -> int:
    from agl_fast.verl.membership import JoinRefused

    # `kill` ends a process alone, and the runners that Agent-lightning has started would go on
    # asking for rollouts for ever. On Ctrl-C it ends them, and returns as if the run were done.
    signals = _Signals()
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.parent)
    try:
        watch.start()
        runpy.run_path(str(script), run_name="__main__")
    except KeyboardInterrupt:
        pass
    except JoinRefused as refusal:
        logger.error("%s", refusal)
        return 1
    finally:
        watch.stop()
    if signals.last is not None and not watch.has_ended:
        return 128 + signals.last
    return 0


class _Signals:
    """SIGINT and SIGTERM, as KeyboardInterrupt.

    Attributes:
        last: the one that came last.
    """

    def __init__(self) -> None:
        self.last: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, _frame: FrameType | None) -> None:
        self.last = number
        raise KeyboardInterrupt


class _StoreWatch:
    """Interrupts the main thread once the run is over.

    It is over when the store has been there and has been gone for long, or when another run has
    its place. Agent-lightning's runners take a store that does not answer for one that starts soon.
    """

    def __init__(self, store: tuple[str, int], wait_seconds: float) -> None:
        self.has_ended = False
        self._store = store
        self._wait_seconds = wait_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="agl_fast-store", daemon=True)

    def start(self) -> None:
        self._say("agents join the store at {}")
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        if not self._is_there():
            self._say("there is no store at {} yet; the agents wait for it")
            self._wait(self._is_there)
            self._say("the store at {} is there")
        seen = time.monotonic()
        why = ""

        is_there = True

        def is_over() -> bool:
            nonlocal seen, why, is_there
            if self._is_there():
                seen = time.monotonic()
                is_there = True
                successor = self._successor()
                why = f"the store at {{}} is now that of {successor}" if successor else ""
            elif is_there:
                is_there = False
                self._say(
                    "the store at {} does not answer; the agents wait for it for "
                    f"{self._wait_seconds:g} s"
                )
            elif time.monotonic() - seen > self._wait_seconds:
                why = f"the store at {{}} has been gone for {self._wait_seconds:g} s"
            return bool(why)

        self._wait(is_over)
        if self._stopped.is_set():
            return
        self._say(f"{why}: the run is over")
        self.has_ended = True
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        signal.pthread_kill(main_thread, signal.SIGINT)

    def _wait(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self._stopped.wait(CHECK_SECONDS):
            pass

    def _is_there(self) -> bool:
        try:
            socket.create_connection(self._store, CONNECT_SECONDS).close()
        except OSError:
            return False
        return True

    def _successor(self) -> str | None:
        """What serves the store's address in place of the run that the agents work for."""
        import httpx

        from agl_fast.verl.addresses import url_host
        from agl_fast.verl.membership import current_run, knows_its_run, run_at

        if not knows_its_run():
            return None  # the runners have not asked yet
        run = current_run()
        host, port = self._store
        try:
            there = run_at(f"http://{url_host(host)}:{port}")
        except httpx.HTTPError:
            return None  # too busy to answer
        if there == run:
            return None
        return "another program" if there is None else str(there)

    def _say(self, what: str) -> None:
        host, port = self._store
        logger.info("%s", what.format(f"{host}:{port}"))
