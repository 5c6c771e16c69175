"""An agent's rows without training: `agl_fast.dry_run`."""

from __future__ import annotations

from agl_fast.tools.dry_run.result import DryRun
from agl_fast.tools.dry_run.run import dry_run

__all__ = ["DryRun", "dry_run"]
