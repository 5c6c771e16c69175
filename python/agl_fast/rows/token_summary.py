"""Summarise in words what happened to the sampled tokens of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from agl_fast.rows.accounting import DROP_REASONS, MISMATCH_KINDS
from agl_fast.rows.levels import Level
from agl_fast.rows.mismatches import causes_in_words

# A larger share of sampled tokens lost to limits is a warning.
NOTEWORTHY = 0.01
FITTING = "training/limits_that_fit/"
# Prefix of the counts of broken prefixes by cause, of those that were decoded.
MISMATCH_CAUSES = "training/mismatch_causes/"

_REASONS = {
    "aborted": "interrupted by a weight sync",
    "excluded": "calls excluded from training",
    "empty": "calls without a prompt",
    "overlong_prompt": "prompts longer than the limit",
    "truncated_rollout": "truncated rollouts",
}
_KINDS = {
    "shortened": "with a shortened history",
    "retokenised": "with a retokenised history (same text, other ids)",
    "generation_prompt": (
        "with a history that lacks the generation prompt of the chat template, such as an empty "
        "think block"
    ),
    "new_conversation": "in a new conversation",
    "history_rewritten": "with a rewritten history",
    "positions_changed": "with other position ids for the history",
}
# Kinds that level tree helps with; a new conversation shares nothing.
_BROKEN = ("shortened", "retokenised", "generation_prompt", "history_rewritten")


# training/proxy/{name}_tokens: sampled tokens outside the batch (docs/rows.md).
_LOST = {
    "refused": "in answers that the proxy refused",
    "client_gone": "for agents that disconnected",
    "incomplete": "in answers that broke off",
    "duplicate": "recorded twice",
    "discarded": "in discarded attempts",
    "late": "after the end of their rollout",
    "forgotten": "for rollouts that never ended",
}
_FINISH_REASON = "training/finish_reason/"


class TokenSummary:
    """Accumulates the ``training/*`` metrics of a run's steps.

    Args:
        level: of the rows.
        limit_names: the user's name of each limit, such as its configuration key.
        tree_is_refused: level tree cannot train the run's model or settings; it is not recommended.
    """

    def __init__(
        self,
        level: str,
        limit_names: Mapping[str, str] | None = None,
        *,
        tree_is_refused: bool = False,
    ) -> None:
        self._tree_is_refused = tree_is_refused
        self._level = Level.of(level)
        self._limit_names = dict(limit_names or {})
        self._sums: Counter[str] = Counter()
        self._fitting: dict[str, int] = {}
        self._finished: Counter[str] = Counter()  # calls by finish reason

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step."""
        n_calls = metrics.get("training/n_recorded_calls", metrics.get("training/n_calls", 0))
        for name, value in metrics.items():
            if name.startswith(FITTING):
                limit = name.removeprefix(FITTING)
                self._fitting[limit] = max(int(value), self._fitting.get(limit, 0))
            elif name.startswith(_FINISH_REASON):
                self._finished[name.removeprefix(_FINISH_REASON)] += round(value * n_calls)
            elif name.startswith("training/"):
                self._sums[name.removeprefix("training/")] += value  # type: ignore[assignment]
        self._sums["steps"] += 1

    @property
    def n_steps(self) -> int:
        return self._count("steps")

    @property
    def lost_to_limits(self) -> float:
        """Share of the sampled tokens that was lost to limits."""
        lost = sum(
            self._count(name)
            for name in (
                "tokens/truncated",
                "tokens/dropped/overlong_prompt",
                "tokens/dropped/truncated_rollout",
            )
        )
        return lost / max(1, self._sampled)

    @property
    def is_noteworthy(self) -> bool:
        """Whether the share lost to limits is worth a warning."""
        return self.lost_to_limits > NOTEWORTHY

    def __str__(self) -> str:
        if not self.n_steps:
            return "No step was finished."
        return " ".join(self._sentences())

    @property
    def _sampled(self) -> int:
        return self._count("tokens/sampled") + self._count("skipped_tokens")

    def _count(self, name: str) -> int:
        return int(self._sums[name])

    def _sentences(self) -> Iterator[str]:
        sampled = self._sampled
        yield (
            f"{_counted(self.n_steps, 'step')} sampled {_counted(sampled, 'token')} in "
            f"{_counted(self._count('n_calls'), 'call')}:"
        )
        shares = [_share(self._count("tokens/trained"), sampled, "trained")]
        for name, words in (("truncated", "truncated"), ("duplicate", "recorded twice")):
            if self._count(f"tokens/{name}"):
                shares.append(_share(self._count(f"tokens/{name}"), sampled, words))
        for reason in DROP_REASONS:
            if n := self._count(f"tokens/dropped/{reason}"):
                shares.append(_share(n, sampled, f"dropped ({_REASONS[reason]})"))
        for name in sorted(self._sums):
            if name.startswith("skipped_tokens/") and self._count(name):
                reason = name.removeprefix("skipped_tokens/").replace("_", " ")
                shares.append(_share(self._count(name), sampled, f"of skipped rollouts ({reason})"))
        yield f"{', '.join(shares)}."
        yield from self._answers()
        yield from self._mismatches()
        yield from self._limits()

    def _answers(self) -> Iterator[str]:
        n_cut, n_calls = self._finished["length"], self._finished.total()
        if n_cut > NOTEWORTHY * n_calls:
            yield (
                f"{n_cut / n_calls:.1%} of the answers were cut off by max_tokens or the context "
                "(finish reason length)."
            )
        lost = {words: self._count(f"proxy/{name}_tokens") for name, words in _LOST.items()}
        total = sum(lost.values())
        if total > NOTEWORTHY * self._sampled:
            told = ", ".join(f"{n:,} {words}" for words, n in lost.items() if n)
            yield f"The servers sampled {_counted(total, 'token')} outside the batch: {told}."

    def _mismatches(self) -> Iterator[str]:
        if self._level.row_is_call:
            if self._count("n_calls") > self._count("n_rollouts"):
                yield (
                    "Level transition builds one row per call; level trajectory merges calls that "
                    "extend each other into one row."
                )
            return
        if not self._level.merges_calls:  # no chains, so no mismatches
            return
        kinds = {kind: self._count(f"mismatches/{kind}") for kind in MISMATCH_KINDS}
        if not any(kinds.values()):
            yield "No call broke a prefix."
            return
        told = [f"{n} {_KINDS[kind]}" for kind, n in kinds.items() if n]
        yield (
            f"{_counted(sum(kinds.values()), 'call')} broke the prefix of the calls before and "
            f"started a new row: {', '.join(told)}."
        )
        prefix = MISMATCH_CAUSES.removeprefix("training/")
        causes = {
            name.removeprefix(prefix): self._count(name)
            for name in self._sums
            if name.startswith(prefix)
        }
        if any(causes.values()):
            yield causes_in_words(causes)
        if any(kinds[kind] for kind in _BROKEN) and not self._tree_is_refused:
            yield "Level tree does not repeat the tokens that such calls still share."

    def _limits(self) -> Iterator[str]:
        if not self.is_noteworthy:
            return
        advice = ", ".join(
            f"{self._limit_names.get(name, name)}={value}"
            for name, value in sorted(self._fitting.items())
        )
        yield (
            f"Limits took {self.lost_to_limits:.1%} of the tokens"
            + (f"; nothing would have been cut with {advice}." if advice else ".")
        )


def _share(n: int, of: int, words: str) -> str:
    return f"{n / max(1, of):.1%} {words}"


def _counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
