"""The user's hook on rollouts: documented examples, answers, errors, counts."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest

from agl_fast import Call, Rollout
from agl_fast.training.credit import CreditAssignment, NamedHook, load_hook
from support.daemon_runs import HELLO, daemon_bench
from support.paths import ROOT

ALGORITHM = ROOT / "docs" / "algorithm.md"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The documentation's examples as a module that can be imported."""
    module = ModuleType("documented_hooks")
    blocks = re.findall(r"```python\n(.*?)```", ALGORITHM.read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "algorithm.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "documented_hooks", module)
    return module


def rollout(*calls: Call, reward: float | None = 1.0) -> Rollout:
    return Rollout("r", "g", list(calls), reward, status="succeeded")


def test_documented_drop(examples):
    hook = load_hook("documented_hooks:drop_single_calls")
    two = rollout(Call([1], [2]), Call([3], [4]))
    assert hook(rollout(Call([1], [2]))) == []
    assert hook(two) == [two]


def test_documented_split(examples):
    hook = load_hook("documented_hooks:one_rollout_per_agent")
    plan, write, replan = Call([1], [2], agent="p"), Call([3], [4]), Call([5], [6], agent="p")
    planner, writer = hook(rollout(plan, write, replan))
    assert (planner.rollout_id, planner.data_id, planner.calls) == ("r/p", "g/p", [plan, replan])
    assert (writer.rollout_id, writer.data_id, writer.calls) == ("r/main", "g/main", [write])
    assert planner.reward == writer.reward == 1.0


def test_documented_rewards(examples):
    hook = load_hook("documented_hooks:reward_short_calls")
    cut = Call([1], [2] * 10, finish_reason="length")
    (found,) = hook(rollout(Call([1], [2, 3]), cut, reward=1.0))
    assert [(call.trainable, call.reward) for call in found.calls] == [
        (True, pytest.approx(0.98)),
        (False, None),
    ]
    (found,) = hook(rollout(Call([1], [2, 3]), reward=None))
    assert found.calls[0].reward is None


def call(**wrong) -> Call:
    return Call(**{"prompt_ids": [1], "response_ids": [2], **wrong})


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (7, TypeError, "must be a Rollout, a list of them, or None"),
        ([rollout(call()), "r"], TypeError, r"its answer\[1\].*must be a Rollout"),
        (Rollout(3, "g", [call()]), TypeError, "rollout_id must be a str, got 3"),
        (Rollout("r", None, [call()]), TypeError, "data_id must be a str, got None"),
        (Rollout("r", "g", None), TypeError, "calls must be a sequence of Call"),
        (Rollout("r", "g", [("a", "b")]), TypeError, r"calls\[0\] must be a Call"),
        (rollout(call(), reward="much"), TypeError, "reward must be a real number"),
        (rollout(call(), reward=float("inf")), ValueError, "rewards must be finite"),
        (rollout(call(), call(reward="much")), TypeError, "call 1: reward must be a real number"),
        (rollout(call(credit=None)), TypeError, "call 0: credit must be a float"),
        (rollout(call(trainable=None)), TypeError, "call 0.*trainable"),
        (rollout(call(prompt_ids="no")), TypeError, "call 0.*prompt_ids"),
        (rollout(call(response_ids=[1.5])), TypeError, "call 0.*response_ids"),
        (rollout(call(log_probs=[0.5, 0.5])), ValueError, "call 0.*log_probs"),
    ],
)
def test_wrong_answers_name_hook_rollout_and_field(answer, error, message):
    hook = NamedHook(lambda _: answer, "mine:hook")
    with pytest.raises(error, match=message) as raised:
        hook(Rollout("given", "g", []))
    assert "agentlightning.rollout_hook='mine:hook'" in str(raised.value)
    assert "rollout 'given'" in str(raised.value)


def test_an_error_inside_names_hook_and_rollout():
    def broken(_: Rollout) -> Rollout:
        raise KeyError("score")

    with pytest.raises(
        RuntimeError, match=r"'mine:broken' failed on rollout 'r': KeyError"
    ) as raised:
        NamedHook(broken, "mine:broken")(rollout())
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("os.path", ValueError, "expected module:function"),
        (":join", ValueError, "expected module:function"),
        ("no_such_package.hooks:drop", ValueError, "no_such_package.hooks cannot be imported"),
        ("os.path:no_such_function", ValueError, "os.path has no no_such_function"),
        ("os.path:sep", TypeError, "expected a function of a Rollout, got '/'"),
    ],
)
def test_hooks_that_are_not_there(path, error, message):
    with pytest.raises(error, match=message) as raised:
        load_hook(path)
    assert f"agentlightning.rollout_hook={path!r}" in str(raised.value)


