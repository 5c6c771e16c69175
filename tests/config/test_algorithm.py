"""`VERL` checks, says what it changed, and hands everything to the run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")
pytest.importorskip("agentlightning", reason="needs the extra [cpu] or [verl]")

import agl_fast
from support.verl_settings import documented

pytestmark = pytest.mark.filterwarnings("ignore")  # of Agent-lightning and what it imports


def samples(n: int) -> list[dict[str, int]]:
    return [{"question": i} for i in range(n)]


class Adapter:
    pass


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords of every run that an algorithm started."""
    started: list[dict[str, Any]] = []
    entrypoint = SimpleNamespace(run=lambda **keywords: started.append(keywords))
    monkeypatch.setitem(sys.modules, "agl_fast.verl.entrypoint", entrypoint)
    return started


@pytest.fixture
def adapter() -> Adapter:
    return Adapter()


def make_algorithm(
    adapter: Adapter, settings: dict[str, Any] | None = None, **keywords: Any
) -> Any:
    algorithm = agl_fast.VERL(settings or documented(), **keywords)
    algorithm.set_store("the store")
    algorithm.set_adapter(adapter)
    return algorithm


def test_run_gets_what_agent_lightning_has_set(runs: list[Any], adapter: Adapter) -> None:
    import agentlightning

    algorithm = make_algorithm(adapter, trainer_cls=int, daemon_cls=str)
    assert isinstance(algorithm, agentlightning.Algorithm)
    assert algorithm.is_async() is False
    algorithm.run(samples(16), samples(2))
    (run,) = runs
    assert run["config"] == algorithm.config
    assert (run["train_dataset"], run["val_dataset"]) == (samples(16), samples(2))
    assert (run["store"], run["llm_proxy"], run["adapter"]) == ("the store", None, adapter)
    assert (run["trainer_cls"], run["daemon_cls"]) == (int, str)


def test_what_the_model_decides_is_decided_when_the_run_starts(
    runs: list[Any],
    adapter: Adapter,
    monkeypatch: pytest.MonkeyPatch,
    messages: Callable[[], list[str]],
) -> None:
    """It may not be on this machine before."""
    decided: list[Any] = []

    def decide(config: Any, user_keys: Any) -> list[str]:
        decided.append(user_keys)
        config.trainer.experiment_name = "decided"
        return ["decided with the model"]

    monkeypatch.setattr("agl_fast.algorithm.decide_with_model", decide)
    algorithm = make_algorithm(adapter)
    assert decided == []
    algorithm.run(samples(16), samples(2))
    (run,) = runs
    assert run["config"].trainer.experiment_name == "decided"
    assert algorithm.config.trainer.experiment_name == "an experiment"
    assert "decided with the model" in messages()
    assert "data.train_batch_size" in decided[0]


def test_fewer_samples_than_a_batch(runs: list[Any], adapter: Adapter) -> None:
    message = r"train_dataset has 15 samples: expected at least data\.train_batch_size=16"
    with pytest.raises(ValueError, match=message):
        make_algorithm(adapter).run(samples(15), samples(2))
    with pytest.raises(ValueError, match="train_dataset is None"):
        make_algorithm(adapter).run(None, samples(2))
    assert runs == []


@pytest.mark.parametrize("dataset", [{"train": [1]}, iter([1])])
def test_datasets_are_samples_by_index(runs: list[Any], adapter: Adapter, dataset: Any) -> None:
    kind = type(dataset).__name__
    with pytest.raises(TypeError, match=f"train_dataset is of type {kind}: expected samples by i"):
        make_algorithm(adapter).run(dataset, samples(2))
    with pytest.raises(TypeError, match=f"val_dataset is of type {kind}: expected samples by ind"):
        make_algorithm(adapter).run(samples(16), dataset)
    assert runs == []


@pytest.mark.parametrize("val_dataset", [None, []])
def test_no_validation_without_samples(
    runs: list[Any], adapter: Adapter, messages: Callable[[], list[str]], val_dataset: Any
) -> None:
    algorithm = make_algorithm(adapter)
    algorithm.run(samples(16), val_dataset)
    (run,) = runs
    assert run["val_dataset"] is None
    assert run["config"].trainer.val_before_train is False
    assert run["config"].trainer.test_freq == -1
    assert algorithm.config.trainer.test_freq == 32
    assert str(messages()).count("does not validate") == 1


def test_validating_only_needs_samples(runs: list[Any], adapter: Adapter) -> None:
    with pytest.raises(ValueError, match=r"trainer\.val_only=True: expected a val_dataset"):
        make_algorithm(adapter, documented(trainer__val_only=True)).run(samples(16))
    assert runs == []


def test_mode_v1_needs_a_store(runs: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"[Ss]tore"):
        agl_fast.VERL(documented(agentlightning={"mode": "v1"})).run(samples(16), samples(2))
    assert runs == []


