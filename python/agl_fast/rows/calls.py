"""Calls, the rollouts they belong to, and which calls can be trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

# list or tuple of int, 1-D int32/int64 numpy array or torch tensor
TokenIds: TypeAlias = Any
# list or tuple of float, 1-D float numpy array or torch tensor
LogProbs: TypeAlias = Any
# int64 numpy array or torch tensor, (D, tokens)
PositionIds: TypeAlias = Any


@dataclass(slots=True, eq=False, init=False)
class Call:
    """One sampled completion with its prompt.

    Nothing is copied or checked here. ``build_batch`` and ``BatchBuilder.add`` check the fields;
    their errors name rollout, call, field and index.

    Args:
        prompt_ids: token ids of the prompt: list or tuple of int, 1-D int32/int64 array or tensor.
        response_ids: sampled token ids, in the same types.
        log_probs: one float per response token, or None.
        position_ids: positions in D dimensions, such as M-RoPE's: int64 array or tensor of shape
            (D, prompt and response tokens). None: 0, 1, 2, … in every dimension. Calls of a batch
            that have positions have the same D. Level tree refuses them.
        reward: the call's own reward (float or bool), or None.
        response_id: identifies duplicates: a later call of the rollout with the same response_id,
            prompt ids and response ids is not trained again. None or "": no id.
        finish_reason: ``"abort"`` means interrupted by a weight sync; the call is dropped.
        policy_version: version of the weights that sampled the response; stored only.
        sampling: sampling parameters; stored only.
        agent: name of the agent that made the call; stored only.
        trainable: False for a judge or user simulator on the same endpoint; the call is dropped.
        credit: factor on the rollout's advantage for the call's tokens.
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
    position_ids: PositionIds | None

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
        position_ids: PositionIds | None = None,
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
        self.position_ids = position_ids


@dataclass(slots=True, eq=False, init=False)
class Rollout:
    """One run of an agent on one sample.

    Args:
        rollout_id: unique in a batch.
        data_id: id of the enqueued sample; rollouts with the same data_id form a group.
        calls: in order.
        reward: final reward (float or bool). None or NaN: the last reward of a call, else the row
            option ``reward_fillna_value``.
        status: final status; stored only.
        sample: the enqueued sample; stored only.
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
        """Convert Agent-lightning's ``Triplet`` objects, one call per triplet.

        Args:
            rollout_id, data_id, reward, status: as for ``Rollout``.
            triplets: objects with ``prompt`` and ``response`` mappings that contain ``token_ids``
                (and ``logprobs``: floats or OpenAI's ``{"logprob": float, ...}``), a ``reward`` and
                a ``metadata`` mapping with ``response_id`` and ``agent_name``. The finish reason is
                in the metadata or in the response's ``raw_content``.

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
        return entries  # an array or tensor, or something that build_batch refuses
    log_probs = []
    for index, entry in enumerate(entries):
        if isinstance(entry, Mapping):
            if "logprob" not in entry:
                raise ValueError(f"{where}[{index}] has no logprob; it has {sorted(entry)}")
            entry = entry["logprob"]
        log_probs.append(entry)
    return log_probs or None


def _finish_reason(response: Mapping[str, Any], metadata: Mapping[str, Any]) -> str | None:
    """Read the finish reason from the call, its choice or its response, as spans store it."""
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


def originals(calls: Sequence[Call]) -> list[int]:
    """Map each call to the index of its first record: itself, unless it is a duplicate.

    A duplicate has the response_id, the prompt ids and the response ids of an earlier call
    (docs/rows.md, "Details", Classes).
    """
    of_id: dict[str, list[int]] = {}
    first_records = []
    for index, call in enumerate(calls):
        if not call.response_id:
            first_records.append(index)
            continue
        earlier = of_id.setdefault(call.response_id, [])
        same = next((other for other in earlier if _equal(calls[other], call)), index)
        if same == index:
            earlier.append(index)
        first_records.append(same)
    return first_records


def trainable_calls(rollout: Rollout) -> list[int]:
    """Indices of the calls that can be trained (docs/rows.md, "Details", Classes)."""
    return [
        index
        for index, (call, original) in enumerate(
            zip(rollout.calls, originals(rollout.calls), strict=True)
        )
        if index == original
        and call.trainable
        and call.finish_reason != "abort"
        and len(call.prompt_ids) > 0
        and len(call.response_ids) > 0
    ]


def _equal(one: Call, other: Call) -> bool:
    import numpy as np  # late: `agl_fast.Call` loads no numpy

    return all(
        len(ids) == len(others) and np.array_equal(np.asarray(ids), np.asarray(others))
        for ids, others in (
            (one.response_ids, other.response_ids),
            (one.prompt_ids, other.prompt_ids),
        )
    )
