"""Engine arguments of the vLLM servers that follow from other keys of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")
pytest.importorskip("vllm", reason="needs the extra [cpu]")

from omegaconf import OmegaConf

from agl_fast.verl.config import compose
from agl_fast.verl.config.servers import ENGINE_KWARGS, answer_limit, served_model_name
from support.verl_settings import documented

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl, vLLM and what they import

MODEL = "actor_rollout_ref__model__"
ROLLOUT = "actor_rollout_ref__rollout__"
ENGINE = f"{ROLLOUT}engine_kwargs__vllm__"
TEMPLATE = "{%- for m in messages %}\n{{ m.content }}{% endfor %}"


def composed(**changes: Any) -> Any:
    return compose(documented(**changes), device="cuda").config


def command_line(config: Any) -> Any:
    """The engine arguments as vLLM reads them, after verl has written its command line."""
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    chosen = OmegaConf.to_container(
        config.actor_rollout_ref.rollout.engine_kwargs.vllm, resolve=True
    )
    parser = make_arg_parser(FlexibleArgumentParser())
    return parser.parse_args(build_cli_args_from_config(chosen))


def test_template_arguments_reach_the_servers() -> None:
    found = command_line(
        composed(
            data__apply_chat_template_kwargs={"enable_thinking": False, "depth": 2},
            **{f"{ENGINE}default_chat_template_kwargs": {"mine": "x", "depth": 2}},
        )
    )
    assert found.default_chat_template_kwargs == {"enable_thinking": False, "depth": 2, "mine": "x"}
    assert command_line(composed()).default_chat_template_kwargs is None


def test_template_and_tokenizer_of_the_model_reach_the_servers() -> None:
    found = command_line(
        composed(**{f"{MODEL}custom_chat_template": TEMPLATE, f"{MODEL}tokenizer_path": "a/b"})
    )
    assert found.chat_template == TEMPLATE
    assert found.tokenizer == "a/b"
    plain = command_line(composed(**{f"{MODEL}tokenizer_path": "some/model"}))
    assert plain.chat_template is None
    assert plain.tokenizer is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "data__apply_chat_template_kwargs": {"enable_thinking": False},
                f"{ENGINE}default_chat_template_kwargs": {"enable_thinking": True},
            },
            "data.apply_chat_template_kwargs.enable_thinking=False: expected True",
        ),
        (
            {f"{MODEL}custom_chat_template": TEMPLATE, f"{ENGINE}chat_template": "t.jinja"},
            "actor_rollout_ref.model.custom_chat_template=",
        ),
        (
            {f"{MODEL}tokenizer_path": "a/b", f"{ENGINE}tokenizer": "a/c"},
            "actor_rollout_ref.model.tokenizer_path='a/b': expected 'a/c'",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="or one of the two keys alone") as caught:
        composed(**changes)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "some/model"),
        ({f"{MODEL}use_shm": True}, "some/model"),
        ({f"{MODEL}path": "hdfs://host/some/model"}, "hdfs://host/some/model"),
        ({f"{ENGINE}served_model_name": "short"}, "short"),
        ({f"{ENGINE}served_model_name": ["first", "second"]}, "first"),
        ({f"{ENGINE}served_model_name": None}, "some/model"),
        ({f"{ROLLOUT}prometheus__enable": True}, "model"),
        (
            {
                f"{ROLLOUT}prometheus__enable": True,
                f"{ROLLOUT}prometheus__served_model_name": "a/short",
            },
            "short",
        ),
        (
            {
                f"{ROLLOUT}prometheus__enable": True,
                f"{ROLLOUT}prometheus__served_model_name": None,
            },
            "some/model",
        ),
    ],
)
def test_the_proxy_knows_the_name_that_the_servers_are_given(
    changes: dict[str, Any], expected: str
) -> None:
    if changes.get(f"{ROLLOUT}prometheus__enable"):
        changes = {**changes, f"{ROLLOUT}disable_log_stats": False}
    config = composed(**changes)
    assert served_model_name(config) == expected
    # As verl starts a server, with its prometheus group laid over the engine's arguments.
    found = command_line(config).served_model_name
    found = found if isinstance(found, list) else [found]
    prometheus = config.actor_rollout_ref.rollout.prometheus
    if prometheus.enable and prometheus.served_model_name:
        found = [Path(prometheus.served_model_name).name]
    assert found[0] == expected


@pytest.mark.parametrize(("given", "expected"), [({}, "hf"), ({"tokenizer_mode": "mistral"}, None)])
def test_no_grammar_constrains_every_answer_of_a_mistral_model(
    given: dict[str, str], expected: str | None
) -> None:
    settings = documented(
        **{f"{ENGINE}{name}": value for name, value in given.items()},
        **{f"{ROLLOUT}multi_turn__format": "mistral"},
    )
    found = compose(settings, device="cuda")
    vllm = found.config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert vllm.tokenizer_mode == (expected or given["tokenizer_mode"])
    assert any("constrains every answer" in line for line in found.lines) == (not given)
    assert "tokenizer_mode" not in composed().actor_rollout_ref.rollout.engine_kwargs.vllm


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_model_len", 50, "replace actor_rollout_ref.rollout.max_model_len=None"),
        ("logprobs_mode", "raw_logits", "replace actor_rollout_ref.rollout.logprobs_mode="),
        ("tensor_parallel_size", 2, "actor_rollout_ref.rollout.tensor_model_parallel_size=1"),
        ("api_key", "secret", "agents' key is agentlightning.proxy.api_key"),
        ("max_num_seq", 4, "did you mean max_num_seqs?"),
        ("foo_bar", 1, "expected an argument of vllm serve"),
    ],
)
def test_engine_arguments_that_would_end_the_servers(name: str, value: Any, expected: str) -> None:
    settings = documented(
        **{f"{ENGINE_KWARGS}.{name}".replace(".", "__"): value}, actor_rollout_ref__model__path="m"
    )
    with pytest.raises(ValueError, match="expected") as caught:
        compose(settings, device="cuda")
    assert str(caught.value).startswith(f"{ENGINE_KWARGS}.{name}")
    assert expected in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 256),  # data.max_response_length
        ({"actor_rollout_ref__rollout__response_length": 100}, 100),
        ({f"{ENGINE}override_generation_config": {"max_new_tokens": 77}}, 77),
        ({f"{ENGINE}override_generation_config": '{"max_new_tokens": 78}'}, 78),
        ({f"{ENGINE}override_generation_config": {"top_p": 1.0}}, None),
    ],
)
def test_the_servers_cut_answers_whatever_a_request_says(
    changes: dict[str, Any], limit: int | None
) -> None:
    """vLLM's min(request, override): a longer max_tokens of an agent does not count."""
    from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

    config = compose(documented(**changes), device="cuda").config
    assert answer_limit(config) == limit
    assert get_max_tokens(9000, 5000, 10, {}, limit) == (limit or 5000)
