"""Engine arguments of the vLLM servers that follow from other keys: name, prompts, tools."""

from __future__ import annotations

import json
from difflib import get_close_matches
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

ENGINE_KWARGS = "actor_rollout_ref.rollout.engine_kwargs.vllm"
TEMPLATE_KWARGS = "data.apply_chat_template_kwargs"
SERVED_NAME = "served_model_name"
# vLLM's tool parser of each of verl's multi-turn formats that has another name there.
TOOL_PARSERS = {
    "gpt-oss": "openai",
    "glm": "glm45",
    "seed": "seed_oss",
    "minimax": "minimax_m2",
    "kimi": "kimi_k2",
}
# With Mistral's own tokenizer, this parser of vLLM's sets a grammar for every answer (0.28).
GRAMMAR_PARSER = "mistral"


# Engine arguments that verl makes of a key of actor_rollout_ref.rollout, unless they are given.
OF_ROLLOUT = {
    "data_parallel_size": "data_parallel_size",
    "dtype": "dtype",
    "enable_sleep_mode": "enable_sleep_mode",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "load_format": "load_format",
    "logprobs_mode": "logprobs_mode",
    "max_model_len": "max_model_len",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "tensor_parallel_size": "tensor_model_parallel_size",
}


def fill_in_engine_arguments(config: DictConfig) -> list[str]:
    """Set the engine arguments that follow from other keys of the configuration.

    verl renders prompts and parses tool calls in its own agent loop, not in its vLLM servers. Here
    the servers do both.

    Returns:
        A line for each argument that changes what is sampled.

    Raises:
        ValueError: an engine argument is unknown or contradicts the key that it follows from, or
            vLLM has no parser of the multi-turn format.
    """
    _check_arguments(config)
    _name_the_model(config)
    _render_prompts(config)
    _parse_tools(config)
    return _without_grammar(config)


def served_model_name(config: DictConfig) -> str:
    """The name by which the servers know the model.

    verl starts a server on the model's local path (`use_shm`, `hdfs://`: a copy's), and with
    `prometheus.enable` names the model by the last part of `prometheus.served_model_name`.
    """
    prometheus = config.actor_rollout_ref.rollout.prometheus
    if prometheus.enable and prometheus.served_model_name:
        return str(prometheus.served_model_name).split("/")[-1]
    named = _engine_kwargs(config).get(SERVED_NAME)
    if isinstance(named, str):
        return named
    # vLLM answers to each name of a list.
    return str(named[0]) if named else str(config.actor_rollout_ref.model.path)


def answer_limit(config: DictConfig) -> int | None:
    """The most tokens of an answer, whatever a request's max_tokens; None: the servers set none.

    verl starts its servers with `max_new_tokens` in `override_generation_config`, which vLLM takes
    as a limit, not as a default.
    """
    generation = _engine_kwargs(config).get("override_generation_config")
    if generation is None:
        return int(config.actor_rollout_ref.rollout.response_length)
    if isinstance(generation, str):
        generation = json.loads(generation)
    limit = generation.get("max_new_tokens")
    return None if limit is None else int(limit)


def tool_options(multi_turn_format: str) -> dict[str, bool | str]:
    """Engine arguments with which vLLM's OpenAI server returns tool calls.

    Args:
        multi_turn_format: `rollout.multi_turn.format`, verl's name or vLLM's.

    Raises:
        ValueError: vLLM has no such parser; the message names those it has.
    """
    # Only here: importing vLLM takes seconds.
    from vllm.tool_parsers import ToolParserManager

    parser = TOOL_PARSERS.get(multi_turn_format, multi_turn_format)
    known = ToolParserManager.list_registered()
    if parser not in known:
        raise ValueError(
            f"actor_rollout_ref.rollout.multi_turn.format={multi_turn_format!r}: expected one of "
            f"{', '.join(sorted({*known, *TOOL_PARSERS}))}"
        )
    return {"enable_auto_tool_choice": True, "tool_call_parser": parser}


