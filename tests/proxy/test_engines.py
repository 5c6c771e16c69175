"""An engine is one module: the proxy finds it by name and asks it alone."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest

from agl_fast.proxy.engines import Engine, engine_named, vllm
from support.paths import ROOT
from support.running_proxy import running_proxy

PROXY = ROOT / "python" / "agl_fast" / "proxy"


def test_engines_are_found_by_name():
    assert engine_named("vllm") is vllm
    assert vllm.NAME == "vLLM"
    with pytest.raises(ValueError, match="no engine 'sglang2'"):
        engine_named("sglang2")


def test_an_engine_has_every_name_of_the_protocol():
    names = {name for name in vars(Engine) if not name.startswith("_")}
    assert len(names) > 20
    assert {name for name in names if not hasattr(vllm, name)} == set()


def test_outside_its_module_nothing_is_said_of_an_engine():
    sources = [path for path in PROXY.glob("*.py") if path.parent == PROXY]
    said = [
        line.strip()
        for path in sources
        for line in path.read_text().splitlines()
        if re.search("vllm|sglang", line, re.IGNORECASE)
    ]
    assert said == ["there, after ``hosted_vllm/``) and ``api_key``."], "litellm's name"


def test_another_engine_is_one_more_module(fake, monkeypatch):
    """It reads answers, asks for ids and checks health in its own way."""
    other = ModuleType("agl_fast.proxy.engines.other")
    vars(other).update({name: each for name, each in vars(vllm).items() if name[0] != "_"})
    other.NAME = "Other"
    other.for_recording = lambda body, endpoint: (
        {**vllm.for_recording(body, endpoint)[0], "give_ids": True},
        [],
    )
    other.HEADERS_OF_ONE_ANSWER = frozenset({"x-own-id"})
    monkeypatch.setitem(sys.modules, other.__name__, other)
    with running_proxy(fake, engine="other") as proxy:
        proxy.train()
        headers = {"X-Own-Id": "1", "X-Request-Id": "2"}
        assert proxy.post(headers=headers).status_code == 200
        assert len(proxy.take()) == 1
    (request,) = fake.requests
    assert request.body["give_ids"] is True
    sent = {name.lower() for name in request.headers}
    assert "x-own-id" not in sent
    assert "x-request-id" in sent
