"""`AgentModeDaemon`: runs samples through agents and builds rows from their calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from agentlightning import LightningStore
from agentlightning.types import RolloutConfig
from verl import DataProto

import agl_fast
from agl_fast.proxy.answer_checks import ModelLimits
from agl_fast.recording import RunRecorder
from agl_fast.rollouts.batch_runner import (
    CollectedStep,
    RunningBatch,
    require_json,
    rollout_requests,
    samples_of,
)
from agl_fast.rollouts.collecting import CollectsGroups
from agl_fast.rollouts.daemon_settings import (
    check_arguments,
    model_entry,
    proxy_for,
    sampling_policies,
    source_of,
)
from agl_fast.rollouts.finished import FailedRollouts, FinishedRollout
from agl_fast.rollouts.progress import PendingRollouts
from agl_fast.rollouts.rollout_metrics import Failures, ProxyCounts, concurrency, run_metrics
from agl_fast.rollouts.runners import FirstRunner
from agl_fast.rollouts.training_rows import TrainingRows
from agl_fast.rollouts.validation import ValidatedRollout, validation_metrics
from agl_fast.training.credit import CreditAssignment
from agl_fast.verl.store_sessions import close_session
from agl_fast.verl.supervision.deadlines import Deadlines, default_deadlines
from agl_fast.verl.supervision.loop_thread import LoopThread

logger = logging.getLogger(__name__)


class AgentModeDaemon(CollectsGroups):
    """Run a trainer's samples through the agents and build rows from their calls.

    One training step, or one batch of a validation::

        daemon.policy_version = step
        daemon.set_up_data_and_server(data, server_addresses, is_train=True)
        daemon.run_until_all_finished()
        rows, metrics = daemon.get_train_data_batch(2048, 4096, "cpu", step)  # or get_test_metrics
        daemon.clear_data_and_server()

    Several batches, of training and of validation, may run at the same time::

        batches = [daemon.begin_batch(data, server_addresses, is_train=True), ...]
        daemon.wait_for(*batches)
        rows, metrics = daemon.training_batch(2048, 4096, "cpu", step, batches[0])
        daemon.end_batch(batches[0])

    Rollouts are enqueued in the store, where runners get them with the resource ``main_llm``, a
    ``ProxyLLM``. The calls of the latest attempt come from the proxy's recorder, rewards from the
    store: a reward belongs to the last call finished before it, and the last reward to the rollout.
    Rows are built as docs/rows.md specifies, in the order of the samples.

    Call all methods from one thread. The daemon uses the store on its own thread.

    Args:
        port: of the server of mode ``v0``. The proxy's port is in ``proxy_settings``.
        train_rollout_n: rollouts per training sample; a validation sample has one.
        train_information: ``model``, the name in agents' requests; ``served_model``, the vLLM
            servers' name of it (default: the same); and the sampling parameters of training:
            ``temperature`` (0.7), ``top_p`` (1.0), ``top_k`` (-1: all tokens).
        tokenizer: used with ``trace_aggregator.debug`` to recognise retokenised text.
        pad_token_id: id of padding.
        reward_fillna_value: reward of rollouts without one.
        llm_timeout_seconds: maximum duration of a call; also the store's limit for a rollout
            (``rollout_config``).
        mode: ``v1``: rollouts go through the store. ``v0``, deprecated: an ``AgentLightningServer``
            gives them to clients, and calls come from the triplets that clients post.
        llm_proxy: a stock proxy is replaced, with a warning. None, or mode ``v0``: makes one.
        store: Agent-lightning's, thread-safe; None in mode ``v0``.
        adapter: with None or Agent-lightning's default, every recorded call counts. With another
            one, calls whose response id is in none of its triplets are excluded.
        processor: refused if it requires M-RoPE position ids.
        mini_batch_size, image_base_dir: kept as attributes.
        trace_aggregator: keys of ``agentlightning.trace_aggregator``
            (``agl_fast/verl/config/config.yaml``).
        rollout_deadline_seconds: a rollout that runs longer is cancelled in the store and counts
            as failed. None: ``llm_timeout_seconds``.
        runner_silent_seconds: an attempt is given up in the store if its runner sends no heartbeat
            for so long, or has abandoned it. None: never.
        first_runner_seconds: the run ends if no runner connects for so long. None:
            ``rollout_deadline_seconds``.
        failed_rollouts: ``skip``: rollouts that failed or have no trainable call leave their group;
            ``zero``: failed rollouts count in their group with reward 0.
        sampling: ``enforce``: the sampling parameters of ``train_information`` replace those in
            agents' requests; ``allow``: agents' parameters apply.
        validation_sampling: default ``temperature``, ``top_p``, ``top_k`` of validation calls;
            missing ones are those of training, or temperature 0.0.
        max_tokens: default limit of an answer's length.
        proxy_settings: ``port``, ``host``, ``advertise_host``, ``api_key`` of a proxy made here.
        credit: rollout hook and credit strategy of training rollouts.
        check: called about once a second while rollouts run; an exception ends the wait.
        deadlines: of store and proxy; None: the defaults.
        run_recorder: records every finished rollout; ``stop`` closes it.
        model_limits: facts of the model with which the proxy validates answers.

    Attributes:
        llm_proxy, store: the ones in use.
        last_batch: the ``agl_fast.Batch`` of the last ``get_train_data_batch``.
        failures: of the training steps so far.
        validated_rollouts: of the current validation batch. ``validation_metrics`` accepts those of
            several batches together.

    Raises:
        ValueError, TypeError: a missing or invalid argument; the message names it.
    """

    def __init__(
        self,
        port: int | None,
        train_rollout_n: int,
        train_information: Mapping[str, Any],
        tokenizer: Any,
        mini_batch_size: int,
        pad_token_id: int,
        reward_fillna_value: float = 0.0,
        llm_timeout_seconds: float = 1200.0,
        mode: Literal["v0", "v1"] = "v1",
        llm_proxy: Any = None,
        store: LightningStore | None = None,
        adapter: Any = None,
        processor: Any = None,
        image_base_dir: str | None = None,
        trace_aggregator: Mapping[str, Any] | None = None,
        *,
        rollout_deadline_seconds: float | None = 3600.0,
        runner_silent_seconds: float | None = 120.0,
        first_runner_seconds: float | None = 300.0,
        failed_rollouts: FailedRollouts = "skip",
        sampling: Literal["enforce", "allow"] = "enforce",
        validation_sampling: Mapping[str, float] | None = None,
        max_tokens: int | None = None,
        proxy_settings: Mapping[str, Any] | None = None,
        credit: CreditAssignment | None = None,
        check: Callable[[], None] | None = None,
        deadlines: Deadlines | None = None,
        run_recorder: RunRecorder | None = None,
        model_limits: ModelLimits | None = None,
    ) -> None:
        check_arguments(
            mode=mode,
            store=store,
            port=port,
            train_rollout_n=train_rollout_n,
            train_information=train_information,
            failed_rollouts=failed_rollouts,
            sampling=sampling,
            llm_timeout_seconds=llm_timeout_seconds,
            rollout_deadline_seconds=rollout_deadline_seconds,
            runner_silent_seconds=runner_silent_seconds,
            first_runner_seconds=first_runner_seconds,
            processor=processor,
        )

        self.port = port
        self.train_rollout_n = train_rollout_n
        self.train_information = train_information
        self.tokenizer = tokenizer
        self.mini_batch_size = mini_batch_size
        self.pad_token_id = pad_token_id
        self.reward_fillna_value = reward_fillna_value
        self.llm_timeout_seconds = llm_timeout_seconds
        self.mode = mode
        self.adapter = adapter
        self.processor = processor
        self.image_base_dir = image_base_dir
        self.trace_aggregator = dict(trace_aggregator or {})
        self.rollout_deadline_seconds = rollout_deadline_seconds
        self.runner_silent_seconds = runner_silent_seconds
        self.failed_rollouts = failed_rollouts
        self.store = store
        settings = {"timeout_seconds": llm_timeout_seconds, **(proxy_settings or {})}
        self.llm_proxy = proxy_for(store, llm_proxy, settings)
        self.check = check
        self._deadlines = deadlines or default_deadlines()
        self.llm_proxy.start_limit = self._deadlines.enqueue
        self.llm_proxy.stop_limit = self._deadlines.cancel
        self.run_recorder = run_recorder
        self.llm_proxy.policy_version = 0
        self.is_train = True
        self.last_batch: agl_fast.Batch | None = None
        self.validated_rollouts: list[ValidatedRollout] = []
        self.failures = Failures()

        self._policies = sampling_policies(
            train_information,
            validation_sampling or {},
            enforce=sampling == "enforce",
            max_tokens=max_tokens,
        )
        if model_limits is not None:
            self.llm_proxy.model_limits = model_limits
        self._proxy_counts = ProxyCounts(self.llm_proxy.recorder)
        legacy = (settings.get("host"), port, llm_timeout_seconds)
        self._source = source_of(store, adapter, self.llm_proxy, self._deadlines, legacy)
        self._new_rows = partial(
            TrainingRows,
            self.trace_aggregator,
            failed_rollouts,
            credit=credit or CreditAssignment(),
            tokenizer=tokenizer,
            policy=self._policies["train"],
            engine=self.llm_proxy.engine,
            pad_token_id=pad_token_id,
            reward_fillna_value=reward_fillna_value,
        )
        self._rows = self._new_rows()
        self._server_addresses: list[str] = []
        self._started_proxy = False
        self._loop: LoopThread | None = None
        self._batch: RunningBatch | None = None
        self._batches: list[RunningBatch] = []  # all that have begun and not ended
        self._stale: set[str] = set()
        self._is_starvation_reported = False
        self._first_runner = FirstRunner(first_runner_seconds)

    @property
    def policy_version(self) -> int:
        """Version number of the weights that the servers hold; stored with every call."""
        return self.llm_proxy.policy_version or 0

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self.llm_proxy.policy_version = version

    def start(self) -> None:
        """Start the daemon's thread and, in mode ``v0``, the server.

        The proxy starts with the first data.

        Raises:
            OSError: the port of mode ``v0`` cannot be bound.
        """
        if self._loop is None:
            self._source.start()
            self._loop = LoopThread("agl_fast-daemon")

    def stop(self) -> None:
        """Give up running rollouts, stop the proxy if it was started here, and end the thread."""
        if self._loop is None:
            return
        with ExitStack() as ends:
            if self.run_recorder is not None:
                ends.callback(self.run_recorder.close, self._deadlines.record.seconds)
            ends.callback(self._source.stop)
            ends.callback(self._end_loop)
            ends.callback(self._stop_proxy)
            for batch in list(self._batches):
                ends.callback(self.end_batch, batch)
            ends.callback(self.end_collection)
            self.clear_data_and_server()

    def _stop_proxy(self) -> None:
        if self._loop is not None and self._started_proxy and self.llm_proxy.is_running():
            stop = self.llm_proxy.stop()
            self._loop.run(stop, what="stopping the proxy", limit=self._deadlines.cancel)

    def _end_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            what = "closing the connections to the store"
            loop.run(close_session(self.store), what=what, limit=self._deadlines.store_answer)
        finally:
            loop.stop()

    def set_up_data_and_server(
        self,
        data: Mapping[str, Sequence[Any]],
        server_addresses: Sequence[str],
        is_train: bool = True,
    ) -> None:
        """Enqueue samples; rollouts of the previous data that still run are given up.

        Args:
            data: columns of one length, one sample per row. Each sample gets a fresh ``data_id``.
            server_addresses: ``host:port`` of every vLLM server.
            is_train: enqueue ``train_rollout_n`` rollouts per sample, else one.

        Raises:
            ValueError: there are no samples, or no servers.
            TypeError: the store is served, and a sample has a value that JSON cannot hold.
            RuntimeError: the store failed. OSError: the proxy cannot start.
        """
        samples = self._samples(data, server_addresses)
        self.clear_data_and_server()
        self.is_train = is_train
        rows = self._rows if is_train else None
        self._batch = self._begin_batch(samples, server_addresses, rows)

    def begin_batch(
        self,
        data: Mapping[str, Sequence[Any]],
        server_addresses: Sequence[str],
        is_train: bool = True,
    ) -> RunningBatch:
        """Enqueue samples beside those of other batches that run.

        `wait_for` and `end_batch` take the returned batch. Arguments and errors are those of
        `set_up_data_and_server`, whose batch is one of them.

        Raises:
            RuntimeError: in mode ``v0``, a batch runs already.
        """
        samples = self._samples(data, server_addresses)
        if self.store is None and self._batches:
            raise RuntimeError("mode='v0' runs one batch at a time: end the other one first")
        return self._begin_batch(samples, server_addresses, self._new_rows() if is_train else None)

    def _samples(
        self, data: Mapping[str, Sequence[Any]], server_addresses: Sequence[str]
    ) -> list[dict[str, Any]]:
        samples = samples_of(data)
        self._require_enqueueable(samples)
        if not server_addresses:
            raise ValueError("server_addresses is empty: there is nobody to answer the agents")
        return samples

    def _require_enqueueable(self, samples: list[dict[str, Any]]) -> None:
        if self.store is not None and self.store.capabilities.get("zero_copy"):  # it is served
            require_json(samples)

    def _begin_batch(
        self,
        samples: list[dict[str, Any]],
        server_addresses: Sequence[str],
        rows: TrainingRows | None,
    ) -> RunningBatch:
        self.start()
        assert self._loop is not None
        set_up = self._set_up(samples, list(server_addresses), rows)
        limit = self._deadlines.enqueue
        batch = self._loop.run(set_up, what="setting up the rollouts", limit=limit)
        self._batches.append(batch)
        return batch

    def rollout_config(self) -> RolloutConfig:
        """The store's limits of a rollout; override it to retry failed attempts."""
        seconds = self.llm_timeout_seconds
        return RolloutConfig(timeout_seconds=seconds, unresponsive_seconds=seconds)

    async def _use_servers(self, server_addresses: list[str]) -> None:
        """Start the proxy in front of the servers."""
        if server_addresses != self._server_addresses:
            model = self.train_information["model"]
            served = self.train_information.get("served_model", model)
            entries = [model_entry(model, served, each) for each in server_addresses]
            self.llm_proxy.update_model_list(entries)
            self._server_addresses = server_addresses
        if not self.llm_proxy.is_running():
            await self.llm_proxy.start()
            self._started_proxy = True

    async def _enqueue(
        self, samples: list[dict[str, Any]], phase: Literal["train", "val"]
    ) -> tuple[list[Any], dict[str, dict[str, Any]]]:
        """Enqueue the rollouts of samples; the store's rollouts, and the input of each."""
        policy, version = self._policies[phase], self.policy_version
        resources_id = await self._source.set_up(
            self.train_information["model"], policy.temperature, version
        )
        n = self.train_rollout_n if phase == "train" else 1
        requests = rollout_requests(samples, n, phase, resources_id, self.rollout_config())
        self.llm_proxy.resume()
        with self.llm_proxy.announcing():
            if self.store is None:  # calls do not name their rollout
                self.llm_proxy.announce((), phase, policy)
            rollouts = await self._source.enqueue(requests)
            if self.store is not None:
                self.llm_proxy.announce([each.rollout_id for each in rollouts], phase, policy)
        inputs = {
            rollout.rollout_id: request.input
            for rollout, request in zip(rollouts, requests, strict=True)
        }
        return rollouts, inputs

    async def _set_up(
        self,
        samples: list[dict[str, Any]],
        server_addresses: list[str],
        rows: TrainingRows | None,
    ) -> RunningBatch:
        await self._use_servers(server_addresses)
        trains = rows is not None or self._collector is not None
        self._proxy_counts.begin(is_train=trains or any(each.is_train for each in self._batches))
        version = self.policy_version
        rollouts, inputs = await self._enqueue(samples, "val" if rows is None else "train")
        return RunningBatch(
            self._source, self._pending(rollouts), inputs, policy_version=version, rows=rows
        )

    def _pending(self, rollouts: Sequence[Any]) -> PendingRollouts:
        return PendingRollouts(
            self._source,
            rollouts,
            self._stale,
            self.rollout_deadline_seconds or self.llm_timeout_seconds,
            self.runner_silent_seconds,
            self._first_runner,
        )

    def run_until_all_finished(self, verbose: bool = True) -> None:
        """Wait until every rollout has finished; each is collected as soon as it has.

        Args:
            verbose: print the number of finished rollouts every ten seconds.

        Raises:
            TimeoutError: no runner takes the rollouts.
            RuntimeError: the store failed (its error is the cause), or no call was answered because
                the servers do not know the requested model.
            ValueError: the adapter matches none of a rollout's calls, or a call or reward is
                invalid; the message names the rollout.
        """
        if self._batch is None or self._loop is None:
            logger.warning("There are no rollouts to wait for.")
            return
        self.wait_for(self._batch, verbose=verbose)

    def wait_for(self, *batches: RunningBatch, verbose: bool = True) -> None:
        """`run_until_all_finished` for all rollouts of some batches."""
        if self._loop is None:
            raise RuntimeError("the daemon was stopped, its batches have ended")
        collect = _collect_all(
            [each.collect(partial(self._take, each), verbose=verbose) for each in batches]
        )
        self._loop.run(collect, what="waiting for rollouts", meanwhile=self.check)
        if self.store is not None:
            for each in batches:
                self.llm_proxy.require_known_model(each.rollout_ids)

    def rollout_finished(self, rollout: FinishedRollout) -> None:
        """Called with each rollout of a training or validation batch; does nothing by default.

        For subclasses that print, keep or count rollouts. Called on the daemon's own thread while
        other rollouts run, in the order of enqueueing, failed rollouts included, before a training
        rollout becomes rows. It should return quickly, as it delays other rollouts. An exception
        ends ``run_until_all_finished``. Do not modify the calls: they are trained on.
        """

    def _take(self, batch: RunningBatch | CollectedStep, rollout: FinishedRollout) -> None:
        self._observe(rollout, batch.policy_version, is_train=batch.is_train)
        if batch.rows is not None:
            batch.rows.add(rollout)

    def _observe(self, rollout: FinishedRollout, policy_version: int, *, is_train: bool) -> None:
        if self.run_recorder is not None:
            self.run_recorder.record(rollout, policy_version, is_train=is_train)
        self.rollout_finished(rollout)

    def get_train_data_batch(
        self,
        max_prompt_length: int,
        max_response_length: int,
        device: torch.device | str | None,
        global_steps: int,
    ) -> tuple[DataProto, dict[str, Any]]:
        """The rows of all rollouts, and metrics.

        The proxy aborts every request of the batch and answers none, so that the numbers have what
        comes to nothing by that.

        Args:
            max_prompt_length: P, at least 1.
            max_response_length: R, at least 1.
            device: where the tensors live.
            global_steps: of the trainer.

        Returns:
            B rows with the tensors and columns of docs/rows.md, among them ``data_id_list``,
            ``rollout_id_list`` and, at level transition, ``turn_index_list``; and ``training/*``.
            ``last_batch`` is the batch with its rollout table.

        Raises:
            RuntimeError: the data is of a validation, or rollouts are still running.
            EmptyBatchError: no rollout gave a row.
        """
        batch, metrics = self.training_batch(
            max_prompt_length, max_response_length, device, global_steps
        )
        rows = DataProto.from_dict(tensors=dict(batch.tensors), non_tensors=dict(batch.columns))
        return rows, metrics

    def training_batch(
        self,
        max_prompt_length: int,
        max_response_length: int,
        device: torch.device | str | None,
        global_steps: int,
        running: RunningBatch | CollectedStep | None = None,
    ) -> tuple[agl_fast.Batch, dict[str, Any]]:
        """``get_train_data_batch`` with an ``agl_fast.Batch`` in place of verl's DataProto.

        Args:
            running: of `begin_batch` or `collect_groups`; None: the last one of `collect_groups`,
                or that of `set_up_data_and_server`.
        """
        running = running or self._collected
        if not isinstance(running, CollectedStep):
            running = self._finished_batch(running, is_train=True)
        assert running.rows is not None
        self._end_requests(running)
        if notice := self.failures.add(running.finished):
            logger.info("step %s: %s", global_steps, notice)
        metrics = run_metrics(
            running.finished,
            running.rows.counts + Counter(running.counts),
            self._proxy_counts.of_step(running),
            time.time() - running.enqueued_at,
            self.run_recorder.counts if self.run_recorder is not None else {},
        )
        if isinstance(running, CollectedStep):
            names = running.collection.items()
            metrics |= {f"training/collection/{name}": value for name, value in names}
        else:
            metrics |= self._concurrency_metrics(running.finished)
        try:
            batch = running.rows.build(max_prompt_length, max_response_length, device, global_steps)
        except agl_fast.EmptyBatchError as error:
            happened = {name: value for name, value in metrics.items() if value}
            what = f"step {global_steps}: none of {len(running.finished)} rollouts gave a row"
            raise agl_fast.EmptyBatchError(
                f"{what}: {error}; {happened}", error.accounting, error.metrics | metrics
            ) from error
        self.last_batch = batch
        return batch, {**batch.metrics, **metrics}

    def _concurrency_metrics(self, rollouts: Sequence[FinishedRollout]) -> dict[str, float]:
        measured = concurrency(rollouts, len(self._server_addresses))
        if measured.notice is not None and not self._is_starvation_reported:
            self._is_starvation_reported = True
            logger.warning("%s", measured.notice)
        return measured.metrics

    def get_test_metrics(self) -> dict[str, float]:
        """``val/*`` of the validation batch, and ``val/{data_source}/*`` of each data source.

        Raises:
            RuntimeError: the data is not of a validation, or rollouts are still running.
        """
        return self.validate_batch()

    def validate_batch(self, running: RunningBatch | None = None) -> dict[str, float]:
        """``get_test_metrics`` of a batch.

        Args:
            running: of `begin_batch`; None: the one of `set_up_data_and_server`.
        """
        rollouts = self._finished_batch(running, is_train=False).finished
        if notice := Failures().add(rollouts):
            logger.info("validation: %s", notice)
        self.validated_rollouts = [
            ValidatedRollout.of(each, self.reward_fillna_value) for each in rollouts
        ]
        return validation_metrics(self.validated_rollouts)

    def clear_data_and_server(self) -> None:
        """Forget the data: `end_batch` for the batch of `set_up_data_and_server`."""
        batch, self._batch = self._batch, None
        self._rows.clear()
        self.validated_rollouts = []
        if batch is not None:
            self.end_batch(batch)

    def end_batch(self, batch: RunningBatch) -> None:
        """Forget a batch. Rollouts that have not finished are cancelled in the store.

        The proxy aborts the batch's requests and refuses new ones. After the last batch it aborts
        all requests and answers none until the next batch: servers may sleep.
        """
        if batch not in self._batches:
            return
        self.llm_proxy.refuse(batch.rollout_ids)
        self._stale = set(batch.running)
        if self._loop is not None:
            try:
                if self._stale:
                    limit = self._deadlines.cancel
                    self._loop.run(batch.cancel(), what="cancelling rollouts", limit=limit)
                self._end_requests(batch)
            finally:
                self._batches.remove(batch)

    def _end_requests(self, batch: RunningBatch | CollectedStep) -> None:
        if self._loop is not None:
            limit = self._deadlines.cancel
            self._loop.run(self._close(batch), what="aborting requests", limit=limit)

    async def _close(self, batch: RunningBatch | CollectedStep) -> None:
        self.llm_proxy.refuse(batch.rollout_ids)
        if self._batches == [batch] and self._collector is None:
            await self.llm_proxy.pause()
        await self.llm_proxy.close(batch.rollout_ids)

    def _finished_batch(self, batch: RunningBatch | None, *, is_train: bool) -> RunningBatch:
        batch = batch or self._batch
        if (self.is_train if batch is None else batch.is_train) != is_train:
            phases = ("training", "validation")
            expected, actual = phases if is_train else phases[::-1]
            raise RuntimeError(f"the data is of a {actual}, not of a {expected}")
        if batch is None:
            raise RuntimeError("there is no data: call set_up_data_and_server")
        if running := len(batch.running):
            raise RuntimeError(f"{running} rollouts are running: call run_until_all_finished")
        return batch


async def _collect_all(collecting: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all at the same time; the first error ends the others."""
    tasks = [asyncio.ensure_future(each) for each in collecting]
    try:
        await asyncio.gather(*tasks)
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
