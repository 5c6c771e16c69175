"""What the daemon makes of training rollouts."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

import agl_fast
from support.daemon_runs import HELLO, AgentModeDaemon, agentlightning, daemon_bench, new_store
from support.fake_openai_server import Answer, prompt_ids_of
from support.running_proxy import say, wait_until


def two_calls(run) -> float:
    run.ask(run.input["question"])
    run.ask(run.input["question"], "hello", "and?")
    return float(run.input["question"] == "q0")


def one_call(run) -> float:
    run.ask(run.input["question"])
    return 1.0


def test_rows_of_a_step():
    with daemon_bench() as bench:
        rows, metrics = bench.train(two_calls, 2)
        batch = bench.daemon.last_batch
    assert len(rows) == 4
    assert rows.batch["prompts"][0].tolist() == prompt_ids_of(say("q0"))
    response = HELLO + prompt_ids_of(say("and?")) + HELLO
    assert rows.batch["responses"][0].tolist() == response
    assert rows.batch["response_mask"].sum() == 4 * 2 * len(HELLO)
    assert rows.batch["token_level_scores"].sum(dim=1).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert rows.batch["is_drop_mask"].dtype == torch.bool
    first, second, third, fourth = rows.non_tensor_batch["data_id_list"]
    assert first == second != third == fourth
    assert rows.non_tensor_batch["rollout_id_list"].tolist() == [
        entry.rollout_id for entry in batch.rollouts
    ]
    assert {entry.status for entry in batch.rollouts} == {"succeeded"}
    assert metrics["training/reward"] == 0.5
    assert metrics["training/n_rollouts"] == metrics["training/n_rollouts_w_reward"] == 4
    assert metrics["training/proxy/recorded"] == 8
    assert metrics["training/failed_rollouts"] == metrics["training/skipped_rollouts"] == 0
    assert metrics["training/rollout_seconds/run_mean"] >= 0
    assert metrics["training/rollout_seconds/run_max"] <= metrics["training/rollout_seconds/wall"]


class Onlooker(AgentModeDaemon):
    """Keeps what it is shown."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.seen = []

    def rollout_finished(self, outcome) -> None:
        self.seen.append((outcome.sample["question"], outcome.status, outcome.reward))


def second_fails(run) -> float:
    if run.input["question"] == "q1":
        raise RuntimeError("the agent crashed")
    return one_call(run)


def test_a_subclass_sees_every_finished_rollout_and_rows_stay_as_they_are():
    with daemon_bench(daemon_cls=Onlooker, train_rollout_n=1) as bench:
        rows, _ = bench.train(second_fails, 3)
        expected = [("q0", "succeeded", 1.0), ("q1", "failed", None), ("q2", "succeeded", 1.0)]
        assert bench.daemon.seen == expected
        assert len(rows) == 2
        bench.run(second_fails, 3, is_train=False)
        assert bench.daemon.seen == 2 * expected


class Complaining(AgentModeDaemon):
    def rollout_finished(self, outcome) -> None:
        raise KeyError("my own mistake")


def test_what_rollout_finished_raises_ends_the_wait():
    with (
        daemon_bench(daemon_cls=Complaining) as bench,
        pytest.raises(KeyError, match="my own mistake"),
    ):
        bench.run(one_call)


def test_rows_are_those_of_the_reference():
    with daemon_bench(trace_aggregator={"level": "trajectory", "trim": False}) as bench:
        taken = {}
        take = bench.daemon.llm_proxy.recorder.take

        def remember(rollout_id, attempt_id):
            taken[rollout_id] = take(rollout_id, attempt_id)
            return taken[rollout_id]

        bench.daemon.llm_proxy.recorder.take = remember
        rows, _ = bench.train(two_calls, 3)
        entries = bench.daemon.last_batch.rollouts
    reference = agl_fast.reference.build_batch(
        [
            agl_fast.Rollout(
                entry.rollout_id,
                entry.data_id,
                [recorded.call for recorded in taken[entry.rollout_id]],
                entry.reward,
            )
            for entry in entries
        ],
        level="trajectory",
        max_prompt_length=64,
        max_response_length=64,
        pad_token_id=0,
    )
    for name, tensor in reference.tensors.items():
        assert torch.equal(rows.batch[name], torch.as_tensor(tensor)), name


def test_every_step_has_new_ids_and_only_its_own_calls():
    with daemon_bench() as bench:
        first, _ = bench.train(one_call, 1)
        second, metrics = bench.train(two_calls, 1)
        again, _ = bench.rows()
    for column in ("data_id_list", "rollout_id_list"):
        assert not set(first.non_tensor_batch[column]) & set(second.non_tensor_batch[column])
    assert metrics["training/proxy/recorded"] == 4
    assert torch.equal(second.batch["responses"], again.batch["responses"])


