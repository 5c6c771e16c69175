"""verl's `cpu` platform: host memory instead of device memory, gloo instead of NCCL."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

# vLLM's CPU server: one GiB of KV cache, no thread pinning (the trainer shares the cores), no
# usage statistics, the one worker in the engine's process where the executor is `uni`. A value that
# the user has set stays.
ROLLOUT_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def _peak_memory(*_: object) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _used_memory(*_: object) -> int:
    return int(psutil.Process().memory_info().rss)


def _free_and_total_memory(*_: object) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _device_properties(*_: object) -> SimpleNamespace:
    return SimpleNamespace(name="CPU", total_memory=psutil.virtual_memory().total)


def _nothing(*_: object, **__: object) -> None:
    return None


# What verl calls on torch.cuda and torch.cpu does not have.
_TORCH_CUDA_SURFACE: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "current_device": lambda: "cpu",
    "get_device_name": lambda *_: "CPU",
    "get_device_properties": _device_properties,
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "mem_get_info": _free_and_total_memory,
    "memory_allocated": _used_memory,
    "memory_reserved": _used_memory,
    "max_memory_allocated": _peak_memory,
    "max_memory_reserved": _peak_memory,
    "empty_cache": _nothing,
    "ipc_collect": _nothing,
    "reset_peak_memory_stats": _nothing,
    "reset_accumulated_memory_stats": _nothing,
    "set_device": _nothing,
    "set_per_process_memory_fraction": _nothing,
    "synchronize": _nothing,
}


def _make_device_module() -> ModuleType:
    module = ModuleType("agl_fast.verl.platform_cpu.device_module")
    module.__dict__.update(
        {name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")}
    )
    module.__dict__.update(_TORCH_CUDA_SURFACE)
    return module


_DEVICE_MODULE = _make_device_module()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The `cpu` platform. Its one device is the host."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """False: verl must not choose this platform by itself, only where a run names it."""
        return False

    def current_device(self) -> str:
        # verl passes it to Tensor.to, where the host has no index.
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        # A logical resource: Ray counts as many as `ray.init(num_gpus=N)` says, and verl's resource
        # pools and vLLM replicas are placed by it.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        # Weights travel through POSIX shared memory instead.
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        # vLLM's servers are processes of their own, in which verl chooses anew.
        chosen = {"VERL_PLATFORM": "cpu"}
        return chosen | {
            name: os.environ.get(name, value) for name, value in ROLLOUT_ENVIRONMENT.items()
        }

    def cudart(self) -> None:
        return None
