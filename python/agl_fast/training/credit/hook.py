"""The rollout hook, `agentlightning.rollout_hook`: a user's function of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import agl_fast

Answer: TypeAlias = agl_fast.Rollout | Sequence[agl_fast.Rollout] | None
RolloutHook: TypeAlias = Callable[[agl_fast.Rollout], Answer]

_SMALLEST: dict[str, Any] = {"max_prompt_length": 1, "max_response_length": 1, "pad_token_id": 0}


@dataclass(frozen=True)
class NamedHook:
    """A hook with checks of its return values.

    Attributes:
        function: takes a rollout and returns one, several that replace it, or None to remove it.
        name: for errors.
    """

    function: RolloutHook
    name: str

    def __call__(self, rollout: agl_fast.Rollout) -> list[agl_fast.Rollout]:
        """Call the hook and check what it returns.

        Raises:
            RuntimeError: the function raised; its error is the cause.
            TypeError, ValueError: invalid return value; the message names the hook, the rollout,
                the field and its value.
        """
        rollout_id = rollout.rollout_id
        try:
            answer = self.function(rollout)
        except Exception as error:
            raise RuntimeError(
                f"{self._title} failed on rollout {rollout_id!r}: {type(error).__name__}: {error}"
            ) from error
        if answer is None:
            return []
        if isinstance(answer, list | tuple):
            for index, each in enumerate(answer):
                self._check(each, rollout_id, f"[{index}]")
            return list(answer)
        self._check(answer, rollout_id, "")
        return [answer]  # type: ignore[list-item]

    def refuse_known_id(self, rollout_id: str) -> ValueError:
        """The error for a rollout_id that another rollout of the step has."""
        return ValueError(
            f"{self._title} returned a Rollout with rollout_id {rollout_id!r}, which "
            "another rollout of this step has: each needs one of its own"
        )

    @property
    def _title(self) -> str:
        return f"agentlightning.rollout_hook={self.name!r}"

    def _check(self, answer: Any, rollout_id: str, place: str) -> None:
        where = f"{self._title}: its answer{place} for rollout {rollout_id!r}"
        if not isinstance(answer, agl_fast.Rollout):
            raise TypeError(
                f"{where} must be a Rollout, a list of them, or None to leave it out; got "
                f"{answer!r}"
            )
        for field in ("rollout_id", "data_id"):
            if not isinstance(getattr(answer, field), str):
                raise TypeError(f"{where}: {field} must be a str, got {getattr(answer, field)!r}")
        try:
            # Planning a rollout validates every field.
            agl_fast.BatchBuilder(max_prompt_length=1, max_response_length=1, pad_token_id=0).add(
                answer
            )
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from error


def load_hook(path: str) -> NamedHook:
    """Import the function at `module:function`.

    Raises:
        ValueError: invalid path, or no such function. TypeError: it is not callable.
    """
    key = f"agentlightning.rollout_hook={path!r}"
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{key}: expected module:function, as in my_package.credit:drop_short")
    try:
        function: Any = import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{key}: {module_name} cannot be imported: {error}") from error
    for part in name.split("."):
        if not hasattr(function, part):
            raise ValueError(f"{key}: {module_name} has no {name}")
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{key}: expected a function of a Rollout, got {function!r}")
    return NamedHook(function, path)
