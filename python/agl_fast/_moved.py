"""Import paths that the documentation of 0.1 gave, kept working."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # importlib.abc costs a millisecond of `import agl_fast`

MOVED = {
    "agl_fast.batch": "agl_fast.rows",
    "agl_fast.platform_cpu": "agl_fast.verl.platform_cpu",
    "agl_fast.verl.credit": "agl_fast.training.credit",
    "agl_fast.verl.daemon": "agl_fast.rollouts",
    "agl_fast.verl.daemon.agent_mode": "agl_fast.rollouts.daemon",
    "agl_fast.verl.daemon.outcomes": "agl_fast.rollouts.finished",
    "agl_fast.verl.daemon.rows": "agl_fast.rollouts.training_rows",
    "agl_fast.verl.dry_run": "agl_fast.tools.dry_run",
    "agl_fast.verl.export": "agl_fast.tools.export",
    "agl_fast.verl.losses": "agl_fast.training.losses",
    "agl_fast.verl.proxy": "agl_fast.proxy",
    "agl_fast.verl.replay": "agl_fast.tools.replay",
    "agl_fast.verl.trainer": "agl_fast.training",
    "agl_fast.verl.trainer.agent_lightning": "agl_fast.training.trainer",
    # `from agl_fast.verl.trainer import watch` looks for it in the package of today.
    "agl_fast.training.watch": "agl_fast.verl.supervision.watch",
    "agl_fast.verl.trainer.watch": "agl_fast.verl.supervision.watch",
    "agl_fast.verl.trainer.workers": "agl_fast.training.worker_groups",
    "agl_fast.verl.tree": "agl_fast.tree",
    "agl_fast.verl.tree.workers": "agl_fast.tree.tree_workers",
}


def keep_old_paths() -> None:
    """Let `import` find every module of ``MOVED`` by its old name."""
    if not any(isinstance(finder, _OldPaths) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldPaths())  # ahead of the search in a package's own folder


class _OldPaths:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("agl_fast."):
            return None
        known, rest = fullname, ""
        while known not in MOVED:
            known, dot, last = known.rpartition(".")
            if not dot:
                return None
            rest = f".{last}{rest}"
        return ModuleSpec(fullname, _SameModule(MOVED[known] + rest))


class _SameModule(Loader):
    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has put the old name's there
