"""Dry run: run agents against any server that returns token ids, and build rows."""

from __future__ import annotations

import json
import os
import socket
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

# First: it disables litellm's download when agentlightning imports it.
from agl_fast.rollouts import AgentModeDaemon, FinishedRollout  # isort: skip

import agentlightning

import agl_fast
from agl_fast.proxy import LLMProxy
from agl_fast.recording import RecordingWriter
from agl_fast.rows.options import CommonRowKeywords, RowOptions, lists_row_options
from agl_fast.rows.token_summary import TokenSummary
from agl_fast.training.datasets import Samples, columns_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MODELS_SECONDS = 10.0
_POLL_SECONDS = 0.05
# What the proxy's counters mean for training.
_PROXY_WORDS = {
    "without_token_ids": "answers had no token ids: the endpoint has to be a vLLM server, which "
    "gives them where a request has return_token_ids",
    "without_log_probs": "calls have no log-probs",
    "client_errors": "calls were refused by the server (4xx)",
    "server_errors": "calls failed at the server (5xx, or out of reach)",
    "timeouts": "calls took too long",
    "bad_requests": "requests were malformed, or cannot be trained on",
    "unknown_models": "requests named a model that the server does not have",
    "not_supported": "requests used an endpoint that is not recorded",
    "unrecorded": "requests were not recorded: does the agent use the resource's own address "
    "(llm.get_base_url(rollout_id, attempt_id))?",
    "sampling_overridden": "requests had sampling parameters that were replaced by the run's",
    "sampling_unenforced": "requests constrained what is sampled, which the trainer's log-probs do "
    "not account for",
    "fields_unknown": "requests had fields that vLLM does not know",
    "seeded": "requests had a seed: rollouts of one sample may be identical",
    "client_gone": "requests were cancelled by the agent",
}


@dataclass(frozen=True, eq=False)
class DryRun:
    """Rollouts of a dry run and their rows. ``print`` shows a report.

    Attributes:
        rollouts: in the order of the samples, including failed ones.
        batch: their rows; None without rows.
        metrics: ``training/*``, as a training step logs them.
        summary: sampled tokens by class, in words.
    """

    rollouts: Sequence[agl_fast.Rollout]
    batch: agl_fast.Batch | None
    metrics: Mapping[str, float]
    summary: TokenSummary

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        statuses = Counter(rollout.status for rollout in self.rollouts)
        told = ", ".join(f"{n} {status}" for status, n in statuses.most_common())
        yield f"{len(self.rollouts)} rollouts: {told}"
        if self.batch is not None:
            yield from self._about_rewards(self.batch)
            yield from self._about_rows(self.batch)
        else:
            yield "no rows: no rollout has a trainable call"
        yield str(self.summary)
        for name, words in _PROXY_WORDS.items():
            if n := int(self.metrics.get(f"training/proxy/{name}", 0)):
                yield f"{n} {words}"

    def _about_rewards(self, batch: agl_fast.Batch) -> Iterator[str]:
        rewards = [entry.reward for entry in batch.rollouts]
        missing = sum(not entry.has_reward for entry in batch.rollouts)
        yield (
            f"rewards: {sum(rewards) / len(rewards):.3g} on average, {min(rewards):.3g} to "
            f"{max(rewards):.3g}" + (f"; {missing} rollouts have none" if missing else "")
        )
        groups: dict[str, set[float]] = {}
        for entry in batch.rollouts:
            groups.setdefault(entry.data_id, set()).add(entry.reward)
        if len(groups) < len(rewards):
            flat = sum(len(values) == 1 for values in groups.values())
            yield f"{flat} of {len(groups)} groups have equal rewards: their advantages are 0"

    def _about_rows(self, batch: agl_fast.Batch) -> Iterator[str]:
        n_calls = sum(entry.n_calls for entry in batch.rollouts)
        prompts, responses = batch.tensors["prompts"], batch.tensors["responses"]
        n_tokens = int(batch.tensors["attention_mask"].sum())
        n_trained = int(batch.tensors["response_mask"].sum())
        yield (
            f"{len(batch)} rows of {n_calls} calls, {n_tokens:,} tokens, {n_trained:,} of them "
            f"trained; the longest prompt has {prompts.shape[1]:,} tokens, the longest response "
            f"{responses.shape[1]:,}"
        )


