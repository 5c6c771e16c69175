"""vLLM's tool parser for each of verl's multi-turn formats."""

from __future__ import annotations

# verl parses tool calls in its own agent loop and tells its vLLM server nothing about them.
VLLM_TOOL_PARSERS = {
    "hermes": "hermes",
    "gpt-oss": "openai",
    "qwen3_coder": "qwen3_coder",
    "glm": "glm45",
    "seed": "seed_oss",
    "minimax": "minimax_m2",
    "kimi": "kimi_k2",
    "deepseek_v4": "deepseek_v4",
    "gemma4": "gemma4",
}


def vllm_tool_options(multi_turn_format: str) -> dict[str, bool | str]:
    """Engine options with which vLLM's OpenAI server returns tool calls.

    Args:
        multi_turn_format: verl's ``rollout.multi_turn.format``, or a parser of vLLM itself.

    Returns:
        What belongs in ``rollout.engine_kwargs.vllm``.
    """
    parser = VLLM_TOOL_PARSERS.get(multi_turn_format, multi_turn_format)
    return {"enable_auto_tool_choice": True, "tool_call_parser": parser}
