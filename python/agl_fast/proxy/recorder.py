"""The calls of the rollouts, from their answers until the daemon takes them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock

import numpy as np

from agl_fast.proxy.sampling import PhaseName
from agl_fast.rows.calls import Call

# Of the request that a task answers.
_PHASE: ContextVar[PhaseName | None] = ContextVar("phase", default=None)


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
        is_train: its tokens count when they are lost.
        missing_log_probs: why the call has no log-probs: ``absent``, ``none`` or ``positive``.
    """

    call: Call
    sequence: int
    started_at: float
    finished_at: float
    response_id: str
    is_train: bool = True
    missing_log_probs: str | None = None

    def same_ids(self, other: RecordedCall) -> bool:
        return np.array_equal(self.call.response_ids, other.call.response_ids) and np.array_equal(
            self.call.prompt_ids, other.call.prompt_ids
        )


class Recorder:
    """Recorded calls by rollout and attempt. Every method may be called from any thread.

    ``counts`` has these names, each only once something was counted:

    ===========================  ==================================================================
    recorded                     choices kept for a rollout
    not_trainable                of these, with ``X-AGL-Train: 0``
    duplicates                   choices with a response id and token ids that the attempt has
                                 already; ``duplicate_tokens``
    response_id_clashes          choices with a response id that the attempt has already, and other
                                 token ids: they are recorded
    without_log_probs            choices without log-probs; ``without_log_probs.none``: one of them
                                 is null or -9999.0, ``.positive``: one is above 0; the others have
                                 none at all
    refused_answers              answers that cannot be a row, or contradict themselves: the request
                                 failed (502); ``refused_answers.usage`` etc.: by cause;
                                 ``refused_tokens``, also of ``without_token_ids`` and
                                 ``store_errors``
    refused_triplets             mode v0: triplets of clients that cannot be a row
    discarded                    choices of attempts that another one replaced, and of rollouts that
                                 were given up; ``discarded_tokens``
    late                         choices that came after their rollout had ended; ``late_tokens``
    forgotten                    choices of no rollout that ended, when their batch was closed;
                                 ``forgotten_tokens``
    unrecorded                   requests on a path without a rollout, or with an echo that is not
                                 trained: forwarded, not recorded
    client_gone                  requests whose agent left before the answer was complete;
                                 ``client_gone_tokens``
    unseen_answers               training requests that a server was asked, and that ended before it
                                 told of a token: what it sampled for them is in no count
    streams                      answers sent as server-sent events
    sampling_overridden          requests that asked for other sampling than the run's, and lost;
                                 ``sampling_overridden.temperature`` etc.: by parameter
    sampling_deviating           the same where agents may sample as they like
    sampling_unenforced          requests with parameters that the trainer does not know, likewise
    seeded                       training requests with a seed: their rollouts may all be alike
    max_tokens_capped            requests without a limit that got the run's
    max_tokens_cap_lifted        of these, sent again without: prompt and limit exceeded the context
    client_errors                answers 4xx of a server, passed on
    server_errors                answers 5xx, unreachable servers, answers cut short;
                                 ``incomplete_tokens``, also of ``timeouts``
    store_errors                 answers that failed (503), as the store gave the call no number
    timeouts                     answers that took too long
    retries                      requests sent again on a new connection
    moved                        requests sent again to another server, after a failure of the first
    servers_out                  servers that left the rotation
    dangerous                    requests that broke several servers, and are not sent any more
    aborted                      requests whose rollout, attempt or step had ended before they had
                                 their answer; ``aborted_tokens``: of streams, as far as they came
    repeated                     requests that were aborted before a weight sync, and sent again;
                                 ``repeated_tokens``: of streams, as far as they came
    refused_while_paused         requests that came between two steps, when the servers sleep
    without_token_ids            answers 200 that lacked token ids: the request failed
    not_supported                requests for an endpoint that returns no token ids
    unauthorized, bad_requests   requests refused here
    unknown_rollouts             requests refused here (404): their rollout was not announced, or
                                 is closed
    unknown_models               answers 404 of a server, replaced by the name to ask for
    fields_replaced              requests whose request_id was left out or whose include_reasoning
                                 was set; ``fields_replaced.request_id`` etc.: by field
    fields_unknown               training requests with fields that agl_fast does not know
    refused_connections          connections that were too many, or sent no request in time
    proxy_errors                 requests that failed for a fault of the proxy's own (500)
    ===========================  ==================================================================

    The names that end in ``_tokens`` count sampled tokens of training requests, which are lost to
    the batch. docs/rows.md ("Sampled tokens outside the batch") adds them up.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # rollout id, attempt id, key
        self._calls: dict[str, dict[str, dict[str, RecordedCall]]] = {}
        self._ended: set[str] = set()  # rollouts
        self._counts: dict[PhaseName | None, Counter[str]] = defaultdict(Counter)

    @contextmanager
    def request(self) -> Iterator[None]:
        """The block answers one request. What it counts belongs to no phase until ``attribute``."""
        token = _PHASE.set(None)
        try:
            yield
        finally:
            _PHASE.reset(token)

    def attribute(self, phase: PhaseName) -> None:
        """The request under way belongs to a rollout of this phase."""
        _PHASE.set(phase)

    @property
    def _now(self) -> Counter[str]:
        return self._counts[_PHASE.get()]

    def add(
        self,
        rollout_id: str,
        attempt_id: str,
        calls: Sequence[RecordedCall],
        *,
        is_closed: bool = False,
    ) -> list[str]:
        """Record the choices of one response.

        Args:
            is_closed: the rollout's batch is closed.

        Returns:
            Keys of those that are new, as ``withdraw`` takes them.
        """
        added: list[str] = []
        with self._lock:
            if is_closed or rollout_id in self._ended:
                self._count_lost("late", calls)
                return added
            known = self._calls.setdefault(rollout_id, {}).setdefault(attempt_id, {})
            for recorded in calls:
                key = self._new_key(known, recorded)
                if key is None:
                    self._now["duplicates"] += 1
                    self._count_tokens("duplicate", recorded)
                    continue
                known[key] = recorded
                added.append(key)
                self._count_recorded(recorded, 1)
        return added

    def _new_key(self, known: Mapping[str, RecordedCall], recorded: RecordedCall) -> str | None:
        """None where the call is recorded already."""
        key = first = recorded.call.response_id or f"unnamed-{recorded.sequence}"
        n_clashes = 0
        while (earlier := known.get(key)) is not None:
            if recorded.call.response_id and recorded.same_ids(earlier):
                return None
            n_clashes += 1
            key = f"{first}~{n_clashes}"
        self._now["response_id_clashes"] += bool(recorded.call.response_id and n_clashes)
        return key

    def _count_recorded(self, recorded: RecordedCall, sign: int) -> None:
        self._now["recorded"] += sign
        self._now["not_trainable"] += sign * (not recorded.call.trainable)
        if recorded.call.log_probs is None:
            self._now["without_log_probs"] += sign
            if recorded.missing_log_probs not in (None, "absent"):
                self._now[f"without_log_probs.{recorded.missing_log_probs}"] += sign

    def withdraw(self, rollout_id: str, attempt_id: str, keys: Sequence[str]) -> None:
        """Forget choices whose agent turned out to be gone."""
        with self._lock:
            known = self._calls.get(rollout_id, {}).get(attempt_id, {})
            for key in keys:
                if (recorded := known.pop(key, None)) is not None:
                    self._count_recorded(recorded, -1)
                    self._count_tokens("client_gone", recorded)

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

    def oldest_version(self, rollout_id: str) -> int | None:
        """The oldest policy version of a rollout's calls; None without one."""
        with self._lock:
            versions = [
                recorded.call.policy_version
                for calls in self._calls.get(rollout_id, {}).values()
                for recorded in calls.values()
                if recorded.call.policy_version is not None
            ]
        return min(versions, default=None)

    def last_call_at(self, rollout_id: str, attempt_id: str) -> float:
        """When the attempt's last call was finished, in seconds since the epoch; 0: it has none."""
        with self._lock:
            known = self._calls.get(rollout_id, {}).get(attempt_id, {})
            return max((recorded.finished_at for recorded in known.values()), default=0.0)

    def discard(self, rollout_id: str) -> None:
        """The rollout has ended: forget what its attempts have left, and count it and what comes
        after."""
        with self._lock:
            self._ended.add(rollout_id)
            for known in self._calls.pop(rollout_id, {}).values():
                self._count_lost("discarded", known.values())

    def forget_all_but(self, rollout_ids: Collection[str] = ()) -> None:
        """Forget every other rollout; count the calls that nobody had taken."""
        with self._lock:
            for rollout_id in self._calls.keys() - set(rollout_ids):
                for known in self._calls.pop(rollout_id).values():
                    self._count_lost("forgotten", known.values())
            self._ended.intersection_update(rollout_ids)

    def _count_lost(self, name: str, calls: Iterable[RecordedCall]) -> None:
        for recorded in calls:
            self._counts["train" if recorded.is_train else "val"][name] += 1
            self._count_tokens(name, recorded)

    def _count_tokens(self, name: str, recorded: RecordedCall) -> None:
        if recorded.is_train:
            self._counts["train"][f"{name}_tokens"] += len(recorded.call.response_ids)

    def count_lost(self, name: str, n_tokens: int, *, is_train: bool) -> None:
        """Count the sampled tokens of an answer that became no call.

        Args:
            n_tokens: 0: the answer told of none.
        """
        if is_train and n_tokens:
            self.count(f"{name}_tokens", n_tokens)
        elif is_train:
            self.count("unseen_answers")

    def count(self, name: str, more: int = 1) -> None:
        with self._lock:
            self._now[name] += more

    @property
    def counts(self) -> dict[str, int]:
        """What was counted since the last ``reset_counts``, by name."""
        with self._lock:
            return _total(self._counts.values())

    def reset_counts(self) -> dict[str, int]:
        """``counts``, which start from zero again."""
        return _total(self.reset_counts_by_phase().values())

    def reset_counts_by_phase(self) -> dict[PhaseName | None, Counter[str]]:
        """``counts`` of each phase, which start from zero again.

        Under None: of what belongs to no announced rollout.
        """
        with self._lock:
            counts = dict(self._counts)
            self._counts.clear()
        return counts


def _total(counters: Iterable[Counter[str]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counters:
        total.update(each)
    return {name: count for name, count in total.items() if count}