def _check_arguments(config: DictConfig) -> None:
    chosen = _engine_kwargs(config)
    for name, key in OF_ROLLOUT.items():
        key = f"actor_rollout_ref.rollout.{key}"
        value = OmegaConf.select(config, key)
        if chosen.get(name, value) not in (value, None):
            raise ValueError(
                f"{ENGINE_KWARGS}.{name}={chosen[name]!r}: expected not to be set, as it would "
                f"replace {key}={value!r}, which agl_fast checks and uses"
            )
    if chosen.get("api_key") is not None:
        raise ValueError(
            f"{ENGINE_KWARGS}.api_key: expected not to be set, as the servers would refuse the "
            "proxy's requests; agents' key is agentlightning.proxy.api_key"
        )
    if new := chosen.keys() - {"worker_extension_cls", "distributed_executor_backend"}:
        known = engine_arguments()
        for name in sorted(new - known):
            close = get_close_matches(name, sorted(known), n=1)
            raise ValueError(
                f"{ENGINE_KWARGS}.{name}={chosen[name]!r}: expected an argument of vllm serve, "
                f"with _ in place of -{f'; did you mean {close[0]}?' if close else ''}"
            )


@cache
def engine_arguments() -> frozenset[str]:
    """Names of the arguments of `vllm serve` in the installed vLLM."""
    # Only here: importing vLLM takes seconds.
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    actions = make_arg_parser(FlexibleArgumentParser())._actions
    options = (option for action in actions for option in action.option_strings)
    return frozenset(
        option.removeprefix("--").replace("-", "_") for option in options if option[:2] == "--"
    )


def _name_the_model(config: DictConfig) -> None:
    if not _engine_kwargs(config).get(SERVED_NAME):
        _set(config, SERVED_NAME, "${actor_rollout_ref.model.path}")


def _render_prompts(config: DictConfig) -> None:
    model = config.actor_rollout_ref.model
    _follow(config, "chat_template", "actor_rollout_ref.model.custom_chat_template")
    if model.tokenizer_path != model.path:
        _follow(config, "tokenizer", "actor_rollout_ref.model.tokenizer_path")
    wanted = OmegaConf.select(config, TEMPLATE_KWARGS)
    if not wanted:
        return
    name = "default_chat_template_kwargs"
    theirs = _engine_kwargs(config).get(name) or {}
    ours = OmegaConf.to_container(wanted, resolve=True)
    for key, value in ours.items():
        if theirs.get(key, value) != value:
            raise ValueError(
                f"{TEMPLATE_KWARGS}.{key}={value!r}: expected {theirs[key]!r}, as in "
                f"{ENGINE_KWARGS}.{name}, or one of the two keys alone"
            )
    _set(config, name, {**ours, **theirs})


def _follow(config: DictConfig, name: str, key: str) -> None:
    """Give an engine argument the value of a key that is set."""
    value = OmegaConf.select(config, key)
    if value is None:
        return
    theirs = _engine_kwargs(config).get(name)
    if theirs is not None and theirs != value:
        raise ValueError(
            f"{key}={value!r}: expected {theirs!r}, as in {ENGINE_KWARGS}.{name}, or one of the "
            "two keys alone"
        )
    _set(config, name, "${" + key + "}")


def _parse_tools(config: DictConfig) -> None:
    multi_turn_format = config.actor_rollout_ref.rollout.multi_turn.format
    chosen = _engine_kwargs(config)
    if multi_turn_format is None or "tool_call_parser" in chosen:
        return
    for name, value in tool_options(multi_turn_format).items():
        if name not in chosen:
            _set(config, name, value)


def _without_grammar(config: DictConfig) -> list[str]:
    chosen = _engine_kwargs(config)
    if chosen.get("tool_call_parser") != GRAMMAR_PARSER or chosen.get("tokenizer_mode"):
        return []
    _set(config, "tokenizer_mode", "hf")
    return [
        f"{ENGINE_KWARGS}.tokenizer_mode=hf: with Mistral's own tokenizer, vLLM's tool parser "
        f"{GRAMMAR_PARSER!r} constrains every answer to a grammar, which the actor's log-probs do "
        "not account for"
    ]


def _engine_kwargs(config: DictConfig) -> dict[str, Any]:
    chosen = OmegaConf.select(config, ENGINE_KWARGS)
    found: dict[str, Any] = {} if chosen is None else OmegaConf.to_container(chosen, resolve=True)
    return found


def _set(config: DictConfig, name: str, value: Any) -> None:
    OmegaConf.update(config, f"{ENGINE_KWARGS}.{name}", value, force_add=True)
