"""verl on a machine without an accelerator.

verl loads this package through the `verl.plugins` entry point at the end of every `import verl`.
Importing it only adds a platform named `cpu` to verl's registry, which verl never chooses by
itself: runs of verl without agl_fast are what they were. `agl_fast.VERL` chooses it for a run on
CPUs (`agl_fast.verl.device_choice`), and so does the environment variable `VERL_PLATFORM=cpu`.

verl swallows the errors of plugins: `agl_fast.verl.platform_cpu.registration.require_cpu()` raises
where something is missing.
"""

from agl_fast.verl.platform_cpu.platform import CpuPlatform

__all__ = ["CpuPlatform"]
