"""Hypothesis strategies: rollouts of agents that extend, branch, retry, interleave and rewrite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from support.plain_rollouts import Containers, PlainCall, PlainRollout

# Few tokens, so that contexts meet by chance too; the largest id is among them.
VOCABULARIES = [(0, 1), (0, 1, 2), (0, 1, 2, 3, 4), (7, 151_643, 2**31 - 1)]


class Tokenizer:
    """Spells some texts in several ways, one of them in halves of a character."""

    PIECES = (b"a", b"\xc3", b"\xa9", "\u00e9".encode(), b"aa")

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return b"".join(self.PIECES[token % 5] for token in ids).decode(errors="replace")

    def __repr__(self) -> str:
        return "Tokenizer()"


# Repeated moves are drawn more often.
MOVES = [
    *["continue_last"] * 4,
    *["continue_any"] * 5,
    "continue_exactly",
    "start",
    "branch",
    "branch",
    "retry",
    "sample_again",
    "sample_again",
    "rewrite",
    "shorten",
    "record_again",
]

FINITE_REWARDS = st.floats(-10, 10) | st.integers(-2, 2) | st.booleans()
REWARDS = st.none() | st.just(float("nan")) | FINITE_REWARDS
LOG_PROB = st.floats(-20, 0)


def tokens(vocabulary: tuple[int, ...], low: int, high: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(vocabulary), min_size=low, max_size=high)


@st.composite
def calls(draw: Any, vocabulary: tuple[int, ...]) -> list[PlainCall]:
    done: list[PlainCall] = []
    with_log_probs = draw(st.sampled_from(["all", "none", "some"]))
    for _ in range(draw(st.integers(0, 8))):
        move = draw(st.sampled_from(MOVES)) if done else "start"
        if move == "record_again":
            done.append(_recorded_again(draw, done))
            continue
        if move == "sample_again":
            # The same answer to the same prompt, sometimes a longer one: both contexts fit later.
            earlier = draw(st.sampled_from(done))
            prompt_ids = list(earlier.prompt_ids)
            response_ids = earlier.response_ids + draw(tokens(vocabulary, 0, 2))
        else:
            prompt_ids = _prompt(draw, move, done, vocabulary)
            response_ids = draw(tokens(vocabulary, 0 if draw(st.integers(0, 15)) == 0 else 1, 5))
        log_probs = None
        if with_log_probs == "all" or (with_log_probs == "some" and draw(st.booleans())):
            size = len(response_ids)
            log_probs = draw(st.lists(LOG_PROB, min_size=size, max_size=size))
        call = PlainCall(
            prompt_ids,
            response_ids,
            log_probs,
            reward=draw(st.none() | REWARDS),
            response_id=draw(st.sampled_from([None, None, None, "a", "b", f"id{len(done)}"])),
            finish_reason=draw(st.sampled_from([None, *["stop"] * 8, "length", "abort"])),
            trainable=draw(st.integers(0, 9)) != 0,
        )
        done.append(call)
    return done


def _recorded_again(draw: Any, done: list[PlainCall]) -> PlainCall:
    call = draw(st.sampled_from(done))
    if call.response_id is None:
        call.response_id = "again"
    return PlainCall(
        list(call.prompt_ids),
        list(call.response_ids),
        None if call.log_probs is None else list(call.log_probs),
        call.reward,
        call.response_id,
        call.finish_reason,
        call.trainable,
    )


def _prompt(draw: Any, move: str, done: list[PlainCall], vocabulary: tuple[int, ...]) -> list[int]:
    if move == "start":
        return list(draw(tokens(vocabulary, 0 if draw(st.integers(0, 15)) == 0 else 1, 6)))
    earlier = done[-1] if move == "continue_last" else draw(st.sampled_from(done))
    context = earlier.context
    if move == "retry":
        return list(earlier.prompt_ids)
    if move == "continue_exactly":
        return context
    if move == "shorten":
        return context[: draw(st.integers(0, len(context)))]
    if move == "branch":
        context = context[: draw(st.integers(0, len(context)))]
    elif move == "rewrite" and context:
        at = draw(st.integers(0, len(context) - 1))
        context[at] = draw(st.sampled_from(vocabulary))
    return context + draw(tokens(vocabulary, 0, 4))


@st.composite
def rollouts(draw: Any, rollout_id: str = "r0") -> PlainRollout:
    return PlainRollout(
        draw(calls(draw(st.sampled_from(VOCABULARIES)))),
        rollout_id=rollout_id,
        data_id=draw(st.sampled_from(["d0", "d1"])),
        reward=draw(REWARDS),
        status=draw(st.sampled_from([None, "succeeded", "failed"])),
    )


@st.composite
def several_rollouts(draw: Any, *, positions: bool = False) -> list[PlainRollout]:
    """With ``positions``, calls of some batches have position ids."""
    drawn = [draw(rollouts(f"r{index}")) for index in range(draw(st.integers(1, 4)))]
    n_dims = draw(st.sampled_from([None, 1, 3])) if positions else None
    if n_dims is not None:
        for rollout in drawn:
            _give_positions(draw, rollout.calls, n_dims)
    return drawn


def _give_positions(draw: Any, calls: list[PlainCall], n_dims: int) -> None:
    """Most calls of a rollout count in the same way; the others disagree with them."""
    ways = st.sampled_from(["none", "by_one", "by_halves", "from_two_on"])
    usual = draw(ways)
    for call in calls:
        way = usual if draw(st.integers(0, 4)) else draw(ways)
        count = range(len(call.context))
        if way == "by_one":
            call.position_ids = [[*count]] * n_dims
        elif way == "by_halves":
            call.position_ids = [[at // (dim + 1) for at in count] for dim in range(n_dims)]
        elif way == "from_two_on":
            call.position_ids = [[at + at // 2 for at in count] for _ in range(n_dims)]


# Levels of rows that each hold one conversation; drawn as often as they stand here.
CHAINS = ("trajectory", "trajectory", "transition")


def options(
    levels: Sequence[str] = (*CHAINS, "tree"), **fixed: Any
) -> st.SearchStrategy[dict[str, Any]]:
    """All options of ``build_batch`` but the device."""
    drawn = {
        "level": st.sampled_from(levels),
        "max_prompt_length": st.integers(1, 12),
        "max_response_length": st.integers(1, 24),
        "max_total_length": st.none() | st.integers(1, 24),
        "pad_token_id": st.sampled_from([0, 1, 2**31 - 1]),
        "overlong_prompt": st.sampled_from([None, "spill", "drop"]),
        "truncated_rollouts": st.sampled_from(["train", "mask", "zero_reward"]),
        "tree_max_tokens": st.integers(1, 40) | st.just(16384),
        "reward_fillna_value": st.sampled_from([0.0, -1.5]),
        "trim": st.booleans(),
        "layout": st.sampled_from(["padded", "jagged"]),
        "call_index": st.booleans(),
        "tokenizer": st.none() | st.just(Tokenizer()),
    }
    return st.fixed_dictionaries(drawn | {name: st.just(value) for name, value in fixed.items()})


ID_CONTAINERS = {
    "list": list,
    "list_of_new_ints": lambda ids: [int(str(token)) for token in ids],
    "list_of_numpy_ints": lambda ids: list(np.array(ids, dtype=np.int64)),
    "tuple": tuple,
    "int32": lambda ids: np.array(ids, dtype=np.int32),
    "int64": lambda ids: np.array(ids, dtype=np.int64),
    "strided": lambda ids: np.repeat(np.array(ids, dtype=np.int32), 2)[::2],
    "reversed_view": lambda ids: np.array(ids[::-1], dtype=np.int64)[::-1],
    "tensor_int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "tensor_int64": lambda ids: torch.tensor(ids, dtype=torch.int64),
    "tensor_strided": lambda ids: torch.tensor(ids, dtype=torch.int64).repeat_interleave(3)[::3],
}
LOG_PROB_CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "float32": lambda values: np.array(values, dtype=np.float32),
    "float64": lambda values: np.array(values, dtype=np.float64),
    "tensor_float32": lambda values: torch.tensor(values, dtype=torch.float32),
}


@st.composite
def containers(draw: Any, plain: PlainRollout) -> Containers:
    """One container per call and field, or views of one base array per conversation."""
    log_probs = [
        None
        if call.log_probs is None
        else LOG_PROB_CONTAINERS[draw(st.sampled_from(sorted(LOG_PROB_CONTAINERS)))](call.log_probs)
        for call in plain.calls
    ]
    how = draw(st.sampled_from(["each", "same", "int32_views", "int64_views", "tensor_views"]))
    if how.endswith("views"):
        return Containers(views_of_shared_bases(plain.calls, how), log_probs)
    names = st.sampled_from(sorted(ID_CONTAINERS))
    if how == "same":
        names = st.just(draw(names))
    ids = [
        (
            ID_CONTAINERS[draw(names)](call.prompt_ids),
            ID_CONTAINERS[draw(names)](call.response_ids),
        )
        for call in plain.calls
    ]
    return Containers(ids, log_probs)


@st.composite
def rollouts_in_containers(draw: Any) -> list[tuple[PlainRollout, Containers]]:
    return [(plain, draw(containers(plain))) for plain in draw(several_rollouts())]


def views_of_shared_bases(plain_calls: list[PlainCall], how: str) -> list[tuple[Any, Any]]:
    """Prompt and response of a call as views of the longest later context that starts with them."""
    make = {
        "int32_views": lambda ids: np.array(ids, dtype=np.int32),
        "int64_views": lambda ids: np.array(ids, dtype=np.int64),
        "tensor_views": lambda ids: torch.tensor(ids, dtype=torch.int64),
    }[how]
    bases: list[tuple[list[int], Any]] = []
    views = []
    for call in reversed(plain_calls):
        context = call.context
        base = next((base for ids, base in bases if ids[: len(context)] == context), None)
        if base is None:
            base = make(context)
            bases.append((context, base))
        split = len(call.prompt_ids)
        views.append((base[:split], base[split : len(context)]))
    return views[::-1]
