"""The trainer and daemon of the quickstart: those of `VERL`, telling what they see."""

from __future__ import annotations

from typing import Any

import agl_fast
from agl_fast.quickstart.run_log import Played, RunLog
from agl_fast.rollouts import AgentModeDaemon, FinishedRollout
from agl_fast.rollouts.finished import rollout_for_training
from agl_fast.training import AgentLightningTrainer


def reporting_to(
    log: RunLog,
) -> tuple[type[AgentLightningTrainer], type[AgentModeDaemon]]:
    """A trainer and a daemon for `VERL` that tell `log` what they see."""

    class ReportingDaemon(AgentModeDaemon):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.finished: list[FinishedRollout] = []

        def rollout_finished(self, rollout: FinishedRollout) -> None:
            self.finished.append(rollout)

        def clear_data_and_server(self) -> None:
            super().clear_data_and_server()
            self.finished.clear()

        def training_batch(
            self, *arguments: Any, **keywords: Any
        ) -> tuple[agl_fast.Batch, dict[str, Any]]:
            batch, metrics = super().training_batch(*arguments, **keywords)
            rollouts = [rollout_for_training(each, self.failed_rollouts) for each in self.finished]
            rewards = [each.reward for each in batch.rollouts]
            trained = [each for each in rollouts if each]
            log.sampled(trained, sum(rewards) / len(rewards), left_out=len(rollouts) - len(trained))
            return batch, metrics

        def get_test_metrics(self) -> dict[str, float]:
            log.played[self.policy_version] = [
                Played(dict(each.sample), each.calls, each.reward or 0.0) for each in self.finished
            ]
            return super().get_test_metrics()

    class ReportingTrainer(AgentLightningTrainer):
        def sync_weights(self) -> None:
            super().sync_weights()
            log.stage_ended("training" if log.rewards else "start of Ray, FSDP2 and vLLM")

        def validate(self) -> dict[str, float]:
            metrics = super().validate()
            log.validated(self.global_steps, metrics["val/reward"])
            log.stage_ended("validation")
            return metrics

    return ReportingTrainer, ReportingDaemon
