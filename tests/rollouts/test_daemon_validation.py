"""Validation metrics, adapters, what the constructor refuses."""

from __future__ import annotations

import types

import pytest

from support.daemon_runs import (
    HELLO,
    LlmProxyTraceToTriplet,
    SpanCoreFields,
    TracerTraceToTriplet,
    TraceStatus,
    Triplet,
    ValidatedRollout,
    agentlightning,
    daemon_bench,
    new_daemon,
    new_store,
    validation_metrics,
)

N = len(HELLO)


def by_question(run) -> float | None:
    """q0: two calls, 1.0; q1: one call, 0.5; q2: no call, no reward; q3: fails."""
    number = int(run.input["question"][1])
    if number == 3:
        raise RuntimeError("the agent crashed")
    for _ in range(2 - number):
        run.ask("a", "hello", str(number))
    return [1.0, 0.5, None][number]


def test_metrics_of_a_validation():
    with daemon_bench(reward_fillna_value=0.1) as bench:
        bench.run(by_question, 4, is_train=False, data_source=["x", "x", "y", None])
        metrics = bench.daemon.get_test_metrics()
    assert metrics == {
        "val/n_rollouts": 4,
        "val/n_rollouts_w_trace": 2,
        "val/n_rollouts_w_reward": 2,
        "val/n_rollouts_failed": 1,
        "val/reward": pytest.approx((1.0 + 0.5 + 0.1 + 0.1) / 4),
        "val/mean_response_length": N,
        "val/sum_response_length": 1.5 * N,
        "val/turn_count": 1.5,
        "val/x/n_rollouts": 2,
        "val/x/n_rollouts_w_trace": 2,
        "val/x/n_rollouts_w_reward": 2,
        "val/x/n_rollouts_failed": 0,
        "val/x/reward": 0.75,
        "val/x/mean_response_length": N,
        "val/x/sum_response_length": 1.5 * N,
        "val/x/turn_count": 1.5,
        "val/y/n_rollouts": 1,
        "val/y/n_rollouts_w_trace": 0,
        "val/y/n_rollouts_w_reward": 0,
        "val/y/n_rollouts_failed": 0,
        "val/y/reward": pytest.approx(0.1),
    }


def test_batches_of_different_size_are_averaged_by_rollouts():
    validated = []
    with daemon_bench() as bench:
        for n_samples in (1, 3):
            bench.run(by_question, n_samples, is_train=False)
            bench.daemon.get_test_metrics()
            validated += bench.daemon.validated_rollouts
            bench.daemon.clear_data_and_server()
    metrics = validation_metrics(validated)
    assert metrics["val/n_rollouts"] == 4
    assert metrics["val/reward"] == (1.0 + 1.0 + 0.5 + 0.0) / 4
    with pytest.raises(ValueError, match="no validation rollouts"):
        validation_metrics([])


def test_validation_samples_as_told_and_once():
    settings = {"validation_sampling": {"temperature": 0.25}, "train_rollout_n": 8}
    with daemon_bench(**settings) as bench:
        bench.run(by_question, 1, is_train=False)
        assert {body["temperature"] for body in bench.fake.bodies()} == {0.25}
        assert len(bench.fake.requests) == 2


def test_metrics_are_of_the_phase():
    with daemon_bench() as bench:
        with pytest.raises(RuntimeError, match="no data"):
            bench.rows()
        bench.enqueue(1)
        with pytest.raises(RuntimeError, match="2 rollouts are running"):
            bench.rows()
        with pytest.raises(RuntimeError, match="of a training"):
            bench.daemon.get_test_metrics()
        bench.run(by_question, 1, is_train=False)
        with pytest.raises(RuntimeError, match="of a validation"):
            bench.rows()


def test_no_data_source_no_metrics_of_it():
    rollouts = [ValidatedRollout(None, 1.0, True, (3, 5), False)]
    metrics = validation_metrics(rollouts)
    assert (metrics["val/mean_response_length"], metrics["val/sum_response_length"]) == (4.0, 8.0)
    assert {name.count("/") for name in metrics} == {1}


def span(run, name: str, response_id: str | None = None) -> None:
    attributes = {"gen_ai.response.id": response_id} if response_id else {}
    status = TraceStatus(status_code="OK")
    run.add_span(
        SpanCoreFields(
            name=name, attributes=attributes, start_time=1.0, end_time=2.0, status=status
        )
    )


