"""What this process registered with verl, and the check that nothing is missing."""

from __future__ import annotations

import os
import sys
from typing import TypedDict


class Registration(TypedDict):
    """The state of verl's registries in one process."""

    pid: int
    platform: str
    device: str
    engines: list[str]


def registration() -> Registration:
    """Read verl's registries; registers nothing itself."""
    from verl.plugin.platform import PlatformRegistry
    from verl.utils.device import get_device_name

    cpu_platform = PlatformRegistry.get("cpu")
    return Registration(
        pid=os.getpid(),
        platform=cpu_platform.__name__ if cpu_platform is not None else "",
        device=get_device_name(),
        engines=_cpu_engines(),
    )


def _cpu_engines() -> list[str]:
    # Not imported here: where nothing trains, importing verl's engines only costs seconds.
    engine_registry = sys.modules.get("verl.workers.engine.base")
    if engine_registry is None:
        return []
    return sorted(
        f"{model_type}/{backend}"
        for model_type, backends in engine_registry.EngineRegistry._engines.items()
        for backend, devices in backends.items()
        if "cpu" in devices
    )


def require_cpu(*, engines: bool = False) -> Registration:
    """Return the registration of this process.

    Args:
        engines: also require the FSDP2 engines (in processes that train).

    Raises:
        RuntimeError: naming what is missing. verl logs a failing plugin at DEBUG level only, and
            would go on with its CUDA platform.
    """
    state = registration()
    missing = []
    if not state["platform"]:
        missing.append("platform 'cpu' (did `import agl_fast.verl.platform_cpu` fail?)")
    if state["device"] != "cpu":
        missing.append(f"device 'cpu' (verl chose {state['device']!r}; set VERL_PLATFORM=cpu)")
    if engines:
        wanted = ("language_model/fsdp2", "value_model/fsdp2")
        missing += [f"engine {name}" for name in wanted if name not in state["engines"]]
    if missing:
        raise RuntimeError(f"process {state['pid']} lacks verl's {', '.join(missing)}")
    return state
