"""Where agl_fast differs from Agent-lightning 0.3.0 on purpose: a test each, both results shown.

The list is that of docs/rows.md, "Differences from Agent-lightning 0.3.0".
"""

import math
from typing import Any

import pytest
import torch

pytest.importorskip("agentlightning", reason="needs the extra [cpu] or [verl]")

import agl_fast
from benchmarks.agentlightning_daemon import Daemon, columns_of, tensors_of
from benchmarks.conversations import Conversation, for_agentlightning, for_agl_fast

PAD = 0
Rows = list[tuple[list[int], list[int], list[int]]]  # prompt, response, mask of each row


def rows_of(tensors: dict[str, torch.Tensor]) -> Rows:
    """Rows without padding; the mask over the real response tokens."""
    prompt_width = tensors["prompts"].shape[1]
    rows = []
    for i, attention in enumerate(tensors["attention_mask"].bool()):
        is_prompt, is_response = attention[:prompt_width], attention[prompt_width:]
        rows.append(
            (
                tensors["prompts"][i][is_prompt].tolist(),
                tensors["responses"][i][is_response].tolist(),
                tensors["response_mask"][i][is_response].tolist(),
            )
        )
    return rows


def conversation(*calls: tuple[list[int], list[int]], reward: float | None = 1.0) -> Conversation:
    return Conversation("rollout-0", "sample-0", list(calls), reward)


def theirs(*conversations: Conversation, level: str = "trajectory", P: int = 4, R: int = 8) -> Any:
    daemon = Daemon(for_agentlightning(conversations), level=level, pad_token_id=PAD)
    data_proto, metrics = daemon.get_train_data_batch(P, R)
    return tensors_of(data_proto), columns_of(data_proto), metrics


def ours(
    *conversations: Conversation, level: str = "trajectory", P: int = 4, R: int = 8, **options: Any
) -> agl_fast.Batch:
    return agl_fast.build_batch(
        for_agl_fast(conversations),
        level=level,
        max_prompt_length=P,
        max_response_length=R,
        pad_token_id=PAD,
        **options,
    )


def test_the_prefix_test_looks_at_the_prompt_alone():
    """A retry's answer begins with the first answer; its prompt saw none of it."""
    retry = conversation(([1, 2], [3]), ([1, 2], [3, 4]))
    assert rows_of(theirs(retry)[0]) == [([1, 2], [3, 2, 3, 4], [1, 1, 1, 0])]
    assert rows_of(ours(retry).tensors) == [([1, 2], [3], [1]), ([1, 2], [3, 4], [1, 1])]


def test_an_exact_continuation_adds_no_copy_of_the_prompt():
    exact = conversation(([1, 2], [3]), ([1, 2, 3], [4]))
    assert rows_of(theirs(exact)[0]) == [([1, 2], [3, 1, 2, 3, 4], [1, 1, 0, 0, 0])]
    assert rows_of(ours(exact).tensors) == [([1, 2], [3, 4], [1, 1])]


SHORT_CALL = ([1, 2], [3])
OVERLONG_CALL = ([7, 8, 9, 10, 11, 12], [13])


def test_spilled_prompt_tokens_are_never_trained():
    spilled = conversation(SHORT_CALL, OVERLONG_CALL)
    assert rows_of(theirs(spilled)[0])[1] == ([7, 8, 9, 10], [11, 12, 13], [1, 1, 1])
    assert rows_of(ours(spilled).tensors)[1] == ([7, 8, 9, 10], [11, 12, 13], [0, 0, 1])


def test_an_overlong_prompt_fares_the_same_wherever_it_stands():
    """0.3.0 drops a rollout's first call and spills the others; here `overlong_prompt` decides."""
    first, second = conversation(OVERLONG_CALL, SHORT_CALL), conversation(SHORT_CALL, OVERLONG_CALL)
    assert theirs(first)[0]["is_drop_mask"].tolist() == [True, False]
    assert theirs(second)[0]["is_drop_mask"].tolist() == [False, False]
    for policy, marked in (("spill", False), ("drop", True)):
        rows, others = (ours(one, overlong_prompt=policy).tensors for one in (first, second))
        assert rows["is_drop_mask"].tolist() == [marked, False]
        assert others["is_drop_mask"].tolist() == [False, marked]
        assert rows_of(rows) == rows_of(others)[::-1]


