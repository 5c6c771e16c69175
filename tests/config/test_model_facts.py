"""One table of models: what level tree refuses, `analyze` advises against, and nothing crashes."""

from __future__ import annotations

import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra [cpu] or [verl]")

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import agl_fast
from agl_fast.__main__ import main
from agl_fast.model_facts import NO_ATTENTION_FUNCTION, NO_LOGITS_TO_KEEP, tree_refusals
from agl_fast.recording import RecordingWriter
from agl_fast.tools.analyze import ModelConfigError, read_model_shape, read_traces
from support.token_traces import DATA

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# Their default configurations are none: they want those of their parts.
WITHOUT_DEFAULTS = {"musicgen", "musicgen_melody"}


@cache
def configured(family: str) -> Any:
    return AutoConfig.for_model(family)


def class_of(family: str) -> type:
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(configured(family))]
    return found[0] if isinstance(found, tuple) else found


def test_the_tables_are_those_of_the_installed_transformers():
    """A family that a new version adds, or changes, fails here."""
    own_attention, no_logits_to_keep = set(), set()
    for family in set(FAMILIES) - WITHOUT_DEFAULTS:
        made = class_of(family)
        if not getattr(made, "_supports_attention_backend", False):
            own_attention.add(family)
        if "logits_to_keep" not in inspect.signature(made.forward).parameters:
            no_logits_to_keep.add(family)
    assert own_attention == NO_ATTENTION_FUNCTION
    assert no_logits_to_keep == NO_LOGITS_TO_KEEP


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DATA / "swe_think.jsonl.gz"


@pytest.mark.parametrize("family", FAMILIES)
def test_analyze_and_the_engine_agree(family, tmp_path):
    """Either the costs are unknown, which is one error, or both say the same of level tree."""
    if family in WITHOUT_DEFAULTS:
        values = {"model_type": family}
        refusals = ["unknown"]
    else:
        values = configured(family).to_dict()
        refusals = tree_refusals(configured(family))
    (tmp_path / "config.json").write_text(json.dumps(values, default=str))
    try:
        found = list(read_model_shape(tmp_path).tree_refusals)
    except ModelConfigError:
        return
    assert found == refusals


@pytest.mark.parametrize("family", ["cohere", "seed_oss", "nanochat", "llama"])
def test_advice_is_never_what_is_refused(family, recording, tmp_path, capsys):
    """Traces that trees would hold in a sixth of the tokens."""
    configured(family).save_pretrained(tmp_path)
    assert main(["analyze", str(recording), "--model", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    if family == "llama":
        assert found["best_level"] == "tree"
        assert found["advice"].startswith("Train at level tree")
        return
    assert found["best_level"] != "tree"
    assert "Train at level tree" not in found["advice"]
    assert "Level tree does not support this model: it has" in found["advice"]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("zamba2", "recurrent layers"),
        ("bamba", "recurrent layers"),
        ("gemma3_text", "layers of the kind 'sliding_attention'"),
        ("gemma3", "layers of the kind 'sliding_attention'"),
        ("deepseek_v3", "latent attention"),
    ],
)
def test_unknown_costs_are_one_line(family, reason, recording, tmp_path, capsys):
    configured(family).save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["analyze", str(recording), "--model", str(tmp_path)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("agl_fast analyze: ")
    assert reason in line


def test_the_recorded_runs_model_is_asked_where_none_is_named(tmp_path):
    configured("cohere").save_pretrained(tmp_path / "model")
    settings = {"actor_rollout_ref": {"model": {"path": str(tmp_path / "model")}}}
    for name, about in (("known", {"settings": settings}), ("unknown", {})):
        with RecordingWriter(tmp_path / name, about) as writer:
            writer.write(agl_fast.Rollout("r", "g", [agl_fast.Call([1], [2])], 1.0))
    (reason,) = read_traces([tmp_path / "known"]).tree_refusals
    assert "logit_scale" in reason
    assert read_traces([tmp_path / "unknown"]).tree_refusals == ()
