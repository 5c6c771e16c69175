"""The inference servers: which one a rollout uses, and which are out of rotation."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from agl_fast.proxy.engines.base import MODEL_PREFIXES

logger = logging.getLogger(__name__)

# A circuit breaker per server: so many failures in a row take it out of rotation. After a rest one
# request probes it; the rest doubles each time the probe fails.
FAILURES_IN_A_ROW = 3
FIRST_REST_SECONDS = 5.0
LONGEST_REST_SECONDS = 60.0
# For so long after any failure, others are preferred.
AFTER_FAILURE_SECONDS = 1.0
# A request that broke the connection to so many servers, which have not answered since, is not
# sent to a third one.
BROKEN_SERVERS = 2

_NEVER = float("-inf")


class NoServerError(RuntimeError):
    """There is no server to send a request to."""


@dataclass(slots=True, eq=False)
class Server:
    """One inference server.

    Attributes:
        url: without "/v1".
        model: the name it knows the model by.
        in_flight: requests it has not answered yet.
        rollouts: rollouts that use it.
        failures: in a row.
        rests: how often in a row it left the rotation; 0: it is in rotation.
        is_doubted: agents left without an answer, or it did not answer ``/health`` at once: others
            are preferred until it does.
        is_silent: it does not answer ``/health``; out of rotation until it does.
        is_probed: a request is trying whether it works again.
        rests_until, failed_at, answered_at: of ``time.monotonic``.
    """

    url: str
    model: str
    api_key: str | None = None
    in_flight: int = 0
    rollouts: int = 0
    failures: int = 0
    rests: int = 0
    is_doubted: bool = False
    is_silent: bool = False
    is_probed: bool = False
    rests_until: float = _NEVER
    failed_at: float = _NEVER
    answered_at: float = _NEVER

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self.is_probed = False

    @property
    def is_in_rotation(self) -> bool:
        return not self.rests and not self.is_silent

    def is_due(self, now: float) -> bool:
        """Whether a request may probe it (half-open)."""
        is_resting = self.is_silent or now < self.rests_until
        return self.rests > 0 and not is_resting and not self.is_probed


class Fleet:
    """Servers of one model. Used in the proxy's event loop.

    Args:
        model_list: Agent-lightning's model entries, one a server.

    Raises:
        ValueError: an entry has no ``api_base``, or the entries name several models.
    """

    def __init__(self, model_list: Iterable[Mapping[str, Any]]) -> None:
        entries = list(model_list)
        names = sorted({entry["model_name"] for entry in entries})
        if len(names) > 1:
            raise ValueError(f"the proxy serves one model, the policy; model_list names {names}")
        self.model_name = names[0] if names else None
        self.servers = [_server(entry) for entry in entries]
        self._of_rollout: dict[str, Server] = {}
        # By a request's key: the servers whose connection it broke, and when.
        self._broken_by: dict[bytes, list[tuple[Server, float]]] = {}

    def server_for(self, rollout_id: str | None, tried: Collection[Server] = ()) -> Server:
        """The server for a rollout's next request.

        The one that has the rollout's prefixes cached, while it is in rotation; else one that is
        due for a probe; else the least loaded in rotation. Where none is in rotation, the
        rollout's, or the one that failed longest ago: there is nothing better to try.

        Args:
            tried: servers that failed this request already.

        Raises:
            NoServerError: the model list is empty, or after a failure no other server is in
                rotation.
        """
        if not self.servers:
            raise NoServerError("no server yet: the model list is empty")
        now = time.monotonic()
        known = self._of_rollout.get(rollout_id) if rollout_id is not None else None
        if known is not None and known not in tried and known.is_in_rotation:
            return known
        others = [each for each in self.servers if each not in tried]
        due = [each for each in others if each.is_due(now)]
        in_rotation = [each for each in others if each.is_in_rotation]
        if due and not tried:
            server = due[0]
            server.is_probed = True
        elif in_rotation:
            server = min(in_rotation, key=lambda each: _load(each, now))
        elif tried:
            raise NoServerError("no other server is in rotation")
        elif known is not None:
            return known
        else:
            server = min(others, key=lambda each: (each.is_silent, each.failed_at, each.in_flight))
        if rollout_id is not None:
            self._move(rollout_id, server)
        return server

    def answered(self, server: Server) -> None:
        """The server answered a request as it should."""
        server.failures = 0
        server.answered_at = time.monotonic()
        server.is_doubted = False
        if not server.is_in_rotation:
            server.is_silent, server.rests = False, 0
            logger.warning("Server %s answers again and is back in rotation.", server.url)

    def failed(self, server: Server, rollout_id: str | None, why: object) -> bool:
        """The server failed a request; the rollout's next one chooses anew.

        Returns:
            Whether the server leaves the rotation with this failure.
        """
        self.leave(server, rollout_id)
        server.failures += 1
        leaves = server.is_in_rotation and server.failures >= FAILURES_IN_A_ROW
        if not leaves and not server.is_probed:
            return False
        # The exponent is cut, as 2**1024 is no float.
        rest = min(FIRST_REST_SECONDS * 2 ** min(server.rests, 16), LONGEST_REST_SECONDS)
        server.rests += 1
        server.rests_until = server.failed_at + rest
        if leaves:
            logger.warning(
                "Server %s leaves the rotation after %d failures in a row (the last: %s); it "
                "is tried again in %g s.",
                server.url,
                server.failures,
                why,
                rest,
            )
        return leaves

    def fell_silent(self, server: Server, why: object) -> bool:
        """The server does not answer ``/health``; ``answered`` or ``recovered`` bring it back.

        Returns:
            Whether the server leaves the rotation with this.
        """
        leaves = server.is_in_rotation
        server.is_silent = True
        server.failed_at = time.monotonic()
        if leaves:
            logger.warning(
                "Server %s leaves the rotation: %s. It is back when it answers /health.",
                server.url,
                why,
            )
        return leaves

    def recovered(self, server: Server) -> None:
        """The server answers ``/health``."""
        was_silent = server.is_silent
        server.is_silent = server.is_doubted = False
        if was_silent and server.is_in_rotation:
            server.failed_at = _NEVER
            logger.warning("Server %s answers again and is back in rotation.", server.url)

    def leave(self, server: Server, rollout_id: str | None) -> None:
        """Let the rollout's next request choose anew, and for a moment prefer other servers."""
        server.failed_at = time.monotonic()
        if rollout_id is not None and self._of_rollout.get(rollout_id) is server:
            del self._of_rollout[rollout_id]
            server.rollouts -= 1

    @property
    def has_broken(self) -> bool:
        """Whether any request broke a connection."""
        return bool(self._broken_by)

    def broke(self, key: bytes, server: Server, sent_at: float) -> None:
        """The connection to the server broke on a request before the answer was complete.

        Args:
            key: ``request_key`` of the agent's body, the same for every try.
            sent_at: of ``time.monotonic``.
        """
        broken = self._broken_by.setdefault(key, [])
        # Several rollouts of one sample send the same: only tries one after another are evidence.
        if all(server is not each and sent_at >= at for each, at in broken):
            broken.append((server, time.monotonic()))

    def is_dangerous(self, key: bytes) -> bool:
        """Whether a request has broken several servers that have not answered anything since."""
        broken = self._broken_by.get(key, ())
        return sum(server.answered_at < at for server, at in broken) >= BROKEN_SERVERS

    def forget(self, rollout_ids: Collection[str]) -> None:
        """These rollouts have ended. Once there are no others, broken connections are forgotten."""
        for rollout_id in rollout_ids:
            if (server := self._of_rollout.pop(rollout_id, None)) is not None:
                server.rollouts -= 1
        if not self._of_rollout:
            self._broken_by = {}

    def _move(self, rollout_id: str, server: Server) -> None:
        known = self._of_rollout.get(rollout_id)
        if known is not server:
            if known is not None:
                known.rollouts -= 1
            server.rollouts += 1
            self._of_rollout[rollout_id] = server


def request_key(body: bytes) -> bytes:
    """What tells requests apart; large bodies are read without the interpreter lock."""
    return blake2b(body, digest_size=16).digest()


def _load(server: Server, now: float) -> tuple[bool, int, int]:
    """Between equals, the server with fewer rollouts."""
    has_just_failed = now - server.failed_at < AFTER_FAILURE_SECONDS
    return server.is_doubted or has_just_failed, server.in_flight, server.rollouts


def _server(entry: Mapping[str, Any]) -> Server:
    parameters = entry.get("litellm_params") or {}
    api_base = parameters.get("api_base")
    if not api_base:
        raise ValueError(f"model {entry['model_name']!r}: litellm_params has no api_base")
    model = parameters.get("model") or ""
    # One of them only: a model may have such a name, too.
    provider = next((prefix for prefix in MODEL_PREFIXES if model.startswith(prefix)), "")
    return Server(
        url=str(api_base).rstrip("/").removesuffix("/v1"),
        model=model.removeprefix(provider) or entry["model_name"],
        api_key=parameters.get("api_key"),
    )
