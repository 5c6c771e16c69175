"""What a dry run found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import agl_fast
from agl_fast.rows.token_summary import TokenSummary

# What the proxy counts, and what that means to whoever trains.
_PROXY_WORDS = {
    "without_token_ids": "answers had no token ids: the endpoint has to be a vLLM server, which "
    "gives them where a request has return_token_ids",
    "without_log_probs": "calls have no log-probs",
    "client_errors": "calls were refused by the server (4xx)",
    "server_errors": "calls failed at the server (5xx, or out of reach)",
    "timeouts": "calls took too long",
    "bad_requests": "requests were malformed, or asked for what cannot be trained on",
    "unknown_models": "requests were for a model that the server does not have",
    "not_supported": "requests were for an endpoint that is not recorded",
    "unrecorded": "requests were not recorded: does the agent use the resource's own address "
    "(llm.get_base_url(rollout_id, attempt_id))?",
    "sampling_overridden": "requests asked for other sampling than the run's, and lost",
    "sampling_unenforced": "requests constrained what is sampled, which the trainer's log-probs do "
    "not account for",
    "fields_unknown": "requests had fields that vLLM does not know",
    "seeded": "requests had a seed: rollouts of one sample may all be alike",
    "client_gone": "requests were given up by the agent",
}


@dataclass(frozen=True, eq=False)
class DryRun:
    """What agents did, and what training would make of it. ``print`` shows the report.

    Attributes:
        rollouts: as they ended, in the order of the samples, with those that failed.
        batch: their rows; None where there are none.
        metrics: ``training/*``, as a training step logs them.
        summary: where the sampled tokens went.
    """

    rollouts: Sequence[agl_fast.Rollout]
    batch: agl_fast.Batch | None
    metrics: Mapping[str, float]
    summary: TokenSummary

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        statuses = Counter(rollout.status for rollout in self.rollouts)
        told = ", ".join(f"{n} {status}" for status, n in statuses.most_common())
        yield f"{len(self.rollouts)} rollouts: {told}"
        if self.batch is not None:
            yield from self._about_rewards(self.batch)
            yield from self._about_rows(self.batch)
        else:
            yield "no rows: no rollout left a call that could be trained on"
        yield str(self.summary)
        for name, words in _PROXY_WORDS.items():
            if n := int(self.metrics.get(f"training/proxy/{name}", 0)):
                yield f"{n} {words}"

    def _about_rewards(self, batch: agl_fast.Batch) -> Iterator[str]:
        rewards = [entry.reward for entry in batch.rollouts]
        missing = sum(not entry.has_reward for entry in batch.rollouts)
        yield (
            f"rewards: {sum(rewards) / len(rewards):.3g} on average, {min(rewards):.3g} to "
            f"{max(rewards):.3g}" + (f"; {missing} rollouts have none" if missing else "")
        )
        groups: dict[str, set[float]] = {}
        for entry in batch.rollouts:
            groups.setdefault(entry.data_id, set()).add(entry.reward)
        if len(groups) < len(rewards):
            flat = sum(len(values) == 1 for values in groups.values())
            yield f"{flat} of {len(groups)} samples gave one reward only: nothing to compare there"

    def _about_rows(self, batch: agl_fast.Batch) -> Iterator[str]:
        n_calls = sum(entry.n_calls for entry in batch.rollouts)
        prompts, responses = batch.tensors["prompts"], batch.tensors["responses"]
        n_tokens = int(batch.tensors["attention_mask"].sum())
        n_trained = int(batch.tensors["response_mask"].sum())
        yield (
            f"{len(batch)} rows of {n_calls} calls, {n_tokens:,} tokens, {n_trained:,} of them "
            f"trained; the longest prompt has {prompts.shape[1]:,} tokens, the longest response "
            f"{responses.shape[1]:,}"
        )
