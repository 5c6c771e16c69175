"""One process of a real run is killed in one phase of a step: what is left, and the next run.

A run has the phases sampling, update, save and sync, in this order. Of the pairs of a victim and a
phase these are tried here, so that each victim dies twice and each phase is interrupted twice:

| victim | killed in step 2 | and the run that resumes, in step 3 |
| --- | --- | --- |
| vLLM engine | sampling | sync |
| Ray worker | update | save |
| driver | save | update |
| store server, a process of its own | sync | sampling |

A third run resumes and ends. The other pairs, runners, `join` and signals: test_process_kills,
without verl's workers.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")
pytest.importorskip("vllm", reason="needs the extra [cpu]")

from support.process_runs import free_port, is_free
from support.verl_runs import SCRIPT, TIMEOUT_SECONDS, abandoned_segments, environment, leftovers

STEPS = 4
END_SECONDS = 300.0  # from the kill to the end of the driver, on a busy machine
GONE_SECONDS = 60.0  # from the end of the driver to that of what cleans up after it

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * TIMEOUT_SECONDS)]


@dataclass(frozen=True)
class Victim:
    """A process of a run.

    Attributes:
        title: in its name or command line; None: the bench has started it.
        cause: in the last lines of the run's output.
        status: of the driver.
    """

    title: str | None
    cause: str
    status: int = 1


VICTIMS = {
    "engine": Victim("EngineCore", "is dead"),
    "worker": Victim("ray::WorkerDict", "its worker process has died"),
    "driver": Victim(None, "the driver of a run, was killed", -signal.SIGKILL),
    "store": Victim(None, "the store failed to"),
}


class Bench:
    """The folder, ports and processes of runs that follow one another."""

    def __init__(self, folder: Path, temporary: Path, *, has_store: bool) -> None:
        self.folder = folder
        self.temporary = temporary
        self.ports = [free_port(), free_port()]
        self.store_port = free_port() if has_store else None
        self.segments = leftovers.shared_memory_segments()
        self.environment = environment(folder, TMPDIR=str(temporary))
        self.n_runs = 0
        self.driver: subprocess.Popen[bytes] | None = None
        self.store: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """A run with the same settings on the same ports."""
        self.n_runs += 1
        (self.folder / "phases").write_text("")
        if self.store_port is not None and (self.store is None or self.store.poll() is not None):
            self._start_store()
        store_port, proxy_port = map(str, self.ports)
        arguments = ["--config", "killed", "--steps", str(STEPS)]
        arguments += ["--port", store_port, "--proxy-port", proxy_port]
        if self.store_port is not None:
            arguments += ["--store", str(self.store_port)]
        with self.log.open("wb") as out:
            self.driver = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(self.folder), *arguments],
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _start_store(self) -> None:
        arguments = ["--host", "127.0.0.1", "--port", str(self.store_port)]
        with (self.folder / "store.log").open("ab") as out:
            self.store = subprocess.Popen(
                [sys.executable, "-m", "agentlightning.cli.store", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        until(lambda: not is_free(self.store_port or 0), TIMEOUT_SECONDS, self)

    @property
    def log(self) -> Path:
        return self.folder / f"run-{self.n_runs}.log"

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def phases(self) -> list[str]:
        return (self.folder / "phases").read_text().splitlines()

    def processes(self) -> list[psutil.Process]:
        """Of the runs, whatever became of their parents."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                of_run = process.environ().get("AGL_FAST_TEST") == str(self.folder)
                if of_run and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill_in(self, phase: str, victim: Victim) -> None:
        """Start a run, and kill its victim while it stands in the phase."""
        hold = self.folder / "hold"
        hold.write_text(phase)
        self.start()
        driver = self.driver
        assert driver is not None
        until(lambda: phase in self.phases or driver.poll() is not None, TIMEOUT_SECONDS, self)
        assert driver.poll() is None, self.output[-4000:]
        if victim is VICTIMS["store"]:
            assert self.store is not None
            self.store.kill()  # before the phase, which may not need it
            self.store.wait()
            hold.unlink()
        elif victim is VICTIMS["driver"]:
            hold.unlink()
            time.sleep(0.05)  # into the phase
            driver.kill()
        else:
            process = self._titled(str(victim.title))
            process.suspend()  # the phase cannot end without it
            hold.unlink()
            time.sleep(1.0)  # into the phase
            process.kill()

    def _titled(self, title: str) -> psutil.Process:
        titles = {each: " ".join([each.name(), *each.cmdline()]) for each in self.processes()}
        found = [process for process, each in titles.items() if title in each]
        assert len(found) == 1, titles
        return found[0]

    def ended(self, seconds: float) -> int:
        """Exit status."""
        assert self.driver is not None
        try:
            return self.driver.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"runs on after {seconds:g} s:\n{self.output[-6000:]}")

    def close(self) -> None:
        if self.store is not None:
            self.store.kill()
            self.store.wait(30)
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.driver is not None:
            self.driver.wait(30)


