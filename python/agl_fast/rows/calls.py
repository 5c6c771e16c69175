"""What an agent did: calls, and the rollout they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

# list or tuple of int, 1-D int32/int64 numpy array or torch tensor
TokenIds: TypeAlias = Any
# list or tuple of float, 1-D float numpy array or torch tensor
LogProbs: TypeAlias = Any


@dataclass(slots=True, eq=False, init=False)
class Call:
    """One LLM request with the choice that was sampled for it.

    Nothing is copied or checked here; ``build_batch`` and ``BatchBuilder.add`` check, and name the
    rollout, call, field and index of what is wrong.

    Args:
        prompt_ids: ids the policy saw: list or tuple of int, 1-D int32/int64 array or tensor.
        response_ids: ids it sampled, likewise.
        log_probs: one float per response token, or None.
        reward: the call's own reward (float or bool), or None.
        response_id: calls of a rollout with the same response_id, prompt ids and response ids are
            one call recorded twice. None or "" where it has none.
        finish_reason: ``"abort"`` marks a response cut off by a weight sync: it is dropped.
        policy_version: version of the weights that sampled it; stays on the call.
        sampling: sampling parameters; stays on the call.
        agent: name of the agent that made the call; stays on the call.
        trainable: False for a judge or user simulator on the same endpoint: it is dropped.
        credit: share of its rollout's advantage that its tokens get; stays on the call.
    """

    prompt_ids: TokenIds
    response_ids: TokenIds
    log_probs: LogProbs | None
    reward: float | None
    response_id: str | None
    finish_reason: str | None
    policy_version: int | None
    sampling: Mapping[str, Any] | None
    agent: str | None
    trainable: bool
    credit: float

    def __init__(
        self,
        prompt_ids: TokenIds,
        response_ids: TokenIds,
        log_probs: LogProbs | None = None,
        reward: float | None = None,
        *,
        response_id: str | None = None,
        finish_reason: str | None = None,
        policy_version: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        agent: str | None = None,
        trainable: bool = True,
        credit: float = 1.0,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.response_ids = response_ids
        self.log_probs = log_probs
        self.reward = reward
        self.response_id = response_id
        self.finish_reason = finish_reason
        self.policy_version = policy_version
        self.sampling = sampling
        self.agent = agent
        self.trainable = trainable
        self.credit = credit


@dataclass(slots=True, eq=False, init=False)
class Rollout:
    """One agent run.

    Args:
        rollout_id: unique in a batch.
        data_id: the enqueued sample it answers; rollouts with one data_id form a group.
        calls: its calls, in order.
        reward: final reward (float or bool). None or NaN: the last reward that one of its calls
            has, else the builder's ``reward_fillna_value``.
        status: how the run ended; stays on the rollout.
        sample: what was enqueued; stays on the rollout.
    """

    rollout_id: str
    data_id: str
    calls: Sequence[Call]
    reward: float | None
    status: str | None
    sample: Mapping[str, Any] | None

    def __init__(
        self,
        rollout_id: str,
        data_id: str,
        calls: Sequence[Call],
        reward: float | None = None,
        *,
        status: str | None = None,
        sample: Mapping[str, Any] | None = None,
    ) -> None:
        self.rollout_id = rollout_id
        self.data_id = data_id
        self.calls = calls
        self.reward = reward
        self.status = status
        self.sample = sample

    @classmethod
    def from_triplets(
        cls,
        rollout_id: str,
        data_id: str,
        triplets: Iterable[Any],
        reward: float | None = None,
        *,
        status: str | None = None,
    ) -> Rollout:
        """A rollout from Agent-lightning's ``Triplet`` objects, one call a triplet.

        Args:
            rollout_id, data_id, reward, status: as for ``Rollout``.
            triplets: objects with ``prompt`` and ``response`` mappings that hold ``token_ids`` (and
                ``logprobs`` as a list of floats or of OpenAI's ``{"logprob": float, ...}``), a
                ``reward`` and a ``metadata`` mapping: ``response_id`` and ``agent_name`` are read
                from it, the finish reason from it or from the response's ``raw_content``.

        Raises:
            TypeError: a triplet's prompt or response is not a mapping.
            ValueError: a triplet has no ``token_ids``; the message names rollout, triplet, field.
        """
        calls = []
        for index, triplet in enumerate(triplets):
            where = f"rollout {rollout_id!r}, triplet {index}"
            metadata = triplet.metadata or {}
            calls.append(
                Call(
                    _token_ids(triplet.prompt, f"{where}: prompt"),
                    _token_ids(triplet.response, f"{where}: response"),
                    _log_probs(triplet.response.get("logprobs"), f"{where}: response['logprobs']"),
                    triplet.reward,
                    response_id=metadata.get("response_id"),
                    finish_reason=_finish_reason(triplet.response, metadata),
                    agent=metadata.get("agent_name"),
                )
            )
        return cls(rollout_id, data_id, calls, reward, status=status)


def _token_ids(payload: Any, where: str) -> TokenIds:
    if not isinstance(payload, Mapping):
        raise TypeError(f"{where} must be a mapping with token_ids, got {payload!r}")
    token_ids = payload.get("token_ids")
    if token_ids is None:
        raise ValueError(f"{where} has no token_ids; it has {sorted(payload)}")
    return token_ids


def _log_probs(entries: Any, where: str) -> LogProbs | None:
    if entries is None:
        return None
    if not isinstance(entries, (list, tuple)):
        return entries  # an array or tensor, or what the batch refuses
    log_probs = []
    for index, entry in enumerate(entries):
        if isinstance(entry, Mapping):
            if "logprob" not in entry:
                raise ValueError(f"{where}[{index}] has no logprob; it has {sorted(entry)}")
            entry = entry["logprob"]
        log_probs.append(entry)
    return log_probs or None


def _finish_reason(response: Mapping[str, Any], metadata: Mapping[str, Any]) -> str | None:
    """Where Agent-lightning's spans have it: with the call, its choice or its response."""
    if metadata.get("finish_reason") is not None:
        return str(metadata["finish_reason"])
    choices = response.get("raw_content")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        reason = choices[0].get("finish_reason")
        if reason is not None:
            return str(reason)
    of_response = metadata.get("response")
    reasons = of_response.get("finish_reasons") if isinstance(of_response, Mapping) else None
    return str(reasons[0]) if isinstance(reasons, (list, tuple)) and reasons else None
