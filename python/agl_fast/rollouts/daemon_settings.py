"""The daemon's arguments: checks, and the objects made from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import agentlightning
from agentlightning import LightningStore

from agl_fast.proxy.llm_proxy import LOOPBACK, LLMProxy
from agl_fast.proxy.sampling import SamplingPolicy
from agl_fast.rollouts.legacy_server import LegacyServer
from agl_fast.rollouts.legacy_source import LegacySource
from agl_fast.rollouts.progress import Source
from agl_fast.rollouts.store_source import CallFilter, StoreSource
from agl_fast.verl.supervision.deadlines import Deadlines


def sampling_policies(
    training: Mapping[str, Any],
    validation: Mapping[str, Any],
    *,
    enforce: bool,
    max_tokens: int | None,
) -> dict[str, SamplingPolicy]:
    """Sampling parameters of each phase; validation defaults to those of training."""
    common = {key: training[key] for key in ("temperature", "top_p", "top_k") if key in training}
    return {
        "train": _policy({"temperature": 0.7, **common}, enforce, max_tokens),
        "val": _policy({"temperature": 0.0, **common, **validation}, False, max_tokens),
    }


def _policy(values: Mapping[str, Any], enforce: bool, max_tokens: int | None) -> SamplingPolicy:
    return SamplingPolicy(
        temperature=values["temperature"],
        top_p=values.get("top_p", 1.0),
        top_k=values.get("top_k", -1),
        enforce=enforce,
        max_tokens=max_tokens,
    )


def model_entry(model: str, served_model: str, address: str) -> dict[str, Any]:
    """One vLLM server in a proxy's model list.

    Args:
        model: the name in agents' requests.
        served_model: the server's name of the model.
        address: ``host:port``.
    """
    parameters = {"model": f"hosted_vllm/{served_model}", "api_base": f"http://{address}/v1/"}
    return {"model_name": model, "litellm_params": parameters}


def proxy_for(
    store: LightningStore | None, proxy: agentlightning.LLMProxy | None, settings: dict[str, Any]
) -> LLMProxy:
    """The daemon's proxy: `proxy` if it is agl_fast's, else a new one.

    Args:
        store: None in mode v0, which always makes a proxy.
        settings: of a new proxy.
    """
    if store is None:
        return LLMProxy(mode="v0", **settings)
    own = LLMProxy.in_place_of(proxy, store=store, **settings)
    if own.get_store() is None:
        own.set_store(store)
    return own


def source_of(
    store: LightningStore | None,
    adapter: Any,
    llm_proxy: LLMProxy,
    deadlines: Deadlines,
    legacy: tuple[str | None, int | None, float],
) -> Source:
    """The store; without one, the server of mode v0.

    Args:
        deadlines: of the store.
        legacy: host and port of the server of mode v0, and the seconds after which it gives a task
            to another client.

    Raises:
        TypeError: the adapter is no TraceToTripletBase.
    """
    if store is not None:
        return StoreSource(store, llm_proxy, CallFilter.of(adapter), deadlines)
    host, port, task_timeout_seconds = legacy
    assert port is not None
    return LegacySource(LegacyServer(host or LOOPBACK, port, task_timeout_seconds), llm_proxy)


def check_arguments(
    *,
    mode: str,
    store: Any,
    port: int | None,
    train_rollout_n: int,
    train_information: Mapping[str, Any],
    failed_rollouts: str,
    sampling: str,
    llm_timeout_seconds: float,
    rollout_deadline_seconds: float | None,
    runner_silent_seconds: float | None,
    first_runner_seconds: float | None,
    processor: Any,
) -> None:
    """Raise ValueError naming a missing or invalid argument."""
    require_one_of("mode", mode, ("v0", "v1"))
    if mode == "v1" and store is None:
        raise ValueError(
            "mode='v1' needs a LightningStore as store; agentlightning.Trainer brings one"
        )
    if mode == "v0" and store is not None:
        raise ValueError("mode='v0' has no store: give none, or mode='v1'")
    if mode == "v0" and port is None:
        raise ValueError("mode='v0' needs a port, where agents' clients ask for tasks")
    if train_rollout_n < 1:
        raise ValueError(f"train_rollout_n must be at least 1, got {train_rollout_n}")
    if not train_information.get("model"):
        raise ValueError(f"train_information names no model: {dict(train_information)}")
    require_one_of("failed_rollouts", failed_rollouts, ("skip", "zero"))
    require_one_of("sampling", sampling, ("enforce", "allow"))
    require_positive("llm_timeout_seconds", llm_timeout_seconds)
    if rollout_deadline_seconds is not None:
        require_positive("rollout_deadline_seconds", rollout_deadline_seconds)
    if runner_silent_seconds is not None:
        require_positive("runner_silent_seconds", runner_silent_seconds)
    if first_runner_seconds is not None:
        require_positive("first_runner_seconds", first_runner_seconds)
    refuse_mrope(processor)


def require_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def require_positive(name: str, seconds: float) -> None:
    if not seconds > 0:
        raise ValueError(f"{name} must be more than 0, got {seconds!r}")


def refuse_mrope(processor: Any) -> None:
    image_processor = type(getattr(processor, "image_processor", None)).__name__
    if "Qwen2VL" in image_processor or "Qwen3VL" in image_processor:
        raise ValueError(
            f"the model's {image_processor} needs M-RoPE position ids, which rows do not have: "
            "use a model without images"
        )
