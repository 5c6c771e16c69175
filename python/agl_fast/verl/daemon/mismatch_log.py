"""Why calls of one rollout did not extend each other, written down for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import agl_fast

_SHOWN_TOKENS = 32


class MismatchLog:
    """A folder with one JSON file for each mismatch, ``{rollout_id}-{call}.json``.

    A file has ``rollout_id``, ``call``, ``index`` and ``kind`` of the ``Mismatch``;
    ``closest_call``, the last one of the chain that came closest; and, from ``index`` on,
    ``expected_ids`` of that chain and ``found_ids`` of the prompt, with their texts and the text
    ``before``.

    Args:
        folder: made when there is something to write.
        tokenizer: with ``decode``; None: no texts.
    """

    def __init__(self, folder: str, tokenizer: Any) -> None:
        self._folder = Path(folder)
        self._tokenizer = tokenizer

    def write(
        self, mismatches: Sequence[agl_fast.Mismatch], rollouts: Sequence[agl_fast.Rollout]
    ) -> None:
        """Write the mismatches of a batch that was built of the rollouts.

        Raises:
            OSError: a file cannot be written.
        """
        of_id = {rollout.rollout_id: rollout for rollout in rollouts}
        if mismatches:
            self._folder.mkdir(parents=True, exist_ok=True)
        for mismatch in mismatches:
            case = self._case(mismatch, of_id[mismatch.rollout_id].calls)
            path = self._folder / f"{mismatch.rollout_id}-{mismatch.call}.json"
            path.write_text(json.dumps(case, ensure_ascii=False, indent=1))

    def _case(self, mismatch: agl_fast.Mismatch, calls: Sequence[agl_fast.Call]) -> dict[str, Any]:
        prompt = np.asarray(calls[mismatch.call].prompt_ids)
        contexts = [
            np.concatenate([np.asarray(call.prompt_ids), np.asarray(call.response_ids)])
            for call in calls[: mismatch.call]
        ]
        shared = [_common_prefix(context, prompt) for context in contexts]
        # Others that share more, as a judge's, are no chain that the call could have extended.
        closest = max(i for i, n_shared in enumerate(shared) if n_shared == mismatch.index)
        shown = slice(mismatch.index, mismatch.index + _SHOWN_TOKENS)
        expected, found = contexts[closest][shown].tolist(), prompt[shown].tolist()
        case = {
            "rollout_id": mismatch.rollout_id,
            "call": mismatch.call,
            "closest_call": closest,
            "index": mismatch.index,
            "kind": mismatch.kind,
            "expected_ids": expected,
            "found_ids": found,
        }
        if self._tokenizer is not None:
            before = prompt[max(0, mismatch.index - _SHOWN_TOKENS) : mismatch.index].tolist()
            case["before"] = self._tokenizer.decode(before)
            case["expected"] = self._tokenizer.decode(expected)
            case["found"] = self._tokenizer.decode(found)
        return case


def _common_prefix(first: NDArray[Any], second: NDArray[Any]) -> int:
    n = min(len(first), len(second))
    differs = np.flatnonzero(first[:n] != second[:n])
    return int(differs[0]) if len(differs) else n