def test_rows_stand_in_the_order_of_the_samples():
    released = threading.Event()

    def first_is_last(run) -> float:
        if run.input["question"] == "q0":
            assert released.wait(10)
        run.ask(run.input["question"])
        if run.input["question"] == "q3":
            released.set()
        return float(run.input["question"][1])

    with daemon_bench(train_rollout_n=1) as bench:
        rows, _ = bench.train(first_is_last, 4)
    assert rows.batch["token_level_scores"].sum(dim=1).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_transition_level_and_what_trajectory_would_forward(messages):
    with daemon_bench(trace_aggregator={}, train_rollout_n=1) as bench:
        rows, metrics = bench.train(two_calls, 1)
        bench.train(two_calls, 1)
    assert rows.non_tensor_batch["turn_index_list"].tolist() == [0, 1]
    assert rows.non_tensor_batch["data_id_list"].dtype == object
    assert "training/n_unmerged_rollouts" not in metrics
    lines = [line for line in messages() if "trajectory" in line]
    first, second = len(prompt_ids_of(say("q0"))), len(prompt_ids_of(say("q0", "hello", "and?")))
    answer = len(HELLO)
    assert lines == [
        f"level transition forwards {first + second + 2 * answer} tokens in 2 rows in "
        f"this first step; level trajectory would have forwarded {second + answer} in 1 "
        f"({1 - (second + answer) / (first + second + 2 * answer):.0%} less), from the same calls"
    ]


