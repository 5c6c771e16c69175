"""Log files of prefix mismatches: why a call of a rollout did not extend an earlier one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import agl_fast
from agl_fast.printable import escaped_line
from agl_fast.recording.writer import private_folder, private_opener
from agl_fast.rows.mismatches import AGENT_LIGHTNING_NAMES, closest_call

CASES_A_STEP = 16
LOG_BYTES = 4 << 20
_SHOWN_TOKENS = 32


class MismatchLog:
    """Agent-lightning's three logs: ``template_mismatch.log``, ``retoken_mismatch.log`` and
    ``others_mismatch.log``, as text.

    An entry shows the tokens before the first difference, then the expected tokens of the closest
    chain and the actual ones, as ids and text. Each log has the first ``CASES_A_STEP`` entries of a
    step and at most about ``LOG_BYTES``; metrics count all mismatches.

    Args:
        folder: created when needed; only its owner may read it and the logs.
        tokenizer: with ``decode``; None: ids only.
    """

    def __init__(self, folder: str, tokenizer: Any) -> None:
        self._folder = Path(folder)
        self._tokenizer = tokenizer

    def write(
        self,
        mismatches: Sequence[agl_fast.Mismatch],
        rollouts: Sequence[agl_fast.Rollout],
        step: int | None = None,
    ) -> None:
        """Write the mismatches of a batch.

        Raises:
            OSError: a file cannot be written.
        """
        of_log: dict[str, list[agl_fast.Mismatch]] = defaultdict(list)
        for mismatch in mismatches:
            of_log[AGENT_LIGHTNING_NAMES[mismatch.kind]].append(mismatch)
        if not of_log:
            return
        of_id = {rollout.rollout_id: rollout for rollout in rollouts}
        private_folder(self._folder)
        for name, cases in of_log.items():
            path = self._folder / f"{name}_mismatch.log"
            with open(path, "a", encoding="utf-8", opener=private_opener) as log:
                for mismatch in cases[:CASES_A_STEP]:
                    if log.tell() >= LOG_BYTES:
                        break
                    calls = of_id[mismatch.rollout_id].calls
                    log.writelines(f"{line}\n" for line in self._case(mismatch, calls, step))
                    if log.tell() >= LOG_BYTES:
                        log.write("The log is full: further cases are only counted.\n")
                if (n_left_out := len(cases) - CASES_A_STEP) > 0 and log.tell() < LOG_BYTES:
                    log.write(f"{n_left_out} further cases of this step are not shown.\n\n")

    def _case(
        self, mismatch: agl_fast.Mismatch, calls: Sequence[agl_fast.Call], step: int | None
    ) -> Iterator[str]:
        prompt = np.asarray(calls[mismatch.call].prompt_ids)
        closest, context = closest_call(mismatch, calls, prompt)
        shown = slice(mismatch.index, mismatch.index + _SHOWN_TOKENS)
        of_step = "" if step is None else f"step {step}, "
        yield (
            f"----- {of_step}rollout {escaped_line(mismatch.rollout_id)}, call {mismatch.call}: "
            f"{mismatch.kind} at token {mismatch.index} of {len(prompt)}, after call {closest}"
        )
        before = prompt[max(0, mismatch.index - _SHOWN_TOKENS) : mismatch.index]
        for name, ids in (
            ("before", before),
            ("expected", context[shown]),
            ("found", prompt[shown]),
        ):
            if self._tokenizer is not None:
                text = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
                yield f"{name:8} {escaped_line(json.dumps(text, ensure_ascii=False))}"
            if name != "before":
                yield f"{'':8} {ids.tolist()}"
        yield ""
