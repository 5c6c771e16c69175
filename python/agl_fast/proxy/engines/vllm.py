"""vLLM's requests, answers, errors and health, versions 0.24 to 0.28.

A test compares the table of request fields with the installed vLLM. A server ignores fields that
its version does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from agl_fast.proxy import large_json
from agl_fast.proxy.answer_checks import (
    Asked,
    BadAnswerError,
    Ids,
    ModelLimits,
    bad_log_prob,
    believed,
)
from agl_fast.proxy.engines.base import CHAT, COMPLETIONS, Endpoint, Field, Treatment
from agl_fast.proxy.large_json import LargeValue, decoded, elements_of, members_of, read_json
from agl_fast.proxy.sampling import SamplingPolicy

NAME = "vLLM"
SERVED_MODEL_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm.served_model_name"
# It says 503 when its engine is dead. Other servers may not know the path.
HEALTH_PATH = "/health"
# The HTTP server closes a connection that was idle for 5 s: leave it before.
KEEP_ALIVE_SECONDS = 4.0
# Response ids are made of it, and an agent that sends one for a whole conversation would give
# different answers one id.
HEADERS_OF_ONE_ANSWER = frozenset({"x-request-id"})
# The content of a part with it may come from the cache.
MEDIA_REFERENCE = "uuid"
TOKEN_IDS_SINCE = "The server was asked with return_token_ids, which vLLM knows since 0.10.2"
REPLACED_BECAUSE = {
    "request_id": "Agents send request_id; it is left out, as vLLM names the answer by it.",
    "include_reasoning": (
        "Agents send include_reasoning=false; true goes out, as vLLM would leave out the token ids."
    ),
}

# The log-prob of a token that has none, and the lowest that is returned.
NO_LOG_PROB = -9999.0
# The default of /v1/completions.
_COMPLETIONS_MAX_TOKENS = 16


# --- values of a request: the request classes turn strings into numbers -------------------------


def is_on(value: Any) -> bool:
    """Whether vLLM reads a JSON value as true: also numbers other than 0, "true", "1", "yes"."""
    if isinstance(value, str):
        return value.strip().lower() in ("1", "on", "t", "true", "y", "yes")
    if isinstance(value, LargeValue):
        return not value.is_string
    return bool(value)


def unquoted(value: Any) -> Any:
    """A string that vLLM reads as a number as that number; other values as they are."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def number(value: Any) -> int | None:
    """A JSON value as vLLM reads an integer: also 2.0, "2" and "2.0". None: it is none."""
    if isinstance(value, str):
        whole, point, zeros = value.strip().partition(".")
        if point and (not zeros or zeros.strip("0")):
            return None
        try:
            return int(whole)
        except ValueError:
            return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return int(value) if isinstance(value, int) else None


def has_effect(field: Field, value: Any) -> bool:
    if field.without_effect == (False,):
        return is_on(value)
    return value is not None and unquoted(value) not in field.without_effect


def is_same(name: str, theirs: Any, ours: Any) -> bool:
    if isinstance(ours, bool):
        return is_on(theirs) == ours
    theirs = unquoted(theirs)
    if name == "top_k" and ours <= 0:
        return bool(theirs in (-1, 0))
    return bool(theirs == ours)


# --- fields of a request --------------------------------------------------------------------


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


# --- requests -------------------------------------------------------------------------------


def sampling_parameters(policy: SamplingPolicy) -> dict[str, Any]:
    return {**{name: getattr(policy, name) for name in RUN}, **EXPLICIT}


def for_recording(body: Mapping[str, Any], endpoint: Endpoint) -> tuple[dict[str, Any], list[str]]:
    """The body with ids and log-probs asked for; the agent's fields that this replaced."""
    replaced = [
        name
        for name, field in FIELDS[endpoint].items()
        if field.treatment == "removed" and has_effect(field, body.get(name))
    ]
    changed = {
        name: value
        for name, value in body.items()
        if name not in FIELDS[endpoint] or FIELDS[endpoint][name].treatment != "removed"
    }
    changed["return_token_ids"] = True
    if endpoint == COMPLETIONS:
        if changed.get("logprobs") is None:
            changed["logprobs"] = 0
        return changed, replaced
    changed["logprobs"] = True
    # An explicit null would switch log-probs off.
    if changed.get("top_logprobs") is None:
        changed["top_logprobs"] = 0
    if changed.get("include_reasoning") is not None and not is_on(changed["include_reasoning"]):
        changed["include_reasoning"] = True
        replaced.append("include_reasoning")
    return changed, replaced


def usage_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """``stream_options`` with which a stream ends in its usage: how many ids there must be."""
    if not is_on(body.get("stream")):
        return {}
    given = decoded(body.get("stream_options"))
    if given is None:
        given = {}
    if not isinstance(given, Mapping) or is_on(given.get("include_usage")):
        return {}
    return {"stream_options": {**given, "include_usage": True, "continuous_usage_stats": False}}


