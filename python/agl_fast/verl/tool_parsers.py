"""vLLM's tool parser for each of verl's multi-turn formats."""

from __future__ import annotations

# verl parses tool calls in its own agent loop and tells its vLLM server nothing about them.
VERL_FORMATS = {
    "gpt-oss": "openai",
    "glm": "glm45",
    "seed": "seed_oss",
    "minimax": "minimax_m2",
    "kimi": "kimi_k2",
}


def tool_options(multi_turn_format: str) -> dict[str, bool | str]:
    """Engine options with which vLLM's OpenAI server returns tool calls.

    Args:
        multi_turn_format: `rollout.multi_turn.format`, in verl's words or in vLLM's.

    Returns:
        What belongs in `rollout.engine_kwargs.vllm`.

    Raises:
        ValueError: vLLM has no such parser; names those it has.
    """
    # Only here: importing vLLM takes seconds.
    from vllm.tool_parsers import ToolParserManager

    parser = VERL_FORMATS.get(multi_turn_format, multi_turn_format)
    known = ToolParserManager.list_registered()
    if parser not in known:
        raise ValueError(
            f"actor_rollout_ref.rollout.multi_turn.format={multi_turn_format!r}: expected one of "
            f"{', '.join(sorted({*known, *VERL_FORMATS}))}"
        )
    return {"enable_auto_tool_choice": True, "tool_call_parser": parser}