@lists_row_options(CommonRowKeywords)
def dry_run(
    agent: agentlightning.LitAgent[Any] | Callable[..., Any],
    dataset: Sequence[Any],
    endpoint: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    rollouts_per_sample: int = 1,
    n_runners: int = 1,
    max_prompt_length: int = 2048,
    max_response_length: int = 8192,
    failed_rollouts: Literal["skip", "zero"] = "skip",
    temperature: float = 1.0,
    sampling: Literal["enforce", "allow"] = "enforce",
    max_tokens: int | None = None,
    tokenizer: Any = None,
    tracer: Any = None,
    seconds_per_call: float = 1200.0,
    seconds_per_rollout: float = 3600.0,
    record: str | os.PathLike[str] | None = None,
    **row_options: Unpack[CommonRowKeywords],
) -> DryRun:
    """Run an agent as in training, without Ray, trainer or GPU, and build its rows.

    Agents run in Agent-lightning's runners and call the endpoint through agl_fast's proxy. Their
    calls become rows as docs/rows.md specifies::

        print(agl_fast.dry_run(agent, tasks[:8], "http://localhost:8000/v1"))

    Args:
        agent: as for ``agentlightning.Trainer``; a plain function is decorated with ``rollout``.
        dataset: samples by index; each is a mapping.
        endpoint: URL of an OpenAI-compatible server that returns token ids, such as vLLM.
        model: name on the server. None: its first model.
        api_key: of the server.
        n_runners: 1: in this process, one rollout after another; more: one forked process each.
        max_prompt_length, max_response_length, row_options: as for ``build_batch``.
        failed_rollouts, sampling, max_tokens: as for ``AgentModeDaemon``.
        temperature: of sampling in training.
        tokenizer: distinguishes retokenised text from rewritten history.
        tracer: of Agent-lightning; None: ``OtelTracer``, which records rewards only.
        seconds_per_call, seconds_per_rollout: limits on their duration.
        record: path of a new recording (docs/recording.md).

    Raises:
        ValueError, TypeError: an argument is invalid; the message names it.
        ConnectionError: the endpoint does not list its models.
    """
    if n_runners < 1:
        raise ValueError(f"n_runners must be at least 1, got {n_runners}")
    rows = RowOptions(
        max_prompt_length=max_prompt_length,
        max_response_length=max_response_length,
        trim=True,
        pad_token_id=0,
        **row_options,
    )
    model = model or first_model(endpoint, api_key)
    algorithm = _DryRunAlgorithm(
        _EndpointProxy(model, endpoint, api_key, timeout_seconds=seconds_per_call),
        rows,
        {
            "train_rollout_n": rollouts_per_sample,
            "train_information": {"model": model, "temperature": temperature},
            "tokenizer": tokenizer,
            "llm_timeout_seconds": seconds_per_call,
            "rollout_deadline_seconds": seconds_per_rollout,
            "failed_rollouts": failed_rollouts,
            "sampling": sampling,
            "max_tokens": max_tokens,
        },
    )
    writer = None
    if record is not None:
        about = {"phase": "train", "step": 1, "policy_version": 0, "rows": rows.to_header()}
        writer = RecordingWriter(Path(record), about)
    trainer = agentlightning.Trainer(
        algorithm=algorithm,
        tracer=agentlightning.OtelTracer() if tracer is None else tracer,
        runner={"type": "agentlightning.LitAgentRunner", "poll_interval": _POLL_SECONDS},
        strategy=_strategy(n_runners),
        store=agentlightning.InMemoryLightningStore(thread_safe=True),
    )
    if not isinstance(agent, agentlightning.LitAgent):
        agent = agentlightning.rollout(agent)
    try:
        trainer.fit(agent, dataset)
        if writer is not None:
            writer.write_many(algorithm.rollouts)
    finally:
        if writer is not None:
            writer.close()
    return algorithm.found()