def test_a_method_may_be_a_hook():
    assert load_hook("agl_fast.training.credit:NamedHook.__call__").name.endswith("__call__")


def assigned(function) -> CreditAssignment:
    return CreditAssignment(NamedHook(function, "mine:hook"))


def two_calls(run) -> float:
    run.ask(run.input["question"])
    run.ask("another")
    return float(run.input["question"] == "q0")


def test_a_step_with_rollouts_left_out_and_calls_taken_out():
    def some(rollout: Rollout) -> Rollout | None:
        rollout.calls = rollout.calls[1:]
        return rollout if rollout.reward else None

    with daemon_bench(credit=assigned(some)) as bench:
        rows, metrics = bench.train(two_calls, 2)
    assert len(rows) == 2
    assert metrics["training/n_rollouts"] == 2
    assert metrics["training/skipped_rollouts"] == 2
    assert metrics["training/skipped_rollouts/rollout_hook"] == 2
    assert metrics["training/skipped_rollouts/failed"] == 0
    # Two rollouts of two calls, and a call of each of the others.
    assert metrics["training/skipped_tokens/rollout_hook"] == 6 * len(HELLO)
    assert metrics["training/tokens/sampled"] == 2 * len(HELLO)


def pops(rollout: Rollout) -> Rollout:
    rollout.calls.pop(0)
    return rollout


def shortens(rollout: Rollout) -> Rollout:
    for call in rollout.calls:
        call.response_ids, call.log_probs = call.response_ids[:2], call.log_probs[:2]
    return rollout


@pytest.mark.parametrize(("hook", "kept"), [(pops, len(HELLO)), (shortens, 4)])
def test_a_hook_that_changes_calls_in_place(hook, kept):
    with daemon_bench(credit=assigned(hook), train_rollout_n=1) as bench:
        _, metrics = bench.train(two_calls, 1)
    assert metrics["training/tokens/sampled"] == kept
    assert metrics["training/skipped_tokens/rollout_hook"] == bench.fake.sampled - kept
    assert metrics["training/n_recorded_calls"] == 2


def test_a_step_with_split_rollouts():
    def split(rollout: Rollout) -> list[Rollout]:
        return [
            Rollout(f"{rollout.rollout_id}/{i}", rollout.data_id, [call], float(i))
            for i, call in enumerate(rollout.calls)
        ]

    with daemon_bench(credit=assigned(split), train_rollout_n=1) as bench:
        for _ in range(2):
            rows, metrics = bench.train(two_calls, 1)
            assert rows.batch["token_level_scores"].sum(dim=1).tolist() == [0.0, 1.0]
            assert [entry.reward for entry in bench.daemon.last_batch.rollouts] == [0.0, 1.0]
    assert metrics["training/n_groups"] == 1
    assert metrics["training/skipped_rollouts"] == 0


def test_a_hook_sees_the_sample_and_may_reward_by_it():
    def judged(rollout: Rollout) -> Rollout:
        rollout.reward = 3.0 if rollout.sample["question"] == "q1" else rollout.reward
        return rollout

    with daemon_bench(credit=assigned(judged), train_rollout_n=1) as bench:
        bench.train(two_calls, 2)
        assert [entry.reward for entry in bench.daemon.last_batch.rollouts] == [1.0, 3.0]


def test_an_id_twice_in_a_step():
    def same(rollout: Rollout) -> Rollout:
        return Rollout("one", rollout.data_id, rollout.calls, rollout.reward)

    with (
        daemon_bench(credit=assigned(same)) as bench,
        pytest.raises(ValueError, match=r"'mine:hook'.*rollout_id 'one', which another"),
    ):
        bench.train(two_calls, 1)


def test_a_wrong_answer_ends_the_wait_for_rollouts():
    with (
        daemon_bench(credit=assigned(lambda _: 3)) as bench,
        pytest.raises(TypeError, match="must be a Rollout"),
    ):
        bench.train(two_calls, 1)
