"""What agents ask for and the run does otherwise: counted each time, logged once."""

from __future__ import annotations

import logging

from agl_fast.printable import shown
from agl_fast.proxy.engines import Engine
from agl_fast.proxy.outgoing import Outgoing
from agl_fast.proxy.recorder import Recorder

logger = logging.getLogger(__name__)

# An agent may invent names.
MAX_UNKNOWN = 32

_OVERRIDDEN = "Agents ask for %s=%s; training samples with %s=%s (sampling: enforce)."
_DEVIATING = "Agents sample with %s=%s; the trainer computes log-probs with %s=%s."
_UNENFORCED = (
    "Agents set %s, which changes what is sampled; the trainer's log-probs do not account for it."
)
_SEEDED = (
    "Agents send a seed: rollouts of one sample that ask the same get the same answer, and there "
    "is nothing to be learned from comparing them."
)
_UNKNOWN = (
    "Agents send %s, which is no field of %s's that agl_fast knows. It goes out as it is: the "
    "server ignores fields that it does not know, and the trainer's log-probs do not account for "
    "it."
)


class Notices:
    """Counts in the recorder (its docstring names the counts), and logs each thing once."""

    def __init__(self, recorder: Recorder, engine: Engine) -> None:
        self._recorder = recorder
        self._engine = engine
        self._said: set[str] = set()

    def count(self, outgoing: Outgoing) -> None:
        """What was changed in a request, and what should have been."""
        if outgoing.capped:
            self._recorder.count("max_tokens_capped")
        if outgoing.seeded:
            self._recorder.count("seeded")
            self._say_once("seeded", _SEEDED)
        self._count_each("sampling_overridden", list(outgoing.overridden))
        self._count_each("sampling_deviating", list(outgoing.deviating))
        self._count_each("sampling_unenforced", outgoing.unenforced)
        self._count_each("fields_replaced", outgoing.replaced)
        for name, (theirs, ours) in outgoing.overridden.items():
            self._say_once(f"overridden.{name}", _OVERRIDDEN, name, shown(theirs), name, ours)
        for name, (theirs, ours) in outgoing.deviating.items():
            self._say_once(f"deviating.{name}", _DEVIATING, name, shown(theirs), name, ours)
        for name in outgoing.unenforced:
            self._say_once(f"unenforced.{name}", _UNENFORCED, name)
        for name in outgoing.replaced:
            self._say_once(f"replaced.{name}", self._engine.REPLACED_BECAUSE[name])
        if outgoing.unknown:
            self._recorder.count("fields_unknown")
        for name in outgoing.unknown[:MAX_UNKNOWN]:
            if sum(said.startswith("unknown.") for said in self._said) < MAX_UNKNOWN:
                self._say_once(f"unknown.{name}", _UNKNOWN, shown(name), self._engine.NAME)

    def _count_each(self, kind: str, names: list[str]) -> None:
        if names:
            self._recorder.count(kind)
        for name in names:
            self._recorder.count(f"{kind}.{name}")

    def _say_once(self, what: str, message: str, *values: object) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning(message, *values)