def first_model(endpoint: str, api_key: str | None) -> str:
    """Get the first model of an OpenAI-compatible server.

    Raises:
        ConnectionError: the server does not answer, or lists no model.
    """
    url = f"{_base(endpoint)}/v1/models"
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=_MODELS_SECONDS) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConnectionError(
            f"endpoint={endpoint!r} does not list its models ({url}: {error!r}): expected "
            "the address of an OpenAI-compatible server, or give the model's name"
        ) from error


class _EndpointProxy(LLMProxy):
    """Sends all calls to one endpoint, whatever servers the daemon sets."""

    def __init__(self, model: str, endpoint: str, api_key: str | None, **settings: Any) -> None:
        self._endpoint_entry = {
            "model_name": model,
            "litellm_params": {
                "model": f"hosted_vllm/{model}",
                "api_base": f"{_base(endpoint)}/v1",
                "api_key": api_key,
            },
        }
        super().__init__(**settings)

    def update_model_list(self, model_list: list[Any]) -> None:
        super().update_model_list([self._endpoint_entry])


class _KeepingDaemon(AgentModeDaemon):
    def __init__(self, rollouts: list[FinishedRollout], **settings: Any) -> None:
        super().__init__(**settings)
        self._kept_rollouts = rollouts

    def rollout_finished(self, rollout: FinishedRollout) -> None:
        self._kept_rollouts.append(rollout)


class _DryRunAlgorithm(agentlightning.Algorithm):
    def __init__(
        self, proxy: LLMProxy, rows: RowOptions, daemon_settings: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self._proxy = proxy
        self._rows = rows
        self._daemon_settings = daemon_settings
        self.rollouts: list[FinishedRollout] = []
        self.batch: agl_fast.Batch | None = None
        self.metrics: dict[str, float] = {}

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        rows = self._rows
        daemon = _KeepingDaemon(
            self.rollouts,
            port=None,
            mini_batch_size=1,
            pad_token_id=rows.pad_token_id,
            reward_fillna_value=rows.reward_fillna_value,
            llm_proxy=self._proxy,
            store=self.get_store(),
            trace_aggregator={
                **rows.to_config()["agentlightning"]["trace_aggregator"],
                "debug": self._daemon_settings["tokenizer"] is not None,
            },
            **self._daemon_settings,
        )
        daemon.start()
        try:
            samples = [Samples(train_dataset)[i] for i in range(len(train_dataset))]
            columns: Mapping[str, Any] = columns_of(samples)
            daemon.set_up_data_and_server(columns, ["the endpoint"], is_train=True)
            daemon.run_until_all_finished()
            widths = rows.max_prompt_length, rows.max_response_length
            try:
                self.batch, self.metrics = daemon.training_batch(*widths, "cpu", 1)
            except agl_fast.EmptyBatchError as empty:
                self.metrics = empty.metrics
        finally:
            daemon.stop()

    def found(self) -> DryRun:
        summary = TokenSummary(self._rows.level)
        if self.batch is not None:
            summary.add(self.metrics)
        return DryRun(list(self.rollouts), self.batch, self.metrics, summary)


def _base(endpoint: str) -> str:
    return endpoint.rstrip("/").removesuffix("/v1")


def _strategy(n_runners: int) -> dict[str, Any]:
    if n_runners == 1:
        return {"type": "shm", "n_runners": 1, "main_thread": "algorithm"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return {"type": "cs", "n_runners": n_runners, "server_host": "127.0.0.1", "server_port": port}
