"""Why a call did not extend the conversation before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Agent-lightning's names for the kinds of MISMATCH_KINDS.
AGENT_LIGHTNING_NAMES = {
    "history_rewritten": "template",
    "retokenised": "retoken",
    "generation_prompt": "template",
    "shortened": "others",
    "new_conversation": "others",
}

_PROBE_TOKENS = 32
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # a character cut between two tokens


def is_retokenised(tokenizer: Any, context: Sequence[int], prompt: Sequence[int]) -> bool:
    """Whether a prompt spells a chain's text with other tokens.

    Only what follows the first difference is decoded, and all of it only if its beginning agrees.

    Args:
        tokenizer: has ``decode(ids, skip_special_tokens=False)``.
        context: the chain's ids from the first difference to the end of its context.
        prompt: the prompt's ids from the first difference on.
    """
    if not context or not prompt:
        return False

    def text(ids: Sequence[int]) -> str:
        decoded = tokenizer.decode(list(ids), skip_special_tokens=False)
        return str(decoded).rstrip(_REPLACEMENT)

    begins, other_begins = text(context[:_PROBE_TOKENS]), text(prompt[:_PROBE_TOKENS])
    if not (begins.startswith(other_begins) or other_begins.startswith(begins)):
        return False
    # The same text takes at most some four times as many tokens.
    return text(prompt[: 4 * len(context) + _PROBE_TOKENS]).startswith(text(context))
