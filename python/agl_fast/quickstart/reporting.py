"""The trainer and daemon of the quickstart: those of `VERL`, telling what they see."""

from __future__ import annotations

from typing import Any

from agl_fast.quickstart.run_log import PlayedGame, RunLog
from agl_fast.verl.daemon import AgentModeDaemon
from agl_fast.verl.trainer import AgentLightningTrainer


def reporting_to(
    log: RunLog,
) -> tuple[type[AgentLightningTrainer], type[AgentModeDaemon]]:
    """A trainer and a daemon for `VERL` that tell `log` what they see."""

    class ReportingDaemon(AgentModeDaemon):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.seen: list[Any] = []

        def _take(self, outcome: Any) -> None:
            super()._take(outcome)
            self.seen.append(outcome)

        def clear_data_and_server(self) -> None:
            super().clear_data_and_server()
            self.seen.clear()

        def get_train_data_batch(self, *arguments: Any, **keywords: Any) -> Any:
            found = super().get_train_data_batch(*arguments, **keywords)
            rollouts = [each.training_rollout(self.failed_rollouts) for each in self.seen]
            batch = self.last_batch
            assert batch is not None
            rewards = [each.reward for each in batch.rollouts]
            log.sampled([each for each in rollouts if each], sum(rewards) / len(rewards))
            return found

        def get_test_metrics(self) -> dict[str, float]:
            log.games[self.policy_version] = [
                PlayedGame(dict(each.sample), each.calls, each.reward or 0.0) for each in self.seen
            ]
            return super().get_test_metrics()

    class ReportingTrainer(AgentLightningTrainer):
        def validate(self) -> dict[str, float]:
            metrics = super().validate()
            log.validated(self.global_steps, metrics["val/reward"])
            return metrics

    return ReportingTrainer, ReportingDaemon
