"""What broke a prefix, named from the decoded texts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from agl_fast import Call, Rollout, build_batch
from agl_fast.rows.mismatches import CAUSES, causes_in_words, causes_of
from agl_fast.rows.token_summary import MISMATCH_CAUSES, TokenSummary

USER, MODEL, END = "<|user|>", "<|model|>", "<|end|>"


class Words:
    """One id a character, but markers are single tokens, as tokenizers have them."""

    def __init__(self) -> None:
        self.pieces: list[str] = [USER, MODEL, END]

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            piece = next((each for each in (USER, MODEL, END) if text.startswith(each)), text[0])
            if piece not in self.pieces:
                self.pieces.append(piece)
            ids.append(self.pieces.index(piece))
            text = text.removeprefix(piece)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.pieces[each] for each in ids)


ASKED = f"{USER}Which box?{END}"
CALL = '<tool_call>\n{"name":"open","arguments":{"box":3}}'
CLOSED = f"{CALL}\n</tool_call>"
ARGUMENTS = CLOSED.replace(":", ": ").replace(",", ", ")
# Each: generation prompt, answer, and what the next prompt has after the question.
CASES = {
    "reasoning_removed": (
        MODEL,
        f"<think>It is the third.</think>\n\nBox 3{END}",
        f"{MODEL}Box 3{END}",
    ),
    "white_space": (MODEL, f"\n Box 3 \n{END}", f"{MODEL}Box 3{END}"),
    "tool_call_completed": (MODEL, f"{CALL}{END}", f"{MODEL}{CLOSED}{END}"),
    "arguments_rerendered": (MODEL, f"{CLOSED}{END}", f"{MODEL}{ARGUMENTS}{END}"),
    "tools_not_rendered": (MODEL, f"{CLOSED}{END}", f"{MODEL}{END}"),
    "generation_prompt": (f"{MODEL}<think>\n\n</think>\n\n", f"Box 3{END}", f"{MODEL}Box 3{END}"),
    "end_token": (MODEL, f"Box 3{USER}", f"{MODEL}Box 3{END}"),
    "unknown": (MODEL, f"Box 3{END}", f"{MODEL}[left out]{END}"),
}


def causes(first: str, answer: str, second: str) -> dict[str, int]:
    words = Words()
    calls = [
        Call(words.encode(first), words.encode(answer)),
        Call(words.encode(second), words.encode(f"Yes{END}")),
    ]
    rollout = Rollout("r", "g", calls, 1.0)
    batch = build_batch(
        [rollout], max_prompt_length=900, max_response_length=900, pad_token_id=0, tokenizer=words
    )
    return dict(causes_of(batch.mismatches, [rollout], words, 10))


@pytest.mark.parametrize("cause", CASES)
def test_causes(cause: str) -> None:
    generation, answer, history = CASES[cause]
    second = f"{ASKED}{history}{USER}Sure?{END}{generation}"
    assert causes(f"{ASKED}{generation}", answer, second) == {cause: 1}


def test_reasoning_that_the_generation_prompt_opens() -> None:
    """As DeepSeek-R1's template, which writes <think> for the model."""
    answer = f"It is the third.\n</think>\n\nBox 3{END}"
    second = f"{ASKED}{MODEL}Box 3{END}{USER}Sure?{END}{MODEL}<think>\n"
    assert causes(f"{ASKED}{MODEL}<think>\n", answer, second) == {"reasoning_removed": 1}


def test_a_date_in_the_system_prompt() -> None:
    first = f"{USER}Today is Monday.{END}{ASKED}{MODEL}"
    answer = f"The third of the boxes is the right one.{END}"
    second = first.replace("Monday", "Tuesday") + f"{answer}{USER}Sure?{END}{MODEL}"
    assert causes(first, answer, second) == {"beginning_changed": 1}


def test_a_sub_agent_that_quotes_an_answer_is_a_conversation_of_its_own() -> None:
    answer = f"The third of the boxes is the right one.{END}"
    second = f"{USER}Check this: {answer}{MODEL}"
    assert causes(f"{ASKED}{MODEL}", answer, second) == {}


def test_a_tool_result_that_changed() -> None:
    words = Words()
    first = f"{ASKED}{MODEL}"
    second = f"{first}Open 3{END}{USER}A note from Monday, which is no template.{END}{MODEL}"
    third = second.replace("Monday", "Friday") + f"So 7{END}{USER}Sure?{END}{MODEL}"
    texts = [(first, f"Open 3{END}"), (second, f"So 7{END}"), (third, f"Yes{END}")]
    rollout = Rollout("r", "g", [Call(*map(words.encode, each)) for each in texts], 1.0)
    batch = build_batch(
        [rollout], max_prompt_length=900, max_response_length=900, pad_token_id=0, tokenizer=words
    )
    assert dict(causes_of(batch.mismatches, [rollout], words, 10)) == {"observation_changed": 1}


def test_every_cause_has_words() -> None:
    for cause in CAUSES:
        assert CAUSES[cause] in causes_in_words({cause: 2})
    told = causes_in_words({"white_space": 1, "tool_call_completed": 11})
    assert told.startswith(
        "Of 12 broken prefixes whose text was compared, in 11 the model left the"
    )


def test_the_end_of_a_run_names_the_cause_and_advises_what_is_possible() -> None:
    metrics = {
        "training/n_calls": 20,
        "training/tokens/sampled": 100,
        "training/tokens/trained": 100,
        "training/mismatches/history_rewritten": 11,
        f"{MISMATCH_CAUSES}tool_call_completed": 11,
    }
    for refused in (False, True):
        summary = TokenSummary("trajectory", tree_is_refused=refused)
        summary.add(metrics)
        assert "in 11 the model left the end of its tool call out" in str(summary)
        assert ("Level tree" in str(summary)) is not refused