def until(condition: Callable[[], bool], seconds: float, bench: Bench) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, bench.output[-6000:]
        time.sleep(0.05)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The temporary folder of a run: with a short path, as Ray's sockets need it."""
    folder = Path(tempfile.mkdtemp(prefix="k-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def bench(tmp_path: Path, temporary: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(tmp_path, temporary, has_store=request.param == "store")
    try:
        yield bench
    finally:
        bench.close()


def assert_nothing_left(bench: Bench) -> None:
    until(lambda: not bench.processes(), GONE_SECONDS, bench)
    kept = ("agl_fast-logs-",)  # of Ray
    if bench.driver is not None and bench.driver.returncode == -signal.SIGKILL:
        kept += ("ckpt_",)  # an empty file that verl locks
    names = [path.name for path in bench.temporary.iterdir()]
    assert [name for name in names if not name.startswith(kept)] == []
    assert abandoned_segments(bench.segments) == set()
    assert all(map(is_free, bench.ports))


def assert_killed(bench: Bench, victim: Victim) -> None:
    assert bench.ended(END_SECONDS) == victim.status, bench.output[-4000:]
    assert_nothing_left(bench)
    lines = [line for line in bench.output.splitlines() if line.strip()]
    assert victim.cause in "\n".join(lines[-5:]), bench.output[-6000:]


def phases_after(step: int) -> list[str]:
    """Of a run that resumes from this step."""
    steps = range(step + 1, STEPS + 1)
    phases = ("sampling", "update", "save", "sync")
    return [f"sync {step}", *(f"{phase} {each}" for each in steps for phase in phases)]


@pytest.mark.parametrize(
    ("bench", "first", "second"),
    [
        ("engine", "sampling", "sync"),
        ("worker", "update", "save"),
        ("driver", "save", "update"),
        ("store", "sync", "sampling"),
    ],
    indirect=["bench"],
)
def test_a_run_resumes_after_a_process_was_killed(
    bench: Bench, first: str, second: str, request: pytest.FixtureRequest
) -> None:
    victim = VICTIMS[request.node.callspec.params["bench"]]
    saved = [0]
    for phase in (f"{first} 2", f"{second} 3"):
        bench.kill_in(phase, victim)
        assert_killed(bench, victim)
        assert phase in bench.phases
        assert resumed_step(bench) in saved
        saved = [int(each.split()[1]) for each in bench.phases if each.startswith("sync")][-1:]
        if bench.phases[-1].startswith("save") and victim is VICTIMS["driver"]:
            saved.append(saved[0] + 1)  # it may have just ended
    bench.start()
    assert bench.ended(TIMEOUT_SECONDS) == 0, bench.output[-4000:]
    assert resumed_step(bench) in saved
    assert bench.phases == phases_after(resumed_step(bench))
    assert_nothing_left(bench)


def resumed_step(bench: Bench) -> int:
    """Whose weights the servers got first."""
    phase, step = bench.phases[0].split()
    assert phase == "sync"
    return int(step)
