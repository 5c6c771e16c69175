"""What agents emit and call arrives in the store, with Agent-lightning's own runners and tracer."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.paths import SUPPORT

pytest.importorskip("agentlightning", reason="needs the extra [cpu]")

import agl_fast

SCRIPT = SUPPORT.joinpath("runner_spans.py")
INSTALL = Path(agl_fast.__file__).with_name("install")
# With these the spans arrive; the other packages of OpenTelemetry follow from them.
TRACING = (
    "agentops",
    "openai",
    "opentelemetry-exporter-otlp",
    "opentelemetry-instrumentation",
    "opentelemetry-sdk",
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """By task: rewards, attributes of the calls' spans, and the triplets of the agent `writer`."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    return json.loads(line)


def test_emitted_rewards_of_a_runner_process_arrive(found):
    assert [found[task]["rewards"] for task in ("2.0", "4.0", "sync")] == [[1, 2], [2, 4], [1]]


@pytest.mark.parametrize("way", ["sync", "sync stream", "async", "async stream"])
def test_a_call_of_openai_is_a_span_with_its_answer(found, way):
    (span,) = found[way]["calls"]
    assert span["gen_ai.response.id"].startswith("chatcmpl-")
    assert span["gen_ai.prompt.0.content"] == way
    assert span["gen_ai.completion.0.content"] == "hello"
    # AgentOps keeps no ids of a stream. VERL has those of its proxy, and asks for response ids.
    ids = [span.get(f"{name}_token_ids") for name in ("prompt", "response")]
    assert ids == ([None, None] if "stream" in way else [[1, 2, 3], [7, 8]])


def test_agent_match_finds_the_calls_of_a_named_agent(found):
    assert found["writer"]["triplets"] == [[[1, 2, 3], [7, 8]]]
    assert found["checker"]["triplets"] == []
    assert len(found["checker"]["calls"]) == 1


def test_attributes_that_a_span_does_not_take_are_left_out():
    from support.daemon_runs import agentlightning, patch_agentlightning

    patch_agentlightning()
    taken = {"text": "a", "ids": [1, 2], "numbers": [1, 0.5], "flags": [True], "none": []}
    refused = {"nothing": None, "bytes": b"a", "mapping": {"a": 1}, "mixed": [1, "a"], "in": [[1]]}
    assert agentlightning.Span.from_attributes(attributes=taken | refused).attributes == taken


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_the_installed_set_is_held(target):
    held = (INSTALL / f"overrides-{target}.txt").read_text()
    pins = dict(re.findall(r"^([a-z-]+)==([\w.]+)$", held, re.MULTILINE))
    assert {name: pins.get(name) for name in TRACING} == {
        name: importlib.metadata.version(name) for name in TRACING
    }
