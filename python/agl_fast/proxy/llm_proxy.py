"""Agent-lightning's LLMProxy without litellm."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from agl_fast.proxy.announced import AnnouncedRollout
from agl_fast.proxy.answer_checks import ModelLimits
from agl_fast.proxy.engines import DEFAULT_ENGINE, Engine
from agl_fast.proxy.fleet import Fleet
from agl_fast.proxy.limits import HttpLimits
from agl_fast.proxy.recorder import Recorder
from agl_fast.proxy.sampling import Phase, PhaseName, SamplingPolicy
from agl_fast.proxy.server import MOVE_AFTER_SECONDS, ProxyServer
from agl_fast.proxy.serving import ServingThread
from agl_fast.verl.addresses import is_loopback, routable_address, url_host
from agl_fast.verl.supervision.waits import Limit

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # litellm's, about its own code
    import agentlightning

    from agl_fast.verl.store_sessions import close_session

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


class LLMProxy(agentlightning.LLMProxy):
    """Serves the policy to agents and records their calls.

    An OpenAI-compatible server on a thread of this process, in front of the servers of the model
    list. Agents use the resource that ``as_resource`` returns: a request on the path of a
    rollout and attempt is answered with token ids, which ``recorder`` keeps until they are taken.
    ``X-AGL-Train: 0`` marks a call that is not trained (a judge on the same endpoint),
    ``X-AGL-Agent`` names the agent that makes it. A call in training that carries images, audio or
    video and is not so marked is refused (400): rows hold text only.

    Phase and sampling belong to rollouts. ``announce`` opens rollouts, of several batches at the
    same time; ``close`` ends them. Calls of other rollouts are refused (404), except before the
    first announcement: until then every rollout is served, for validation.

    Args:
        port: None: the system chooses one at the first start.
        model_list: one entry a server, as for Agent-lightning: ``model_name`` and
            ``litellm_params`` with ``api_base`` (``http://host:port/v1/``), ``model`` (its own name
            there, after ``hosted_vllm/``) and ``api_key``.
        store: numbers the calls among the spans of their rollout.
        host: what to bind to; anything beyond loopback needs an ``api_key``.
        advertise_host: what agents connect to; None: ``host``, or this machine's address in its
            network where ``host`` stands for every address.
        api_key: required of every request (``Authorization: Bearer``), and part of the resource.
        timeout_seconds: the longest an answer may take.
        move_after_seconds: requests move away from a server that has answered nothing for so long.
        max_body_bytes, max_header_bytes, header_seconds, body_seconds, max_connections: as in
            ``agentlightning.proxy`` of the configuration.
        mode: ``v1``, or Agent-lightning's ``v0``: there is no store, no request names its rollout,
            and none is recorded; answers have token ids, for the agents' own tracers. Calls belong
            to what was announced last.
        engine: of the servers, a module of ``agl_fast.proxy.engines``.

    Attributes:
        start_limit, stop_limit: how long starting and stopping may take. The daemon sets them.

    Raises:
        ValueError: ``host`` is not loopback and there is no ``api_key``, or the model list is bad.
    """

    start_limit = Limit(60.0)
    stop_limit = Limit(10.0)

    def __init__(
        self,
        port: int | None = None,
        model_list: Iterable[Mapping[str, Any]] | None = None,
        store: agentlightning.LightningStore | None = None,
        host: str | None = LOOPBACK,
        *,
        advertise_host: str | None = None,
        api_key: str | None = None,
        timeout_seconds: float = 1200.0,
        move_after_seconds: float = MOVE_AFTER_SECONDS,
        max_body_bytes: int = HttpLimits.max_body_bytes,
        max_header_bytes: int = HttpLimits.max_header_bytes,
        header_seconds: float = HttpLimits.header_seconds,
        body_seconds: float = HttpLimits.body_seconds,
        max_connections: int = HttpLimits.max_connections,
        mode: Literal["v0", "v1"] = "v1",
        engine: str = DEFAULT_ENGINE,
    ) -> None:
        # The base class's own constructor sets up litellm's server; its methods that use that are
        # all replaced here.
        host = host or LOOPBACK
        if not is_loopback(host) and not api_key:
            raise ValueError(f"host {host!r} is reachable by others: give the proxy an api_key")
        self.store = store
        self._host = host
        self._port = port
        self._advertise_host = advertise_host
        self._api_key = api_key
        self._timeout_seconds = timeout_seconds
        self._move_after_seconds = move_after_seconds
        self._limits = HttpLimits(
            max_body_bytes, max_header_bytes, header_seconds, body_seconds, max_connections
        )
        self._mode = mode
        self._engine_name = engine
        self._server = ProxyServer(
            api_key=api_key,
            timeout_seconds=timeout_seconds,
            move_after_seconds=move_after_seconds,
            http_limits=self._limits,
            ids_for_everybody=mode == "v0",
            engine=engine,
        )
        self._thread: ServingThread | None = None
        self.update_model_list(list(model_list or []))

    @classmethod
    def in_place_of(cls, proxy: agentlightning.LLMProxy | None, **settings: Any) -> LLMProxy:
        """The proxy itself where it is one of ours; otherwise a new one, with a warning where a
        stock proxy is replaced.

        Args:
            settings: the constructor's, for a new one; it takes over a stock proxy's store.
        """
        if isinstance(proxy, cls):
            return proxy
        if proxy is not None:
            logger.warning(
                "%s is replaced by agl_fast.LLMProxy, which keeps the token ids of every call; its "
                "host, port, callbacks and litellm settings are not used.",
                type(proxy).__name__,
            )
            settings.setdefault("store", proxy.get_store())
        return cls(**settings)

    @property
    def recorder(self) -> Recorder:
        return self._server.recorder

    @property
    def model_limits(self) -> ModelLimits:
        """What the answers are held against. The daemon sets it."""
        return self._server.limits

    @model_limits.setter
    def model_limits(self, limits: ModelLimits) -> None:
        self._server.limits = limits

    @property
    def engine(self) -> Engine:
        return self._server.engine

    @property
    def policy_version(self) -> int | None:
        """Of the weights that the servers hold; None: unknown. Set it after a weight sync.

        A recorded call has the version with which it was sent to the server that answered it.
        """
        return self._server.policy_version

    @policy_version.setter
    def policy_version(self, version: int | None) -> None:
        self._server.policy_version = version

    @contextmanager
    def announcing(self) -> Iterator[None]:
        """Enqueue and announce rollouts in the block.

        A runner may be faster than the announcement: calls of unknown rollouts wait until the block
        ends.
        """
        self._refuse_others()
        with self._server.announced.announcing():
            yield

    def announce(
        self, rollout_ids: Collection[str], phase: PhaseName, sampling: SamplingPolicy | None
    ) -> None:
        """Open rollouts: their calls are answered and recorded until they are closed.

        Args:
            sampling: None: as agents ask, and as the servers fill in.
        """
        self._refuse_others()
        announced, version = self._server.announced, self.policy_version
        announced.announce(rollout_ids, Phase(phase, sampling), version)
        if self._mode == "v0":
            announced.others = AnnouncedRollout(Phase(phase, sampling), version)

    def _refuse_others(self) -> None:
        if self._mode == "v1":
            self._server.announced.others = None

    def refuse(self, rollout_ids: Collection[str]) -> None:
        """Answer further calls of these rollouts with 404. Those under way go on."""
        self._server.announced.refuse(rollout_ids)

    async def close(self, rollout_ids: Collection[str]) -> None:
        """End rollouts: abort their requests, and answer further ones with 404.

        Their calls that nobody took, and all of rollouts that were not announced, are forgotten,
        and counted.
        """
        if self._thread is not None and self._thread.is_running():
            await self._thread.run(self._server.close_rollouts(rollout_ids))
        else:
            self._server.forget(rollout_ids)

    async def abort(self, rollout_id: str, attempt_id: str | None = None) -> None:
        """Close the requests of a rollout, or of one of its attempts, at their servers.

        The servers stop sampling them. Their agents get a 409, and ``recorder`` counts them as
        ``aborted``.
        """
        if self._thread is not None and self._thread.is_running():
            await self._thread.run(self._server.abort(rollout_id, attempt_id))

    @property
    def repeatable(self) -> bool:
        """Whether answers are withheld until they are complete, so that ``hold`` can repeat every
        call. Events of a stream come all at once then. Set it before agents call."""
        return self._server.withholds_answers

    @repeatable.setter
    def repeatable(self, repeatable: bool) -> None:
        self._server.withholds_answers = repeatable

    async def hold(self, drain_seconds: float) -> None:
        """Stop sampling before the servers' weights change; ``release`` continues.

        Calls in flight may finish for ``drain_seconds``. What is left is aborted at the servers and
        repeated after ``release``, like calls that come meanwhile: their agents wait, and the wait
        does not count against ``timeout_seconds``. Discarded tokens are counted
        (``repeated_tokens``). A streamed answer of which the agent has a part cannot be repeated:
        ``hold`` waits until it is complete. With ``repeatable`` there is none.

        Raises:
            RuntimeError: the proxy does not run.
        """
        await self._running_thread().run(self._server.gate.hold(drain_seconds))

    async def release(self, policy_version: int) -> None:
        """End ``hold``: the servers hold the weights of this version.

        Raises:
            RuntimeError: the proxy does not run.
        """
        await self._running_thread().run(self._server.release(policy_version))

    def _running_thread(self) -> ServingThread:
        if self._thread is None or not self._thread.is_running():
            raise RuntimeError("the proxy does not run")
        return self._thread

    async def pause(self) -> None:
        """Abort every request, and refuse those to come (503) until ``resume``.

        For the time in which the servers sleep: they wait for requests first, and cannot answer
        any then.
        """
        self._server.is_paused = True
        if self._thread is not None and self._thread.is_running():
            await self._thread.run(self._server.abort_all())

    def resume(self) -> None:
        """End ``pause``."""
        self._server.is_paused = False

    def require_known_model(self, rollout_ids: Collection[str]) -> None:
        """Raise RuntimeError where the servers know none of the models that calls of these
        rollouts asked for."""
        rollouts = self._server.announced.of(rollout_ids)
        unknown = sum((each.unknown_models for each in rollouts), Counter[str]())
        if unknown and not any(each.recorded for each in rollouts):
            ((message, count),) = unknown.most_common(1)
            raise RuntimeError(f"no call was answered, {count} of them with 404: {message}")

    def update_model_list(self, model_list: list[Any]) -> None:
        """Replace the servers, also while the proxy runs.

        Raises:
            ValueError: an entry has no ``api_base``, or the entries name several models.
        """
        self._server.fleet = Fleet(model_list)
        self.model_list = model_list

    def set_store(self, store: agentlightning.LightningStore) -> None:
        self.store = store
        self._server.next_sequence = store.get_next_span_sequence_id
        self._server.latest_attempt = _latest_attempt_in(store)
        self._server.leave_store = partial(close_session, store)

    def initialize(self) -> None:
        """Nothing: there are no global hooks."""

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            ValueError: there is no store.
            RuntimeError: the store cannot be used from the server's thread.
            OSError: host and port cannot be bound.
            TimeoutError: it took longer than ``start_limit``.
        """
        if self.is_running():
            logger.warning("LLMProxy is running already.")
            return
        if self._mode == "v1":
            self._use_store()
        thread = ServingThread(self._server)
        try:
            self._port = await asyncio.to_thread(
                thread.start, self._host, self._port, self.start_limit
            )
        except TimeoutError:
            raise
        except OSError as error:
            raise OSError(
                error.errno,
                f"agentlightning.proxy.port={self._port} on {self._host} cannot be bound: "
                f"{error.strerror}. Leave it null, and the system chooses a free one",
            ) from error
        self._thread = thread
        logger.info("LLMProxy serves %s", self._endpoint())

    def _use_store(self) -> None:
        if self.store is None:
            raise ValueError("LLMProxy has no store; set_store before start")
        if not self.store.capabilities.get("thread_safe", False):
            raise RuntimeError(
                f"{type(self.store).__name__} is not thread-safe, and the proxy runs on a thread: "
                "use InMemoryLightningStore(thread_safe=True) or LightningStoreThreaded"
            )
        self.set_store(self.store)

    async def stop(self) -> None:
        """Stop serving; what was recorded stays.

        Raises:
            TimeoutError: it took longer than ``stop_limit``.
        """
        if self._thread is None or not self.is_running():
            logger.warning("LLMProxy is not running. Nothing to stop.")
            return
        await asyncio.to_thread(self._thread.stop, self.stop_limit)
        self._thread = None

    async def restart(self, *, _port: int | None = None) -> None:
        """Stop where it runs, then start, on the same port where none is given."""
        if self.is_running():
            await self.stop()
        if _port is not None:
            self._port = _port
        await self.start()

    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_running()

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: dict[str, Any] | None = None,
    ) -> agentlightning.LLM:
        """The resource with which agents find the proxy.

        Args:
            rollout_id, attempt_id: for an LLM of one attempt; both None: a ProxyLLM, which puts in
                those of the rollout that uses it.
            model: None: the model list's.
            sampling_parameters: carried along for agents that read them.

        Raises:
            ValueError: no model is known, or only one of the two ids is given.
            RuntimeError: the port is not known before the first start.
        """
        if (rollout_id is None) != (attempt_id is None):
            raise ValueError("give both rollout_id and attempt_id, or neither")
        model = model or self._server.fleet.model_name
        if model is None:
            raise ValueError("the model list is empty; name the model")
        endpoint = self._endpoint()
        kind = agentlightning.ProxyLLM
        if rollout_id is not None:
            kind = agentlightning.LLM
            endpoint = f"{endpoint}/rollout/{rollout_id}/attempt/{attempt_id}"
        return kind(
            endpoint=endpoint,
            model=model,
            api_key=self._api_key,
            sampling_parameters=dict(sampling_parameters or {}),
        )

    def _endpoint(self) -> str:
        if self._port is None:
            raise RuntimeError("the port is not known yet: start the proxy, or give it a port")
        host = self._advertise_host or routable_address(self._host)
        return f"http://{url_host(host)}:{self._port}"

    def __getstate__(self) -> dict[str, Any]:
        """Settings only: a copy in another process serves nothing until it is started there."""
        return {
            "port": self._port,
            "model_list": self.model_list,
            "store": self.store,
            "host": self._host,
            "advertise_host": self._advertise_host,
            "api_key": self._api_key,
            "timeout_seconds": self._timeout_seconds,
            "move_after_seconds": self._move_after_seconds,
            **asdict(self._limits),
            "mode": self._mode,
            "engine": self._engine_name,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _latest_attempt_in(
    store: agentlightning.LightningStore,
) -> Callable[[str], Awaitable[str | None]]:
    async def latest_attempt(rollout_id: str) -> str | None:
        attempt = await store.get_latest_attempt(rollout_id)
        return None if attempt is None else attempt.attempt_id

    return latest_attempt
