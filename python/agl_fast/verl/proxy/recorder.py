"""The calls of the rollouts, from their answers until the daemon takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from agl_fast.batch.calls import Call


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """One choice that a server sampled.

    Attributes:
        call: packed: ids int32 of shape (N,), log-probs float32 of shape (N,) or None. Its
            ``response_id`` tells the choices of one response apart.
        sequence: the store's, given when the response was complete and before the agent had all of
            it: what the agent emits because of an answer has a higher one.
        started_at, finished_at: seconds since the epoch, as spans have them.
        response_id: the server's, as spans have it; choices of one response share it.
    """

    call: Call
    sequence: int
    started_at: float
    finished_at: float
    response_id: str


class Recorder:
    """Recorded calls by rollout and attempt. Every method may be called from any thread.

    ``counts`` has these names, each only once something was counted:

    ===========================  ==================================================================
    recorded                     choices kept for a rollout
    not_trainable                of these, with ``X-AGL-Train: 0``
    duplicates                   choices with a response id that the attempt has already
    without_log_probs            choices whose log-probs were missing or not one a token
    discarded                    choices of attempts that another one replaced, and of rollouts that
                                 were given up; ``discarded_tokens``: what they sampled
    forgotten                    choices nobody had taken when the next phase began: they came after
                                 their rollout had ended; ``forgotten_tokens``
    unrecorded                   requests on a path without a rollout, or with an echo that is not
                                 trained: forwarded, not recorded
    client_gone                  requests whose agent left before the answer was complete
    streams                      answers sent as server-sent events
    sampling_overridden          requests that asked for other sampling than the run's, and lost;
                                 ``sampling_overridden.temperature`` etc.: by parameter
    sampling_deviating           the same where agents may sample as they like
    sampling_unenforced          requests with parameters that the trainer does not know, likewise
    seeded                       training requests with a seed: their rollouts may all be alike
    max_tokens_capped            requests without a limit that got the run's
    max_tokens_cap_lifted        of these, sent again without: prompt and limit exceeded the context
    client_errors                answers 4xx of a server, passed on
    server_errors                answers 5xx, unreachable servers, answers cut short
    store_errors                 answers that failed (503), as the store gave the call no number
    timeouts                     answers that took too long
    retries                      requests sent again on a new connection
    without_token_ids            answers 200 that lacked token ids: the request failed
    not_supported                requests for an endpoint that returns no token ids
    unauthorized, bad_requests   requests refused here
    unknown_rollouts             requests refused here (404): their rollout is not in the open batch
    unknown_models               answers 404 of a server, replaced by the name to ask for
    fields_replaced              requests whose request_id was left out or whose include_reasoning
                                 was set; ``fields_replaced.request_id`` etc.: by field
    fields_unknown               training requests with fields that agl_fast does not know
    ===========================  ==================================================================
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # rollout id, attempt id, unique response id
        self._calls: dict[str, dict[str, dict[str, RecordedCall]]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, rollout_id: str, attempt_id: str, calls: Sequence[RecordedCall]) -> list[str]:
        """Record the choices of one response.

        Returns:
            The unique response ids that are new, as ``withdraw`` takes them.
        """
        added = []
        with self._lock:
            known = self._calls.setdefault(rollout_id, {}).setdefault(attempt_id, {})
            for recorded in calls:
                unique_id = recorded.call.response_id or f"unnamed-{recorded.sequence}"
                if unique_id in known:
                    self._counts["duplicates"] += 1
                    continue
                known[unique_id] = recorded
                added.append(unique_id)
                self._counts["recorded"] += 1
                self._counts["not_trainable"] += not recorded.call.trainable
                self._counts["without_log_probs"] += recorded.call.log_probs is None
        return added

    def withdraw(self, rollout_id: str, attempt_id: str, unique_ids: Sequence[str]) -> None:
        """Forget choices whose agent turned out to be gone."""
        with self._lock:
            known = self._calls.get(rollout_id, {}).get(attempt_id, {})
            for unique_id in unique_ids:
                if (recorded := known.pop(unique_id, None)) is not None:
                    self._counts["recorded"] -= 1
                    self._counts["not_trainable"] -= not recorded.call.trainable
                    self._counts["without_log_probs"] -= recorded.call.log_probs is None

    def take(self, rollout_id: str, attempt_id: str) -> list[RecordedCall]:
        """The calls of an attempt in sequence order, choices of a response in theirs; forgets them.

        The attempt is unknown, or was taken before: an empty list.
        """
        with self._lock:
            attempts = self._calls.get(rollout_id, {})
            known = attempts.pop(attempt_id, {})
            if not attempts:
                self._calls.pop(rollout_id, None)
        return sorted(known.values(), key=lambda recorded: recorded.sequence)

    def last_call_at(self, rollout_id: str, attempt_id: str) -> float:
        """When the attempt's last call was finished, in seconds since the epoch; 0: it has none."""
        with self._lock:
            known = self._calls.get(rollout_id, {}).get(attempt_id, {})
            return max((recorded.finished_at for recorded in known.values()), default=0.0)

    def discard(self, rollout_id: str) -> None:
        """Forget what every attempt of a rollout has left, and count it."""
        with self._lock:
            self._count_lost("discarded", self._calls.pop(rollout_id, {}))

    def discard_others(self, rollout_ids: Collection[str]) -> None:
        """Forget what all rollouts but these have left, and count it."""
        with self._lock:
            for rollout_id in self._calls.keys() - set(rollout_ids):
                self._count_lost("discarded", self._calls.pop(rollout_id))

    def forget_all(self) -> None:
        """Forget every call; count those nobody had taken."""
        with self._lock:
            for attempts in self._calls.values():
                self._count_lost("forgotten", attempts)
            self._calls.clear()

    def _count_lost(self, name: str, attempts: Mapping[str, Mapping[str, RecordedCall]]) -> None:
        for known in attempts.values():
            self._counts[name] += len(known)
            for recorded in known.values():
                self._counts[f"{name}_tokens"] += len(recorded.call.response_ids)

    def count(self, name: str, more: int = 1) -> None:
        with self._lock:
            self._counts[name] += more

    @property
    def counts(self) -> dict[str, int]:
        """What was counted since the last ``reset_counts``, by name."""
        with self._lock:
            return {name: count for name, count in self._counts.items() if count}

    def reset_counts(self) -> dict[str, int]:
        """``counts``, which start from zero again."""
        with self._lock:
            counts = {name: count for name, count in self._counts.items() if count}
            self._counts.clear()
        return counts