def asked(
    agents: Mapping[str, Any], sent: Mapping[str, Any], endpoint: Endpoint, choices: int
) -> Asked:
    is_chat = endpoint == CHAT
    if is_chat:
        limit = sent.get("max_completion_tokens")
        limit = sent.get("max_tokens") if limit is None else limit
    else:
        limit = sent.get("max_tokens")
        limit = _COMPLETIONS_MAX_TOKENS if limit is None else limit
    options = decoded(agents.get("stream_options"))
    return Asked(
        choices=choices,
        max_tokens=number(limit),
        echo=not is_chat and is_on(sent.get("echo")),
        repeats_text=is_on(sent.get("echo")),
        ignores_end=is_on(sent.get("ignore_eos")),
        wants_usage=isinstance(options, Mapping) and is_on(options.get("include_usage")),
    )


def has_strict_tools(body: Mapping[str, Any]) -> bool:
    """Whether vLLM forbids all that is no call of them, which the trainer knows nothing of."""
    return any(_is_strict(tool) for tool in elements_of(body.get("tools")))


def loosened(tools: Any) -> list[Any]:
    """The tools, none of them strict."""
    return [_loosened(tool) if _is_strict(tool) else tool for tool in elements_of(tools)]


def _loosened(tool: Any) -> dict[str, Any]:
    members = members_of(tool) or {}
    return {**members, "function": {**(members_of(members["function"]) or {}), "strict": False}}


def _is_strict(tool: Any) -> bool:
    function = members_of((members_of(tool) or {}).get("function"))
    return function is not None and is_on(function.get("strict"))


# --- answers --------------------------------------------------------------------------------


# Fields that are named here are all that is decoded of an answer. Ids stay raw text for the native
# parser; they are most of the answer.
class TokenLogProb(msgspec.Struct):
    logprob: float | None = None  # vLLM's events leave its default, -9999.0, out


class LogProbLists(msgspec.Struct):
    content: list[TokenLogProb] | None = None  # chat
    token_logprobs: list[float | None] | None = None  # completions

    @property
    def values(self) -> list[float | None]:
        if self.content is not None:
            return [token.logprob for token in self.content]
        return self.token_logprobs or []


class ChoicePart(msgspec.Struct):
    index: int | None = None
    token_ids: msgspec.Raw = msgspec.Raw()
    prompt_token_ids: msgspec.Raw = msgspec.Raw()  # completions
    logprobs: LogProbLists | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Usage(msgspec.Struct):
    completion_tokens: int | None = None


class AnswerPart(msgspec.Struct):
    id: str = ""
    prompt_token_ids: msgspec.Raw = msgspec.Raw()  # chat
    choices: list[ChoicePart] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()  # an event in place of an answer's rest


_ANSWER = msgspec.json.Decoder(AnswerPart)
_CHOICE = msgspec.json.Decoder(ChoicePart)
_CHOICES = msgspec.json.Decoder(list[ChoicePart])
_LOG_PROBS = msgspec.json.Decoder(LogProbLists)
_TOKENS = msgspec.json.Decoder(list[TokenLogProb])
_NUMBERS = msgspec.json.Decoder(list[float | None])


def decode_answer(text: bytes) -> AnswerPart:
    """A whole answer, or an event of a stream; a large one piece by piece.

    Raises:
        msgspec.DecodeError, ValueError, RecursionError: it is not JSON, or not of such a form.
    """
    if len(text) <= large_json.LARGE_BYTES:
        return _ANSWER.decode(text)
    members = LargeValue(text, 0, len(text), constants=False).member_texts()
    choices = members.get("choices")
    if choices is None or not choices.is_array:
        return _ANSWER.decode(_object_of(AnswerPart, members))
    answer = _ANSWER.decode(_object_of(AnswerPart, members, without="choices"))
    answer.choices = []
    for run in choices.runs():
        if isinstance(run, LargeValue):
            answer.choices.append(_large_choice(run))
        else:
            answer.choices += _CHOICES.decode(run)
    return answer


def _large_choice(choice: LargeValue) -> ChoicePart:
    if not choice.is_object:
        return _CHOICE.decode(choice.text)
    members = choice.member_texts()
    log_probs = members.get("logprobs")
    if log_probs is None or not log_probs.is_object:
        return _CHOICE.decode(_object_of(ChoicePart, members))
    part = _CHOICE.decode(_object_of(ChoicePart, members, without="logprobs"))
    part.logprobs = _log_probs(log_probs)
    return part


def _log_probs(log_probs: LargeValue) -> LogProbLists:
    members = log_probs.member_texts()
    lists = {
        name: value
        for name in LogProbLists.__struct_fields__
        if (value := members.get(name)) is not None
        and (value.is_array or bytes(value.text) != b"null")
    }
    if not all(each.is_array for each in lists.values()):
        return _LOG_PROBS.decode(_object_of(LogProbLists, members))
    part = LogProbLists()
    if "content" in lists:
        part.content = []
        for run in lists["content"].runs():
            part.content += _TOKENS.decode(run if isinstance(run, bytes) else run.as_array())
    if "token_logprobs" in lists:
        part.token_logprobs = []
        for run in lists["token_logprobs"].runs():
            numbers = _NUMBERS.decode(run if isinstance(run, bytes) else run.as_array())
            part.token_logprobs += numbers
    return part


