"""The table of request fields against the classes of the installed vLLM."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs the extra [cpu]")

from agl_fast.proxy.engines.vllm import CHAT, COMPLETIONS, EXPLICIT, FIELDS, NEUTRAL, RUN

# Fields that vLLM ignores, and that OpenAI's clients send.
OPENAI_ONLY = {
    *("metadata", "store", "service_tier", "modalities", "prediction"),
    *("prompt_cache_key", "safety_identifier", "verbosity"),
}


@pytest.fixture(scope="module")
def classes():
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    return {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest}


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_every_field_of_vllm_is_in_the_table_and_the_table_has_no_others(classes, endpoint):
    """A new vLLM brings a field: decide in engines/vllm.py what training does with it."""
    assert set(classes[endpoint].model_fields) == set(FIELDS[endpoint]) - OPENAI_ONLY


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_vllm_s_own_defaults_are_without_effect(classes, endpoint):
    for name, field in FIELDS[endpoint].items():
        if field.without_effect and name in classes[endpoint].model_fields:
            default = classes[endpoint].model_fields[name].get_default(call_default_factory=True)
            assert default is None or default in field.without_effect, name


def test_what_generation_config_json_may_fill_in_is_sent_by_every_training_call(classes):
    """vLLM falls back on these from the model's folder."""
    for endpoint, made in classes.items():
        filled_in = made._DEFAULT_SAMPLING_PARAMS.get_default()
        assert set(filled_in) <= {*RUN, *EXPLICIT}
        for name in filled_in.keys() & EXPLICIT.keys():
            assert EXPLICIT[name] == filled_in[name]
        assert set(EXPLICIT) <= set(NEUTRAL) <= set(FIELDS[endpoint])


def test_every_parameter_of_vllm_s_sampler_comes_from_a_field_of_the_table(classes):
    from vllm.sampling_params import SamplingParams

    known = set(FIELDS[CHAT]) | set(FIELDS[COMPLETIONS])
    made_by_the_server = {
        *("flat_logprobs", "detokenize", "output_kind", "skip_clone", "output_text_buffer_length"),
        *("extra_args", "skip_reading_prefix_cache"),
    }
    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert fields - known == made_by_the_server & fields