def test_without_a_store_the_mode_is_v0(runs: list[Any]) -> None:
    algorithm = agl_fast.VERL(documented())
    trainer = Adapter()  # as Agent-lightning's legacy trainer, it has no strategy
    algorithm.set_trainer(trainer)
    algorithm.run(samples(16), samples(2))
    (run,) = runs
    assert (run["store"], run["llm_proxy"], run["adapter"]) == (None, None, None)


def test_mode_v0_leaves_the_store_alone(runs: list[Any], adapter: Adapter) -> None:
    make_algorithm(adapter, documented(agentlightning={"mode": "v0"})).run(samples(16), samples(2))
    assert runs[0]["store"] is None


@pytest.mark.parametrize(
    ("proxy", "endpoint"),
    [
        ({}, "http://127.0.0.1:9999"),
        ({"host": "0.0.0.0", "api_key": "k", "advertise_host": "trainer"}, "http://trainer:9999"),
    ],
)
def test_a_client_finds_the_server_of_mode_v0(proxy: dict[str, Any], endpoint: str) -> None:
    algorithm = agl_fast.VERL(documented(agentlightning={"proxy": proxy}))
    with pytest.warns(DeprecationWarning, match=r"VERL\.get_client is deprecated"):
        client = algorithm.get_client()
    assert client.endpoint == endpoint


def test_several_llms_are_refused_and_other_resources_said_to_be_left_out(
    runs: list[Any], adapter: Adapter, messages: Callable[[], list[str]]
) -> None:
    import agentlightning

    judge = agentlightning.LLM(endpoint="http://judge/v1", model="judge")
    algorithm = make_algorithm(adapter)
    algorithm.set_initial_resources({"main_llm": judge, "judge": judge})
    with pytest.raises(ValueError, match="initial_resources has the LLMs judge: expected none"):
        algorithm.run(samples(16), samples(2))
    assert runs == []
    template = agentlightning.PromptTemplate(template="{x}", engine="f-string")
    algorithm.set_initial_resources({"prompt": template})
    algorithm.run(samples(16), samples(2))
    assert len(runs) == 1
    assert "initial_resources (prompt) are not passed on" in str(messages())


@pytest.mark.parametrize(("strategy", "is_refused"), [("shm", True), ("cs", False)])
def test_several_runners_in_one_process_are_refused(
    runs: list[Any], adapter: Adapter, strategy: str, is_refused: bool
) -> None:
    import agentlightning

    options = {"type": strategy, "n_runners": 2}
    if strategy == "shm":
        options["main_thread"] = "algorithm"
    trainer = agentlightning.Trainer(n_runners=2, strategy=options)
    algorithm = make_algorithm(adapter)
    algorithm.set_trainer(trainer)
    if not is_refused:
        algorithm.run(samples(16), samples(2))
        assert len(runs) == 1
        return
    with pytest.raises(ValueError, match="strategy='shm' with n_runners=2: expected n_runners=1"):
        algorithm.run(samples(16), samples(2))
    assert runs == []


def test_notices_are_logged_once_a_run(
    runs: list[Any], adapter: Adapter, messages: Callable[[], list[str]]
) -> None:
    algorithm = make_algorithm(adapter, documented(custom_reward_function={"name": "score"}))
    assert messages() == []
    algorithm.run(samples(16), samples(2))
    said = messages()
    assert len([line for line in said if line.startswith("custom_reward_function.name is ")]) == 1
    assert len([line for line in said if line.startswith("trainer.use_v1=false")]) == 1


def test_bad_settings_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"trainer\.total_epochs='2': expected int"):
        agl_fast.VERL(documented(trainer__total_epochs="2"))
    with pytest.raises(TypeError, match="config=None: expected a mapping of settings"):
        agl_fast.VERL(None)
    with pytest.raises(
        ValueError, match=r"model\.path='/nowhere': expected a folder with a config"
    ):
        agl_fast.VERL(documented(actor_rollout_ref__model__path="/nowhere"))


def test_samples_have_fields(runs: list[Any], adapter: Adapter) -> None:
    with pytest.raises(TypeError, match="sample 0 of the dataset is a str: expected a mapping"):
        make_algorithm(adapter).run(["a question"] * 16, samples(2))
    with pytest.raises(TypeError, match="sample 0 of the dataset is a int: expected a mapping"):
        make_algorithm(adapter).run(samples(16), range(2))
    assert runs == []


def test_a_column_that_the_run_replaces_is_named(
    runs: list[Any], adapter: Adapter, capsys: pytest.CaptureFixture[str]
) -> None:
    make_algorithm(adapter).run([{"data_id": 7}] * 16)
    assert "samples have a column data_id: agents get the run's own id" in capsys.readouterr().out
    make_algorithm(adapter).run(samples(16))
    assert "data_id" not in capsys.readouterr().out
