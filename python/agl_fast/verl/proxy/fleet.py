"""The vLLM servers behind the proxy, and which of them a rollout uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# litellm's names of OpenAI-compatible servers, in front of the model's own name.
_PROVIDERS = ("hosted_vllm/", "openai/")


class NoServerError(RuntimeError):
    """There is no server to send a request to."""


@dataclass(slots=True, eq=False)
class Server:
    """One vLLM server.

    Attributes:
        url: without "/v1".
        model: the name it knows the model by.
        in_flight: requests it has not answered yet.
        rollouts: rollouts that use it.
        failures: since it last answered.
    """

    url: str
    model: str
    api_key: str | None = None
    in_flight: int = 0
    rollouts: int = 0
    failures: int = 0

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Fleet:
    """Servers of one model.

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

    def server_for(self, rollout_id: str | None) -> Server:
        """The server that has the rollout's prefixes cached; for a new one, the least loaded.

        Raises:
            NoServerError: the model list is empty.
        """
        if rollout_id is not None and (known := self._of_rollout.get(rollout_id)):
            return known
        if not self.servers:
            raise NoServerError("no server yet: the model list is empty")
        least = min(self.servers, key=lambda server: (server.failures, server.in_flight))
        if rollout_id is not None:
            # Between equals, the one with fewer rollouts.
            load = (least.failures, least.in_flight)
            equals = [s for s in self.servers if (s.failures, s.in_flight) == load]
            least = min(equals, key=lambda server: server.rollouts)
            least.rollouts += 1
            self._of_rollout[rollout_id] = least
        return least

    def failed(self, server: Server, rollout_id: str | None) -> None:
        """The server cannot be reached: let the rollout's next request choose anew."""
        server.failures += 1
        if rollout_id is not None and self._of_rollout.get(rollout_id) is server:
            del self._of_rollout[rollout_id]
            server.rollouts -= 1

    def forget_rollouts(self) -> None:
        self._of_rollout = {}
        for server in self.servers:
            server.rollouts = 0


def _server(entry: Mapping[str, Any]) -> Server:
    parameters = entry.get("litellm_params") or {}
    api_base = parameters.get("api_base")
    if not api_base:
        raise ValueError(f"model {entry['model_name']!r}: litellm_params has no api_base")
    model = parameters.get("model") or ""
    # One of them only: a model may have such a name, too.
    provider = next((prefix for prefix in _PROVIDERS if model.startswith(prefix)), "")
    return Server(
        url=str(api_base).rstrip("/").removesuffix("/v1"),
        model=model.removeprefix(provider) or entry["model_name"],
        api_key=parameters.get("api_key"),
    )