def test_mask_and_response_have_one_length():
    spilled = conversation(SHORT_CALL, OVERLONG_CALL)
    three_real_tokens = [1, 1, 1, 0, 0, 0, 0, 0]
    their_tensors, our_tensors = theirs(spilled)[0], ours(spilled).tensors
    assert their_tensors["attention_mask"][1, 4:].tolist() == three_real_tokens
    assert their_tensors["response_mask"][1].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert our_tensors["attention_mask"][1, 4:].tolist() == three_real_tokens
    assert our_tensors["response_mask"][1].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


def test_interleaved_chains_merge():
    two_agents = conversation(([1], [2]), ([50], [51]), ([1, 2, 3], [4]), ([50, 51, 52], [53]))
    assert rows_of(theirs(two_agents)[0]) == [
        ([1], [2], [1]),
        ([50], [51], [1]),
        ([1, 2, 3], [4], [1]),
        ([50, 51, 52], [53], [1]),
    ]
    assert rows_of(ours(two_agents).tensors) == [
        ([1], [2, 3, 4], [1, 0, 1]),
        ([50], [51, 52, 53], [1, 0, 1]),
    ]


def test_duplicates_go_by_response_id():
    """0.3.0's batch trains a call recorded twice two times, or makes one odd answer of both."""
    twice = conversation(([1, 2], [3, 4]), ([1, 2], [3, 4]))
    row = ([1, 2], [3, 4], [1, 1])
    their_transitions = theirs(twice, level="transition")[0]
    assert their_transitions["responses"][:, :2].tolist() == [[3, 4], [3, 4]]
    assert rows_of(theirs(twice)[0]) == [([1, 2], [3, 4, 3, 4], [1, 1, 1, 1])]
    for level in ("transition", "trajectory"):
        for response_ids, rows, duplicate in (("aa", [row], 2), ("ab", [row, row], 0)):
            rollout = for_agl_fast([twice])[0]
            rollout.calls = [
                agl_fast.Call(prompt, response, response_id=response_id)
                for (prompt, response), response_id in zip(twice.calls, response_ids, strict=True)
            ]
            batch = agl_fast.build_batch(
                [rollout],
                level=level,
                max_prompt_length=4,
                max_response_length=8,
                pad_token_id=PAD,
            )
            assert rows_of(batch.tensors) == rows
            assert batch.accounting.duplicate == duplicate


def test_scores_are_float32():
    tenth = conversation(([1], [2]), reward=0.1)
    assert theirs(tenth)[0]["token_level_scores"][0, 0].item() == 0.10009765625
    assert ours(tenth).tensors["token_level_scores"][0, 0] == torch.tensor(0.1)


def test_scores_sit_on_a_trained_token():
    """What a tool added is the last thing inside R: 0.3.0 rewards it."""
    cut = conversation(([1], [2]), ([1, 2, 3, 3, 3, 3], [4]))
    their_tensors, our_tensors = theirs(cut, R=4)[0], ours(cut, R=4).tensors
    assert rows_of(their_tensors) == [([1], [2, 3, 3, 3], [1, 0, 0, 0])]
    assert their_tensors["token_level_scores"].tolist() == [[0, 0, 0, 1]]
    assert rows_of(our_tensors) == [([1], [2], [1])]
    assert our_tensors["token_level_scores"].tolist() == [[1, 0, 0, 0]]


def test_nan_is_missing():
    unknown = conversation(([1], [2]), reward=math.nan)
    their_tensors, _, their_metrics = theirs(unknown)
    assert math.isnan(their_tensors["token_level_scores"][0, 0])
    assert math.isnan(their_metrics["training/reward"])
    assert their_metrics["training/n_rollouts_w_reward"] == 1
    batch = ours(unknown, reward_fillna_value=0.5)
    assert batch.tensors["token_level_scores"][0, 0] == 0.5
    assert batch.metrics["training/reward"] == 0.5
    assert batch.metrics["training/n_rollouts_w_reward"] == 0


def test_a_batch_without_rows_raises_a_named_error():
    nothing = conversation()
    with pytest.raises(IndexError, match="argmax"):
        theirs(nothing)
    with pytest.raises(agl_fast.EmptyBatchError):
        ours(nothing)


@pytest.mark.parametrize("level", ["transition", "trajectory"])
def test_an_empty_answer_gives_no_row(level):
    """0.3.0's row of it has a reward and no token to learn from."""
    silent = conversation(([1, 2], []), ([5, 6], [7]))
    assert theirs(silent, level=level)[0]["attention_mask"][:, 4:].sum(-1).tolist() == [0, 1]
    batch = ours(silent, level=level)
    assert rows_of(batch.tensors) == [([5, 6], [7], [1])]
    assert batch.accounting.empty_calls == 1
