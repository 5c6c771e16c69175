"""verl on a machine without an accelerator.

verl loads this package through the `verl.plugins` entry point at the end of every `import verl`.
Importing it only adds a platform named `cpu` to verl's registry. verl still chooses: it takes the
first platform that is available (CUDA, NPU and ROCm are asked before this one), or the one that
the environment variable `VERL_PLATFORM` names.

verl swallows the errors of plugins, so whoever needs the platform calls
`agl_fast.platform_cpu.registration.require_cpu()`, which raises when anything is missing.
"""

from agl_fast.platform_cpu.platform import CpuPlatform

__all__ = ["CpuPlatform"]
