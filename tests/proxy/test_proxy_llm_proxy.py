"""LLMProxy as Agent-lightning uses it: life cycle, resources, a run of agl.Trainer."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import warnings

import openai
import pytest

from agl_fast.proxy import SamplingPolicy
from agl_fast.proxy.server import ProxyServer
from agl_fast.verl.supervision.waits import Limit
from support.fake_openai_server import Answer
from support.running_proxy import say

# Importing agentlightning would look for a price list on the internet.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # litellm's
    import agentlightning

    from agl_fast.proxy import LLMProxy


@pytest.fixture
def proxy(fake):
    store = agentlightning.InMemoryLightningStore(thread_safe=True)
    proxy = LLMProxy(model_list=[fake.model_entry()], store=store)
    yield proxy
    if proxy.is_running():
        asyncio.run(proxy.stop())


def call(resource, *ids: str) -> str:
    client = openai.OpenAI(
        base_url=resource.get_base_url(*ids), api_key=resource.api_key or "none", max_retries=0
    )
    answer = client.chat.completions.create(model=resource.model, messages=say("hi"))
    return answer.choices[0].message.content


def test_life_cycle(proxy):
    assert not proxy.is_running()
    asyncio.run(proxy.start())
    assert proxy.is_running()
    resource = proxy.as_resource(sampling_parameters={"temperature": 1.0})
    assert isinstance(resource, agentlightning.ProxyLLM)
    assert resource.sampling_parameters == {"temperature": 1.0}
    assert call(resource, "ro-1", "at-1") == "hello"
    asyncio.run(proxy.restart())
    # Agents keep the resource they have.
    assert call(resource, "ro-1", "at-1") == "hello"
    assert [recorded.sequence for recorded in proxy.recorder.take("ro-1", "at-1")] == [1, 2]
    asyncio.run(proxy.stop())
    assert not proxy.is_running()
    with pytest.raises(openai.APIConnectionError):
        call(resource, "ro-1", "at-1")
    assert not [thread for thread in threading.enumerate() if thread.name == "agl-fast-proxy"]


def test_starting_and_stopping_have_limits_that_errors_name(proxy, monkeypatch):
    go_on = threading.Event()

    async def wait(self):
        await asyncio.to_thread(go_on.wait, 30)

    close = ProxyServer.close
    with monkeypatch.context() as slow:
        slow.setattr(ProxyServer, "open", wait)
        proxy.start_limit = Limit(0.1, "a.key")
        with pytest.raises(
            TimeoutError, match=r"^the proxy did not start within 0\.1 s \(a\.key\)"
        ):
            asyncio.run(proxy.start())
    assert not proxy.is_running()
    proxy.start_limit = Limit(30.0)
    asyncio.run(proxy.start())

    async def close_later(self):
        await wait(self)
        await close(self)

    monkeypatch.setattr(ProxyServer, "close", close_later)
    proxy.stop_limit = Limit(0.1, "b.key")
    with pytest.raises(TimeoutError, match=r"^the proxy did not stop within 0\.1 s \(b\.key\)"):
        asyncio.run(proxy.stop())
    go_on.set()
    proxy.stop_limit = Limit(30.0)
    asyncio.run(proxy.stop())


def test_a_server_that_does_not_open_is_no_wait(proxy, monkeypatch):
    async def fail(self):
        raise RuntimeError("no event loop for you")

    monkeypatch.setattr(ProxyServer, "open", fail)
    with pytest.raises(RuntimeError, match="no event loop for you"):
        asyncio.run(proxy.start())


def test_start_and_stop_twice(proxy):
    asyncio.run(proxy.stop())
    asyncio.run(proxy.start())
    asyncio.run(proxy.start())
    assert proxy.is_running()
    asyncio.run(proxy.stop())


def test_resource_of_one_attempt(proxy):
    asyncio.run(proxy.start())
    assert call(proxy.as_resource("ro-1", "at-1")) == "hello"
    assert len(proxy.recorder.take("ro-1", "at-1")) == 1
    with pytest.raises(ValueError, match="both"):
        proxy.as_resource(rollout_id="ro-1")


def test_phases(proxy, fake):
    asyncio.run(proxy.start())
    resource = proxy.as_resource()
    sampling = SamplingPolicy(temperature=0.8, top_p=1.0, top_k=-1, max_tokens=9)
    proxy.policy_version = 7
    proxy.announce(["ro-1", "ro-2"], "train", sampling)
    call(resource, "ro-1", "at-1")
    assert proxy.recorder.take("ro-1", "at-1")[0].call.policy_version == 7
    assert (fake.bodies()[0]["temperature"], fake.bodies()[0]["max_tokens"]) == (0.8, 9)
    call(resource, "ro-2", "at-1")
    proxy.announce(["ro-3"], "val", None)
    call(resource, "ro-3", "at-1")
    assert "temperature" not in fake.bodies()[2]
    asyncio.run(proxy.close(["ro-1", "ro-2"]))
    assert proxy.recorder.take("ro-2", "at-1") == []
    assert proxy.recorder.counts["forgotten"] == 1
    assert len(proxy.recorder.take("ro-3", "at-1")) == 1


def test_port_in_use_is_an_error(proxy, fake):
    other = LLMProxy(fake.port, [fake.model_entry()], proxy.get_store())
    with pytest.raises(OSError, match="in use"):
        asyncio.run(other.start())
    assert not other.is_running()


def test_what_start_needs():
    with pytest.raises(ValueError, match="store"):
        asyncio.run(LLMProxy().start())
    store = agentlightning.InMemoryLightningStore(thread_safe=False)
    with pytest.raises(RuntimeError, match="thread"):
        asyncio.run(LLMProxy(store=store).start())
    with pytest.raises(RuntimeError, match="port"):
        LLMProxy(model_list=[]).as_resource(model="m")


def test_beyond_loopback_a_key_is_required(fake):
    with pytest.raises(ValueError, match="api_key"):
        LLMProxy(host="0.0.0.0")
    proxy = LLMProxy(
        4000, [fake.model_entry()], host="0.0.0.0", advertise_host="trainer", api_key="key"
    )
    resource = proxy.as_resource()
    assert resource.api_key == "key"
    assert resource.get_base_url("r", "a") == "http://trainer:4000/rollout/r/attempt/a"


def test_api_key_of_the_resource_opens(fake):
    store = agentlightning.InMemoryLightningStore(thread_safe=True)
    proxy = LLMProxy(model_list=[fake.model_entry()], store=store, api_key="key")
    asyncio.run(proxy.start())
    try:
        resource = proxy.as_resource()
        assert call(resource, "ro-1", "at-1") == "hello"
        resource.api_key = "wrong"
        with pytest.raises(openai.AuthenticationError):
            call(resource, "ro-1", "at-1")
    finally:
        asyncio.run(proxy.stop())


def test_copy_in_another_process_is_not_running(fake):
    proxy = LLMProxy(4001, [fake.model_entry()], api_key="key", timeout_seconds=5.0)
    copy = pickle.loads(pickle.dumps(proxy))
    assert copy.as_resource() == proxy.as_resource()
    assert not copy.is_running()


def test_stock_proxy_is_replaced(proxy, caplog):
    assert LLMProxy.in_place_of(proxy) is proxy
    stock = agentlightning.LLMProxy.__new__(agentlightning.LLMProxy)
    stock.store = proxy.get_store()
    replaced = LLMProxy.in_place_of(stock, port=4002)
    assert isinstance(replaced, LLMProxy)
    assert replaced.get_store() is proxy.get_store()
    assert "replaced" in caplog.text
    assert LLMProxy.in_place_of(None).get_store() is None


class OneCallEach(agentlightning.Algorithm):
    """Enqueues two tasks and collects what the proxy recorded."""

    async def run(self, train_dataset=None, val_dataset=None):
        proxy, store = self.get_llm_proxy(), self.get_store()
        await proxy.start()
        try:
            proxy.policy_version = 1
            resources = await store.add_resources({"main_llm": proxy.as_resource()})
            with proxy.announcing():
                enqueued = [
                    await store.enqueue_rollout(task, resources_id=resources.resources_id)
                    for task in train_dataset
                ]
                rollout_ids = [rollout.rollout_id for rollout in enqueued]
                proxy.announce(rollout_ids, "train", None)
            await store.wait_for_rollouts(rollout_ids=rollout_ids, timeout=30)
            self.found = []
            for rollout_id in rollout_ids:
                attempt = await store.get_latest_attempt(rollout_id)
                calls = proxy.recorder.take(rollout_id, attempt.attempt_id)
                spans = await store.query_spans(rollout_id, attempt.attempt_id)
                self.found.append((calls, spans))
        finally:
            await proxy.stop()


@agentlightning.rollout
def asks_twice(task: str, llm: agentlightning.LLM) -> float:
    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none", max_retries=0)
    for text in (task, "again"):
        client.chat.completions.create(model=llm.model, messages=say(text))
        agentlightning.emit_reward(float(text == "again"))
    return 1.0


def test_run_of_a_trainer(proxy, fake):
    algorithm = OneCallEach()
    trainer = agentlightning.Trainer(
        algorithm=algorithm,
        llm_proxy=proxy,
        store=proxy.get_store(),
        strategy=agentlightning.SharedMemoryExecutionStrategy(n_runners=1, main_thread="algorithm"),
        tracer=agentlightning.OtelTracer(),
    )
    fake.respond = lambda request: Answer()
    trainer.fit(asks_twice, train_dataset=["one", "two"])
    assert len(algorithm.found) == 2
    for calls, spans in algorithm.found:
        assert len(calls) == 2
        rewards = sorted(span.sequence_id for span in spans if "annotation" in span.name)
        # call, its reward, call, its reward, the returned reward
        order = [(recorded.sequence, "call") for recorded in calls]
        order += [(sequence, "reward") for sequence in rewards]
        kinds = [kind for _, kind in sorted(order)]
        assert kinds == ["call", "reward", "call", "reward", "reward"]
