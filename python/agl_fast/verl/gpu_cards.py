"""NVIDIA cards of this machine, listed by `nvidia-smi`.

After an initialisation of CUDA in a process, its forks, such as runners, could not use CUDA.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

SMI_SECONDS = 30
_FIELDS = ("name", "compute_cap", "memory.free", "memory.total", "driver_version")
MIB = 1 << 20


@dataclass(frozen=True)
class Card:
    """One card.

    Attributes:
        capability: its compute capability, (major, minor).
        free, total: bytes of its memory.
        driver: its version.
    """

    name: str
    capability: tuple[int, int]
    free: int
    total: int
    driver: str


def cards() -> list[Card]:
    """All cards, in the driver's order; none if `nvidia-smi` is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return []
    return [card for line in asked.stdout.splitlines() if (card := _card(line)) is not None]


def _card(line: str) -> Card | None:
    values = [value.strip() for value in line.split(",")]
    if len(values) != len(_FIELDS):
        return None
    name, capability, free, total, driver = values
    try:
        major, minor = map(int, capability.split("."))
        return Card(name, (major, minor), int(free) * MIB, int(total) * MIB, driver)
    except ValueError:  # an error message, or "[N/A]"
        return None
