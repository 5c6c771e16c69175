"""What agents did, in a form that goes to Agent-lightning's daemon and to `agl_fast` alike."""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import agl_fast
from benchmarks.agentlightning_daemon import finished_rollout

TRACES = Path(__file__).parents[1] / "tests" / "data"
VOCABULARY = 151_936


class Conversation(NamedTuple):
    """One rollout: its calls as (prompt ids, response ids) and its final reward."""

    rollout_id: str
    data_id: str
    calls: list[tuple[Any, Any]]
    reward: float | None


def for_agentlightning(conversations: Iterable[Conversation]) -> list[SimpleNamespace]:
    """Finished rollouts as 0.3.0's daemon keeps them."""
    return [finished_rollout(*conversation) for conversation in conversations]


def for_agl_fast(conversations: Iterable[Conversation]) -> list[agl_fast.Rollout]:
    """The same as `agl_fast.Rollout`s; ids are passed on, not copied."""
    return [
        agl_fast.Rollout(
            rollout_id=rollout_id,
            data_id=data_id,
            calls=[agl_fast.Call(prompt, response) for prompt, response in calls],
            reward=reward,
        )
        for rollout_id, data_id, calls, reward in conversations
    ]


def load_traces(*names: str) -> list[Conversation]:
    """Real agents' rollouts (`tests/data/<name>.jsonl.gz`), as lists of int."""
    return [conversation for name in names for conversation in _read_trace_file(name)]


def _read_trace_file(name: str) -> Iterator[Conversation]:
    with gzip.open(TRACES / f"{name}.jsonl.gz", "rt") as lines:
        for line in lines:
            rollout = json.loads(line)
            seen: list[int] = []
            calls = []
            for keep, tail, response in rollout["calls"]:
                prompt = seen[:keep] + tail
                seen = prompt + response
                calls.append((prompt, response))
            yield Conversation(
                f"{name}:{rollout['id']}", rollout["group"], calls, rollout["reward"]
            )


def random_ids(rng: np.random.Generator, length: int) -> np.ndarray:
    """int32 ids; nearly all are too large to be among Python's small shared ints."""
    return rng.integers(1, VOCABULARY, length, dtype=np.int32)


def random_lists(seed: int, count: int, shortest: int, longest: int) -> list[list[int]]:
    """Lists of ids, lengths uniform between the two."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest, count, endpoint=True)
    return [random_ids(rng, length).tolist() for length in lengths]


def single_calls(
    seed: int, count: int, prompt_width: int, response_width: int
) -> list[Conversation]:
    """One call per rollout, as lists that take between an eighth and all of their widths."""
    prompts = random_lists(seed, count, prompt_width // 8, prompt_width)
    responses = random_lists(seed + 1, count, response_width // 8, response_width)
    rewards = np.random.default_rng(seed + 2).random(count)
    return [
        Conversation(f"rollout-{i}", f"sample-{i // 8}", [(prompt, response)], float(reward))
        for i, (prompt, response, reward) in enumerate(
            zip(prompts, responses, rewards, strict=True)
        )
    ]


def growing(
    seed: int, count: int, calls: int, final_length: int, longest_prompt: int
) -> list[Conversation]:
    """Conversations that grow to `final_length` tokens; ids are views of one int32 array each.

    The first prompt takes between a quarter and all of `longest_prompt`. Of what follows, what the
    agent samples and what its tools add take random shares, one to two on average.
    """
    rng = np.random.default_rng(seed)
    conversations = []
    for i in range(count):
        ids = random_ids(rng, final_length)
        first = rng.integers(longest_prompt // 4, longest_prompt, endpoint=True)
        shares = rng.uniform(0.5, 1.5, 2 * calls - 1) * np.resize([1.0, 2.0], 2 * calls - 1)
        ends = first + np.cumsum(shares) / shares.sum() * (final_length - first)
        bounds = [int(first), *ends.round().astype(int).tolist()]
        turns = [(ids[: bounds[k]], ids[bounds[k] : bounds[k + 1]]) for k in range(0, 2 * calls, 2)]
        conversations.append(
            Conversation(f"rollout-{i}", f"sample-{i // 8}", turns, float(rng.random()))
        )
    return conversations


def as_lists(conversations: Sequence[Conversation]) -> list[Conversation]:
    """The ids as lists whose repeated tokens are the same objects: an agent kept them."""
    return [_over_one_list(conversation) for conversation in conversations]


def _over_one_list(conversation: Conversation) -> Conversation:
    last_prompt, last_response = conversation.calls[-1]
    ids = last_prompt.tolist() + last_response.tolist()
    calls = [
        (ids[: len(prompt)], ids[len(prompt) : len(prompt) + len(response)])
        for prompt, response in conversation.calls
    ]
    return conversation._replace(calls=calls)


def as_separate_lists(conversations: Sequence[Conversation]) -> list[Conversation]:
    """The ids as lists that share no int object, as JSON parsed call by call gives them."""
    return [
        conversation._replace(
            calls=[(prompt.tolist(), response.tolist()) for prompt, response in conversation.calls]
        )
        for conversation in conversations
    ]
