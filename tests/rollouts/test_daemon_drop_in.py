"""The daemon has the signatures and the metric names of Agent-lightning 0.3's."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("agentlightning", reason="needs the extra [cpu] or [verl]")

from support.daemon_runs import AgentModeDaemon, agentlightning, daemon_bench

# Its module imports a verl that is not installed: it is read.
THEIRS = (Path(agentlightning.__file__).parent / "verl" / "daemon.py").read_text()
# ppo_step's and the trainer's, which test_verl_end_to_end looks for.
OF_THE_STEP = {"n_triplets_prompt_too_long", "n_triplets_dropped_remainder"}


def their_methods() -> dict[str, ast.arguments]:
    (daemon,) = (
        node
        for node in ast.parse(THEIRS).body
        if isinstance(node, ast.ClassDef) and node.name == "AgentModeDaemon"
    )
    return {
        node.name: node.args
        for node in daemon.body
        if isinstance(node, ast.FunctionDef)
        and (node.name == "__init__" or not node.name.startswith("_"))
    }


@pytest.mark.parametrize("name", sorted(their_methods()))
def test_methods_take_what_theirs_take(name):
    theirs = their_methods()[name]
    ours = list(inspect.signature(getattr(AgentModeDaemon, name)).parameters.values())
    names = [argument.arg for argument in theirs.args]
    assert [parameter.name for parameter in ours][: len(names)] == names
    # What they may leave out, a caller of ours may leave out, too.
    n_required = len(names) - len(theirs.defaults)
    for parameter in ours[n_required:]:
        assert parameter.default is not inspect.Parameter.empty, parameter.name
    assert not theirs.kwonlyargs


def call_and_extend(run) -> float:
    run.ask("a")
    run.ask("a", "hello", "b")
    return 1.0


def test_metrics_have_their_names():
    with daemon_bench() as bench:
        _, training = bench.train(call_and_extend, 1)
        bench.run(call_and_extend, 1, is_train=False, data_source=["maths"])
        validation = bench.daemon.get_test_metrics()
    theirs = set(re.findall(r'"(?:training|val)/[^"]+"', THEIRS))
    assert len(theirs) > 20
    ours = {f'"{name}"' for name in training | validation}
    ours |= {f'"training/{name}"' for name in OF_THE_STEP}
    ours |= {name.replace("val/maths/", "val/{data_source}/") for name in ours}
    assert theirs - ours == set()
