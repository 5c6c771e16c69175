"""How our mismatch kinds relate to the three names Agent-lightning 0.3.0 counts them under."""

import pytest

pytest.importorskip("agentlightning", reason="needs the extra [cpu] or [verl]")

import agl_fast
from benchmarks.agentlightning_daemon import Daemon
from benchmarks.conversations import Conversation, for_agentlightning, for_agl_fast

NAMES = ("template", "retoken", "others")
TEXT = {1: "<user>", 2: "<think>", 3: "<end>", 10: "a", 11: "b", 12: "ab", 13: "c", 14: "d"}


class LetterTokenizer:
    """Ids 1 to 3 are special; 12 spells what 10 and 11 spell."""

    all_special_ids = (1, 2, 3)

    def decode(self, ids, skip_special_tokens=False):
        return "".join(
            TEXT[int(token)]
            for token in ids
            if not (skip_special_tokens and token in self.all_special_ids)
        )


USER, THINK, END, A, B, AB, C, D = TEXT
CASES = {
    "retokenised": ([USER, C, END], [AB, END], [USER, C, END, A, B, END, USER, D], "retoken"),
    "history_rewritten": (
        [USER, C, END],
        [THINK, A, END],
        [USER, C, END, A, END, USER, D],
        "template",
    ),
    "generation_prompt": (
        [USER, C, END, THINK],
        [A, END],
        [USER, C, END, A, END, USER, D],
        "template",
    ),
    "new_conversation": ([USER, C, END], [A, END], [USER, D, END, B, END, USER, C], "others"),
    "shortened": ([USER, C, D], [A, B], [USER, C], "others"),
}


def both(first_prompt, first_response, second_prompt):
    conversation = Conversation(
        "rollout-0", "sample-0", [(first_prompt, first_response), (second_prompt, [D])], 1.0
    )
    tokenizer = LetterTokenizer()
    daemon = Daemon(
        for_agentlightning([conversation]), level="trajectory", pad_token_id=0, tokenizer=tokenizer
    )
    _, their_metrics = daemon.get_train_data_batch(16, 16)
    ours = agl_fast.build_batch(
        for_agl_fast([conversation]),
        max_prompt_length=16,
        max_response_length=16,
        pad_token_id=0,
        tokenizer=tokenizer,
    )
    return ours, their_metrics


def names_counted(metrics) -> dict[str, int]:
    return {name: metrics[f"training/{name}_mismatch_triplets"] for name in NAMES}


@pytest.mark.parametrize("kind", CASES)
def test_kinds_map_to_the_names_of_agentlightning(kind):
    *calls, name = CASES[kind]
    ours, their_metrics = both(*calls)
    assert [mismatch.kind for mismatch in ours.mismatches] == [kind]
    expected = {other: int(other == name) for other in NAMES}
    assert names_counted(their_metrics) == expected
    assert names_counted(ours.metrics) == expected
    for other in NAMES:
        ratio = f"training/{other}_mismatch_ratio"
        assert ours.metrics[ratio] == their_metrics[ratio]


def test_a_call_counts_under_one_name_only():
    """0.3.0 counts a rewritten history whose text differs as well under two names."""
    ours, their_metrics = both([USER, C, END], [THINK, A, END], [USER, C, END, B, END, USER, D])
    assert names_counted(their_metrics) == {"template": 1, "retoken": 0, "others": 1}
    assert names_counted(ours.metrics) == {"template": 1, "retoken": 0, "others": 0}
