"""The Ray cluster of a run: started for it, or an existing one."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from omegaconf import OmegaConf
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from verl.plugin.platform import get_platform
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

from agl_fast.verl.device_choice import CPU, PLATFORM_VARIABLE
from agl_fast.verl.supervision.deadlines import Deadlines
from agl_fast.verl.supervision.interrupts import Interrupts
from agl_fast.verl.supervision.leftovers import RUN_VARIABLE, stop_processes_of_run
from agl_fast.verl.supervision.run_scope import RunScope
from agl_fast.verl.supervision.waits import Limit
from agl_fast.verl.supervision.watch import watched

logger = logging.getLogger(__name__)

START_ATTEMPTS = 3
ROOM_CHECK_SECONDS = 2.0
GIVEN_BACK_SECONDS = 30.0
GIVEN_BACK_CHECK_SECONDS = 0.1
LOST_GRACE_SECONDS = 1.0
# Time limit of vLLM for the start of an engine; 600 s by default.
READY_VARIABLE = "VLLM_ENGINE_READY_TIMEOUT_S"
# Options that an existing cluster does not take.
_OF_A_NEW_CLUSTER = ("num_cpus", "num_gpus", "object_store_memory", "include_dashboard")

# Logical CPUs that verl reserves for each GPU, before it places any other actor.
_CPUS_OF_A_GPU = 3


def check_cpus(config: Any) -> None:
    """Raise ValueError if a cluster started here would have too few logical CPUs.

    Its actors would wait for resources without a message.
    """
    wanted = config.ray_kwargs.get("ray_init", {}).get("num_cpus")
    least = _least_cpus(config)
    if wanted is not None and wanted < least and _address(config) == "local":
        raise ValueError(
            f"ray_kwargs.ray_init.num_cpus={wanted}: expected at least {least}, as verl reserves "
            f"{_CPUS_OF_A_GPU} for each of trainer.nnodes × trainer.n_gpus_per_node GPUs, and a "
            "server on each node needs one; Ray only counts them, the machine may have fewer"
        )


def _least_cpus(config: Any) -> int:
    return int((_CPUS_OF_A_GPU * config.trainer.n_gpus_per_node + 1) * config.trainer.nnodes)


class Daemons:
    """The processes of a Ray that was started here; none of an existing cluster.

    They are in the process group of the run, and Slurm signals every process of a job: a SIGTERM
    for the run may end them first. Ray's calls then wait for a minute, and end the process.
    """

    def __init__(self, processes: Sequence[psutil.Process], interrupts: Interrupts) -> None:
        self._processes = list(processes)
        self._interrupts = interrupts

    def is_lost(self) -> bool:
        """Whether calls into Ray must be skipped, as they may never return."""
        if not self._processes:
            return False
        return self._interrupts.terminated or not all(map(_is_alive, self._processes))


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def ray_cluster(config: Any, scope: RunScope, interrupts: Interrupts) -> Iterator[Daemons]:
    """Connect to Ray and disconnect at the end, unless the caller is connected already.

    An existing cluster (`ray_kwargs.ray_init.address`, or RAY_ADDRESS) is used, and stays.

    Args:
        config: the whole configuration, resolved.
        scope: of the run; a cluster that is started here has its files in its folder.
        interrupts: after a SIGTERM, a cluster that was started here is ended without Ray.

    Raises:
        RuntimeError: the cluster has insufficient resources; the message lists them.
    """
    if ray.is_initialized():
        _require_room(config)
        yield Daemons([], interrupts)
        return
    is_own = _address(config) == "local"
    options = _init_options(config, scope.folder)
    if not is_own:  # its processes are not started here
        options["runtime_env"]["env_vars"][RUN_VARIABLE] = scope.run_id
    with scope.environment():
        _start(options)
    interrupts.listen()  # ray.init has taken SIGTERM
    daemons = Daemons(_daemon_processes() if is_own else [], interrupts)
    try:
        _require_room(config)
        yield daemons
    finally:
        if daemons.is_lost():
            if not interrupts.terminated:
                logger.error("Ray's own processes have died; the run's others are ended")
            # First: without a process that answers, Ray gives up at once.
            stop_processes_of_run(scope.run_id, grace_seconds=LOST_GRACE_SECONDS)
        with watched("leaving Ray", Deadlines.of(config).leave):
            ray.shutdown()


def _daemon_processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if child.name() in ("gcs_server", "raylet")]


def _require_room(config: Any) -> None:
    """Raise RuntimeError if the cluster has insufficient resources, and does not grow in time.

    verl reserves the resources of its workers and places a server beside them later, which would
    wait for a CPU without a message. Here all resources are reserved together, and released.
    """
    groups = [
        placement_group(_bundles_of_a_node(config), strategy="STRICT_PACK")
        for _ in range(config.trainer.nnodes)
    ]
    wanted = sum((Counter(bundle) for group in groups for bundle in group.bundle_specs), Counter())
    limit = Deadlines.of(config).room
    deadline = time.monotonic() + limit.seconds
    is_said = False
    try:
        for group in groups:
            while not group.wait(ROOM_CHECK_SECONDS):
                what = (
                    f"the run needs {_shown(wanted)} (for each of trainer.nnodes="
                    f"{config.trainer.nnodes} nodes, {_CPUS_OF_A_GPU} logical CPUs for each of "
                    f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node} GPUs, and one for "
                    f"a server): {_missing(wanted)}"
                )
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"the Ray cluster has insufficient resources after {limit}; {what}. Start "
                        "it with `ray start --num-cpus`, set ray_kwargs.ray_init.num_cpus, or "
                        "leave ray_kwargs.ray_init.address and RAY_ADDRESS unset for a cluster of "
                        "the run's own"
                    )
                if not is_said:
                    is_said = True
                    logger.warning(
                        "The Ray cluster has insufficient resources, waiting %s; %s",
                        limit,
                        what,
                    )
    finally:
        for group in groups:
            remove_placement_group(group)
    _wait_until_free(wanted)


def _wait_until_free(wanted: Counter[str]) -> None:
    """Wait until Ray counts the resources of removed groups as free, which verl asks next."""
    deadline = time.monotonic() + GIVEN_BACK_SECONDS
    while time.monotonic() < deadline:
        free = ray.available_resources()
        if all(free.get(name, 0) >= amount for name, amount in wanted.items()):
            return
        time.sleep(GIVEN_BACK_CHECK_SECONDS)


def _bundles_of_a_node(config: Any) -> list[dict[str, float]]:
    of_gpu = {get_platform().ray_resource_name(): 1.0, "CPU": float(_CPUS_OF_A_GPU)}
    return [*[of_gpu] * config.trainer.n_gpus_per_node, {"CPU": 1.0}]


def _shown(resources: Counter[str]) -> str:
    return ", ".join(f"{name}: {amount:g}" for name, amount in sorted(resources.items()))


def _start(options: dict[str, Any]) -> None:
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(**options)
            return
        except Exception as error:  # Ray raises no other class
            # Ray waits 30 s for its own processes, which may not suffice on a busy machine.
            if attempt == START_ATTEMPTS or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


def _init_options(config: Any, folder: Path) -> dict[str, Any]:
    options = OmegaConf.to_container(config.ray_kwargs.get("ray_init", {}), resolve=True)
    assert isinstance(options, dict)
    options = {name: value for name, value in options.items() if value is not None}
    ready = {READY_VARIABLE: str(math.ceil(Deadlines.of(config).start.seconds))}
    environment = OmegaConf.merge(
        get_ppo_ray_runtime_env(config),
        {"env_vars": {} if READY_VARIABLE in os.environ else ready},
        options.pop("runtime_env", None) or {},
    )
    options["runtime_env"] = OmegaConf.to_container(environment)
    if get_platform().device_name == CPU:
        options["runtime_env"]["env_vars"][PLATFORM_VARIABLE] = CPU
    if _address(config) != "local":
        return {k: v for k, v in options.items() if k not in _OF_A_NEW_CLUSTER}
    # "local": not another cluster that happens to run on this machine.
    return {"address": "local", "_temp_dir": str(folder), "logging_level": "WARNING", **options}


def _address(config: Any) -> str:
    options = config.ray_kwargs.get("ray_init", {})
    return options.get("address") or os.environ.get("RAY_ADDRESS") or "local"


class Placements:
    """Raises RuntimeError if a placement group of the run waits too long for its resources.

    Groups that exist before the run belong to other users of the cluster.

    Args:
        limit: maximum time that a group may wait.
    """

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._others = set(placement_group_table())
        self._waiting_since: dict[str, float] = {}

    def __call__(self) -> None:
        now = time.monotonic()
        for group_id, group in placement_group_table().items():
            if group["state"] != "PENDING" or group_id in self._others:
                self._waiting_since.pop(group_id, None)
                continue
            since = self._waiting_since.setdefault(group_id, now)
            if now - since > self._limit.seconds:
                raise RuntimeError(
                    f"Ray has not placed {dict(_total(group))} within {self._limit}; "
                    f"{_missing(_total(group))}"
                )


def _total(group: dict[str, Any]) -> Counter[str]:
    total: Counter[str] = Counter()
    for bundle in group["bundles"].values():
        total.update(bundle)
    return total


def _missing(wanted: Counter[str]) -> str:
    available, total = ray.available_resources(), ray.cluster_resources()
    missing = [
        f"{name} {amount:g}, available {available.get(name, 0):g} of {total.get(name, 0):g}"
        for name, amount in wanted.items()
        if amount > available.get(name, 0)
    ]
    return f"needs {'; '.join(missing)}" if missing else "no single node has all of it"