class Spelling:
    """Ids are characters; 1000 is a whole "hello"."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join("hello" if i == 1000 else chr(i) for i in ids)


@pytest.mark.parametrize(("debug", "kind"), [(True, "retokenised"), (False, "history_rewritten")])
def test_mismatches_are_counted_and_written_down(debug, kind, tmp_path):
    def respond(request):
        spelled = prompt_ids_of(request.body["messages"])
        text = Spelling().decode(spelled)
        if "hello" in text:
            before, after = text.split("hello")
            spelled = [*map(ord, before), 1000, *map(ord, after)]
        return Answer(text="hello", token_ids=HELLO, prompt_token_ids=spelled)

    folder = tmp_path / "cases"
    aggregator = {"level": "trajectory", "debug": debug, "mismatch_log_dir": str(folder)}
    with daemon_bench(
        train_rollout_n=1, trace_aggregator=aggregator, tokenizer=Spelling()
    ) as bench:
        bench.fake.respond = respond
        rows, metrics = bench.train(two_calls, 1)
    assert len(rows) == 2
    assert metrics[f"training/mismatches/{kind}"] == 1
    assert metrics["training/n_unmerged_rollouts"] == 1
    if not debug:
        assert not folder.exists()
        return
    rollout_id = rows.non_tensor_batch["rollout_id_list"][0]
    (path,) = folder.iterdir()
    assert path.name == "retoken_mismatch.log"
    prompt_ids = prompt_ids_of(say("q0"))
    head, before, expected, expected_ids, found, found_ids, end = path.read_text().split("\n")[:7]
    # The letter of the assistant's role is the same.
    assert head.startswith(
        f"----- step 1, rollout {rollout_id}, call 1: "
        f"retokenised at token {len(prompt_ids) + 1} of "
    )
    assert head.endswith("after call 0")
    assert before.startswith('before   "')
    assert before.endswith('q0\\na"')
    assert expected == 'expected "hello\\n"'
    assert expected_ids.strip() == str(HELLO[1:])
    assert found.startswith('found    "hello\\n')
    assert found_ids.strip().startswith("[1000, 10, ")
    assert end == ""


def test_limits_may_change_from_step_to_step():
    with daemon_bench(train_rollout_n=1) as bench:
        bench.train(two_calls, 1)
        bench.run(two_calls, 1)
        rows, metrics = bench.daemon.get_train_data_batch(2, 9, "cpu", 2)
    assert rows.batch["prompts"].shape == (1, 2)
    assert rows.batch["responses"].shape == (1, 9)
    assert metrics["training/tokens/truncated"] == len(HELLO)


def test_rewards_belong_to_the_last_call_before_them():
    def emits(run) -> None:
        run.emit(9.0)
        run.ask("a")
        run.emit(0.1)
        run.emit(0.25)
        run.ask("b")
        run.ask("c")
        run.emit(0.5)
        run.emit(float("nan"))  # no reward
        with pytest.raises(ValueError, match="must be finite"):
            agentlightning.emit_reward(float("nan"), propagate=False)

    seen = []

    with daemon_bench(train_rollout_n=1) as bench:
        add = bench.daemon._rows.add
        bench.daemon._rows.add = lambda outcome: (seen.append(outcome), add(outcome))
        _, metrics = bench.train(emits, 1)
    assert [call.reward for call in seen[0].calls] == [0.25, None, 0.5]
    assert metrics["training/reward"] == 0.5


def test_rewards_without_calls_and_calls_without_rewards():
    def either(run) -> float | None:
        if run.input["question"] == "q0":
            run.emit(0.75)
            run.ask("a")
        else:
            run.ask("b")
        return None

    with daemon_bench(train_rollout_n=1, reward_fillna_value=-1.0) as bench:
        rows, metrics = bench.train(either, 2)
    assert rows.batch["token_level_scores"].sum(dim=1).tolist() == [0.75, -1.0]
    assert metrics["training/n_rollouts_w_reward"] == 1


def test_infinite_reward_names_the_rollout():
    """Of a program without agl_fast, whose `emit_reward` refuses no number."""

    def too_good(run) -> None:
        run.ask("a")
        run.emit(float("inf"))

    with daemon_bench(train_rollout_n=1) as bench, pytest.raises(ValueError, match="rollout 'ro-"):
        bench.train(too_good, 1)


def test_training_enforces_its_sampling_and_stamps_the_version():
    versions = []

    def asks_for_zero(run) -> float:
        run.ask("a", temperature=0.0)
        return 1.0

    information = {"model": "policy", "temperature": 0.9, "top_p": 0.8, "top_k": 5}
    with daemon_bench(train_rollout_n=1, train_information=information, max_tokens=7) as bench:
        bench.daemon.policy_version = 4
        add = bench.daemon._rows.add
        bench.daemon._rows.add = lambda outcome: (
            versions.extend(call.policy_version for call in outcome.calls),
            add(outcome),
        )
        _, metrics = bench.train(asks_for_zero, 1)
        bench.run(asks_for_zero, 1, is_train=False)
        train, val = bench.fake.bodies()
    assert (train["temperature"], train["top_p"], train["top_k"]) == (0.9, 0.8, 5)
    assert train["max_tokens"] == 7
    assert metrics["training/proxy/sampling_overridden.temperature"] == 1
    assert versions == [4]
    assert val["temperature"] == 0.0


def test_sampling_may_be_left_to_agents():
    def asks_for_zero(run) -> float:
        run.ask("a", temperature=0.0)
        return 1.0

    with daemon_bench(train_rollout_n=1, sampling="allow") as bench:
        bench.train(asks_for_zero, 1)
        assert bench.fake.bodies()[0]["temperature"] == 0.0


def test_judge_on_the_same_endpoint_is_not_trained():
    def judged(run) -> float:
        run.ask("a")
        run.ask("judge this", headers={"X-AGL-Train": "0"})
        return 1.0

    with daemon_bench(train_rollout_n=1) as bench:
        rows, metrics = bench.train(judged, 1)
    assert len(rows) == 1
    assert metrics["training/tokens/dropped/excluded"] == len(HELLO)


def test_only_the_latest_attempt_counts():
    store = new_store()

    def retried(run) -> float:
        run.ask("old")
        run.emit(0.1)
        attempted = asyncio.run(store.start_attempt(run.rollout.rollout_id))
        run.attempt_id = attempted.attempt.attempt_id
        run.ask("new")
        return 0.5

    with daemon_bench(store=store, train_rollout_n=1) as bench:
        rows, metrics = bench.train(retried, 1)
        assert bench.daemon.llm_proxy.recorder._calls == {}
    assert rows.batch["prompts"].tolist() == [prompt_ids_of(say("new"))]
    assert metrics["training/discarded_attempts"] == 1
    assert metrics["training/reward"] == 0.5


def test_samples_of_numpy_columns():
    inputs = []

    def remembers(run) -> float:
        inputs.append(run.input)
        run.ask("a")
        return 1.0

    with daemon_bench(train_rollout_n=1) as bench:
        extra = np.array([{"ids": np.arange(2), "score": np.float32(0.5)}], dtype=object)
        bench.run(remembers, 1, extra=extra)
    assert inputs[0]["extra"] == {"ids": [0, 1], "score": 0.5}
    assert type(inputs[0]["extra"]["score"]) is float


def test_subclass_that_overrides_methods():
    class Doubled(AgentModeDaemon):
        def set_up_data_and_server(self, data, server_addresses, is_train=True):
            data = {name: [*column, *column] for name, column in data.items()}
            return super().set_up_data_and_server(data, server_addresses, is_train)

        def get_train_data_batch(self, *args, **kwargs):
            batch, metrics = super().get_train_data_batch(*args, **kwargs)
            return batch, {**metrics, "training/mine": 1}

    with daemon_bench(daemon_cls=Doubled, train_rollout_n=1) as bench:
        rows, metrics = bench.train(one_call, 1)
    assert (len(rows), metrics["training/mine"]) == (2, 1)


@pytest.mark.parametrize("threaded", [False, True])
def test_many_rollouts_at_once(threaded):
    store = new_store()
    if threaded:  # as agl's shared-memory strategy has it: a lock held while the store answers
        store = agentlightning.LightningStoreThreaded(agentlightning.InMemoryLightningStore())
    with daemon_bench(store=store, train_rollout_n=8) as bench:
        rows, metrics = bench.train(two_calls, 8, runners=16)
    assert len(rows) == 64
    assert metrics["training/proxy/recorded"] == 128


def test_nothing_runs_after_stop():
    before = set(threading.enumerate())
    with daemon_bench() as bench:
        bench.train(one_call, 1)
        assert bench.daemon.llm_proxy.is_running()
    assert not bench.daemon.llm_proxy.is_running()
    names = ("agl_fast-daemon", "agl-fast-proxy")
    wait_until(lambda: not {each.name for each in {*threading.enumerate()} - before} & {*names})
    bench.daemon.stop()