def two_agents(run) -> float:
    for agent in ("writer", "critic"):
        answer = run.ask(agent)
        span(run, f"{agent}.call", answer["id"])
    return 1.0


class OfWriter(agentlightning.TraceToTripletBase):
    """Triplets of the spans whose name has the word."""

    word = "writer"

    def adapt(self, source, /):
        return [
            Triplet(
                prompt={},
                response={},
                metadata={"response_id": each.attributes["gen_ai.response.id"]},
            )
            for each in source
            if self.word in each.name
        ]


class OfNobody(OfWriter):
    word = "nobody"


def test_adapter_chooses_the_calls():
    with daemon_bench(adapter=OfWriter(), train_rollout_n=1) as bench:
        rows, metrics = bench.train(two_agents, 1)
        bench.run(two_agents, 1, is_train=False)
        assert bench.daemon.get_test_metrics()["val/turn_count"] == 1
    assert len(rows) == 1
    assert metrics["training/tokens/dropped/excluded"] == N


def test_adapter_that_matches_nothing_names_the_rollout():
    with (
        daemon_bench(adapter=OfNobody(), train_rollout_n=1) as bench,
        pytest.raises(ValueError, match=r"rollout 'ro-\w+': OfNobody matches none of its 2 calls"),
    ):
        bench.train(two_agents, 1)


def test_rollout_without_spans_matches_nothing():
    def asks(run) -> None:
        run.ask("a")

    adapter = TracerTraceToTriplet(agent_match="writer")
    with (
        daemon_bench(adapter=adapter, train_rollout_n=1) as bench,
        pytest.raises(ValueError, match="TracerTraceToTriplet matches none of its 1 calls"),
    ):
        bench.train(asks, 1)


@pytest.mark.parametrize("adapter", [TracerTraceToTriplet(), LlmProxyTraceToTriplet()])
def test_adapters_that_mean_every_call(adapter):
    with daemon_bench(adapter=adapter, train_rollout_n=1) as bench:
        rows, _ = bench.train(two_agents, 1)
    assert len(rows) == 2


class QwenProcessor:
    image_processor = type("Qwen2VLImageProcessorFast", (), {})()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "v0"}, "mode='v0' has no store"),
        ({"store": None}, "needs a LightningStore"),
        ({"runner_silent_seconds": 0}, "runner_silent_seconds must be more than 0"),
        ({"train_rollout_n": 0}, "train_rollout_n"),
        ({"train_information": {"temperature": 1.0}}, "names no model"),
        ({"failed_rollouts": "drop"}, "failed_rollouts must be one of skip, zero; got 'drop'"),
        ({"sampling": "force"}, "sampling must be one of enforce, allow"),
        ({"llm_timeout_seconds": 0}, "llm_timeout_seconds must be more than 0"),
        ({"rollout_deadline_seconds": -1}, "rollout_deadline_seconds"),
        ({"processor": QwenProcessor()}, "M-RoPE"),
        ({"trace_aggregator": {"level": "turn"}}, "level must be one of"),
        ({"trace_aggregator": {"overlong_prompt": "cut"}}, "overlong_prompt must be one of"),
        ({"reward_fillna_value": float("nan")}, "reward_fillna_value"),
        ({"proxy_settings": {"host": "0.0.0.0"}}, "api_key"),
    ],
)
def test_wrong_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        new_daemon(**{"store": new_store(), **changes})


def test_adapter_of_another_kind():
    with pytest.raises(TypeError, match="expected a TraceToTripletBase"):
        new_daemon(new_store(), adapter=types.SimpleNamespace())


def test_wrong_data():
    daemon = new_daemon(new_store())
    for data, addresses, message in (
        ({}, ["127.0.0.1:1"], "no samples"),
        ({"a": []}, ["127.0.0.1:1"], "no samples"),
        ({"a": [1], "b": [1, 2]}, ["127.0.0.1:1"], "differ in length"),
        ({"a": [1]}, [], "server_addresses is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            daemon.set_up_data_and_server(data, addresses)
    daemon.run_until_all_finished()
    daemon.stop()