def _object_of(
    kind: type[msgspec.Struct], members: dict[str, LargeValue], without: str = ""
) -> bytes:
    """JSON of the members that the kind has."""
    kept = [
        b"".join((b'"', name.encode(), b'":', members[name].text))
        for name in kind.__struct_fields__
        if name in members and name != without
    ]
    return b"{%b}" % b",".join(kept)


def explain_unreadable(
    part: bytes, error: Exception, n_before: Mapping[int, int]
) -> BadAnswerError:
    """What is wrong with an answer, or an event of a stream, that cannot be decoded.

    Args:
        n_before: log-probs of each choice in the events before.
    """
    try:
        answer = read_json(part)  # takes NaN and Infinity, which are no JSON
    except (ValueError, RecursionError):
        return BadAnswerError("unreadable", f"it is not JSON: {error}")
    for choice in elements_of((members_of(answer) or {}).get("choices")):
        members = members_of(choice) or {}
        index = members.get("index", 0)
        before = n_before.get(index, 0) if isinstance(index, int) else 0
        for position, value in enumerate(_values_of(members.get("logprobs"))):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and abs(value) < float("inf")):
                return bad_log_prob(index, before + position, value)
    return BadAnswerError("unreadable", f"it cannot be read: {error}")


def _values_of(log_probs: Any) -> Iterator[Any]:
    members = members_of(log_probs) or {}
    content = members.get("content")
    if isinstance(content, (list, LargeValue)):
        for each in elements_of(content):
            token = members_of(each)
            yield each if token is None else token.get("logprob")
    else:
        yield from elements_of(members.get("token_logprobs"))


def has_text(part: bytes, choice: int) -> bool:
    """Whether an event, or an answer, has text, reasoning or a tool call of the choice."""
    for each in elements_of((members_of(read_json(part)) or {}).get("choices")):
        members = members_of(each) or {}
        if members.get("index", 0) != choice:
            continue
        if members.get("text"):
            return True
        message = members.get("delta") or members.get("message")
        fields = members_of(message)
        if fields is None:
            return bool(message)
        return any(value for name, value in fields.items() if name != "role")
    return False


def ids_in(part: bytes) -> int:
    """Token ids in an answer, or an event, that is refused."""
    try:
        answer = members_of(read_json(part)) or {}
    except (ValueError, RecursionError):
        return 0
    choices = elements_of(answer.get("choices"))
    return sum(_length((members_of(each) or {}).get("token_ids")) for each in choices)


def claimed_tokens(body: bytes, longest: int) -> int:
    """Sampled tokens by the usage of a whole answer that is refused.

    Args:
        longest: tokens that a choice can have; a usage that says more is not believed.
    """
    try:
        answer = members_of(read_json(body)) or {}
    except (ValueError, RecursionError):
        return 0
    claimed = (members_of(answer.get("usage")) or {}).get("completion_tokens")
    return believed(claimed, longest * max(1, _length(answer.get("choices"))))


def _length(value: Any) -> int:
    if isinstance(value, LargeValue):
        return value.count() if value.is_array else 0
    return len(value) if isinstance(value, list) else 0


def is_no_log_prob(value: float) -> bool:
    return value <= NO_LOG_PROB


def finish_reason(
    said: str | None,
    stop_reason: Any,
    n_prompt: int,
    response_ids: Ids,
    asked: Asked,
    limits: ModelLimits,
) -> str | None:
    """Why sampling ended.

    vLLM says ``tool_calls`` of an answer with a tool call whatever ended it. The rules are those of
    its ``check_stop``: an id that ends the text comes before a limit, both come before an abort.

    Args:
        said: the answer's finish reason.
        stop_reason: the answer's: a stop string, an id that stops, ``repetition_detected``.
        n_prompt: tokens of the prompt.
    """
    if said != "tool_calls":
        return said
    if stop_reason is not None:
        return "repetition" if stop_reason == "repetition_detected" else said
    if len(response_ids) and not asked.ignores_end and int(response_ids[-1]) in limits.end_ids:
        return said
    context = limits.context_length
    most = min((n for n in (asked.max_tokens, limits.max_tokens) if n is not None), default=None)
    if most is not None and len(response_ids) >= most:
        return "length"
    if context is not None and n_prompt + len(response_ids) >= context:
        return "length"
    # Nothing else ends an answer, once the ids that do and both limits are known.
    if limits.end_ids and context is not None and most is not None:
        return "abort"
    return said


def exceeds_context(refusal: bytes) -> bool:
    return b"maximum context length" in refusal
