"""Fields of vLLM's request classes, and what the proxy does with each.

The table covers vLLM 0.24 to 0.28; a test compares it with the installed vLLM. A server ignores
fields that its version does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from agl_fast.proxy.request_values import is_on, unquoted

Endpoint: TypeAlias = Literal["/v1/chat/completions", "/v1/completions"]
CHAT: Endpoint = "/v1/chat/completions"
COMPLETIONS: Endpoint = "/v1/completions"

# passed: the server gets what the agent sent. The field is part of the prompt, ends an answer,
#   formats it or schedules it; tokens are drawn as without it.
# recording: the proxy sets it in every recorded call, as rows need ids and log-probs.
# removed: it never reaches the server.
# run: training samples with the run's value (sampling: enforce).
# neutral: training samples with the neutral value (sampling: enforce).
# form: it constrains which tokens an answer may have. The agent depends on it, so that it stays,
#   and training calls that have it are counted and named.
# refused: a training call that has it is answered with 400.
Treatment: TypeAlias = Literal[
    "passed", "recording", "removed", "run", "neutral", "form", "refused"
]


@dataclass(frozen=True, slots=True)
class Field:
    """One field.

    Attributes:
        without_effect: values that are as good as none, besides null. The first one is the
            neutral value.
        explicit: the neutral value goes out with every training call, as the model's
            generation_config.json would fill it in otherwise.
        because: why it is refused, and what to send instead.
    """

    treatment: Treatment
    without_effect: tuple[Any, ...] = ()
    explicit: bool = False
    because: str = ""


def _each(treatment: Treatment, *names: str) -> dict[str, Field]:
    return {name: Field(treatment) for name in names}


_BOTH: dict[str, Field] = {
    # The prompt.
    **_each("passed", "model", "truncate_prompt_tokens", "truncation_side", "add_special_tokens"),
    # Where an answer ends, and how many there are. A seed chooses among equally drawn answers.
    **_each("passed", "max_tokens", "stop", "stop_token_ids", "repetition_detection", "n", "seed"),
    "length_penalty": Field("passed"),  # read by beam search alone
    # How an answer is written and sent.
    **_each("passed", "stream", "stream_options", "stream_interval", "include_stop_str_in_output"),
    **_each("passed", "skip_special_tokens", "spaces_between_special_tokens"),
    **_each("passed", "prompt_logprobs", "logprob_token_ids", "return_tokens_as_token_ids"),
    **_each("passed", "return_token_offsets", "routed_experts_prompt_start"),
    # Accounts, caches and queues.
    **_each("passed", "user", "priority", "session_id", "cache_salt"),
    **_each("recording", "return_token_ids", "logprobs"),
    # vLLM makes the response's id of it: one for a whole conversation would name every answer.
    "request_id": Field("removed"),
    **_each("run", "temperature", "top_p", "top_k"),
    "min_p": Field("neutral", (0.0,), explicit=True),
    "repetition_penalty": Field("neutral", (1.0,), explicit=True),
    "presence_penalty": Field("neutral", (0.0,), explicit=True),
    "frequency_penalty": Field("neutral", (0.0,), explicit=True),
    "min_tokens": Field("neutral", (0,)),
    "ignore_eos": Field("neutral", (False,)),
    "thinking_token_budget": Field("neutral", (-1,)),
    "logit_bias": Field("form", ({},)),
    "bad_words": Field("form", ([],)),
    "allowed_token_ids": Field("form"),
    "structured_outputs": Field("form"),
    "response_format": Field("form", ({"type": "text"},)),
    "vllm_xargs": Field("form", ({},)),  # of extensions, such as logits processors
    "use_beam_search": Field(
        "refused", (False,), because="beams are searched, not sampled; leave it out"
    ),
    "kv_transfer_params": Field(
        "refused", ({},), because="the answer would depend on another server's cache; leave it out"
    ),
    "ec_transfer_params": Field(
        "refused", ({},), because="the answer would depend on another server's cache; leave it out"
    ),
}

FIELDS: Mapping[Endpoint, Mapping[str, Field]] = {
    CHAT: {
        **_BOTH,
        **_each("passed", "messages", "tools", "documents", "chat_template"),
        **_each("passed", "chat_template_kwargs", "add_generation_prompt", "reasoning_effort"),
        **_each("passed", "continue_final_message", "media_io_kwargs", "mm_processor_kwargs"),
        **_each("passed", "max_completion_tokens", "parallel_tool_calls"),
        **_each("passed", "echo", "return_prompt_text", "return_assistant_tokens_mask"),
        # Of OpenAI's API, and ignored by vLLM.
        **_each("passed", "metadata", "store", "service_tier", "modalities", "prediction"),
        **_each("passed", "prompt_cache_key", "safety_identifier", "verbosity"),
        "top_logprobs": Field("recording"),
        # false: vLLM leaves out the ids of the whole answer.
        "include_reasoning": Field("recording", (True,)),
        "tool_choice": Field("form", ("auto", "none")),  # others forbid all that is no call
    },
    COMPLETIONS: {
        **_BOTH,
        **_each("passed", "prompt", "suffix"),
        "prompt_embeds": Field(
            "refused", ([],), because="rows hold token ids; send a prompt of text or ids"
        ),
        "echo": Field(
            "refused",
            (False,),
            because="beside token ids vLLM returns no text of the prompt; leave it out, or set "
            "max_tokens to 0, which scores the prompt and samples nothing",
        ),
    },
}

# Of both endpoints: their tables agree on these.
RUN = tuple(name for name, field in _BOTH.items() if field.treatment == "run")
NEUTRAL = {
    name: field.without_effect[0] for name, field in _BOTH.items() if field.treatment == "neutral"
}
EXPLICIT = {name: value for name, value in NEUTRAL.items() if _BOTH[name].explicit}


def has_effect(field: Field, value: Any) -> bool:
    if field.without_effect == (False,):
        return is_on(value)
    return value is not None and unquoted(value) not in field.without_effect


def named(body: Mapping[str, Any], endpoint: Endpoint, treatment: Treatment) -> list[str]:
    """Names of the body's fields with this treatment whose values have an effect."""
    return [
        name
        for name, field in FIELDS[endpoint].items()
        if field.treatment == treatment and has_effect(field, body.get(name))
    ]


def unknown(body: Mapping[str, Any], endpoint: Endpoint) -> list[str]:
    """Names of the body's fields that no row of the table has."""
    return [name for name in body if name not in FIELDS[endpoint]]
