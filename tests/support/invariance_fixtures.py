"""What the invariance of rows and of trees is tested with: models, ranks, what calls teach."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from support import engine_workers, invariance
from support.invariance import Cut, Learned
from support.paths import SUPPORT


def fixtures(script: str, calls: Cut) -> tuple[Any, ...]:
    """Fixtures of a module, to be assigned there to their names.

    Args:
        script: of a rank, beside this file; two of them learn while the tests of one rank run.
        calls: rows of one call each.

    Returns:
        folder: of the models.
        config: of them, as it was composed.
        one_rank: torch.distributed is ready, for one process.
        of_two_ranks: what the script's ranks have learned.
        from_calls: what the plain model learns from `calls`, by policy loss and aggregation.
    """

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("invariance")

    @pytest.fixture(scope="module")
    def config(folder: Path) -> Any:
        invariance.tiny_model(folder / "model", 3)
        invariance.tiny_model(folder / "reference", 4)
        config = invariance.configured(folder / "model")
        OmegaConf.save(config, folder / "config.yaml")
        return config

    @pytest.fixture(scope="module")
    def two_ranks(
        request: pytest.FixtureRequest, folder: Path, config: Any
    ) -> Iterator[list[subprocess.Popen[bytes]]]:
        chosen = {
            (item.callspec.params["policy_loss"], item.callspec.params["aggregation"])
            for item in request.session.items
            if item.path == request.path
            and "of_two_ranks" in item.fixturenames
            and "policy_loss" in item.fixturenames
        }
        objectives = [each for each in invariance.OBJECTIVES if each in chosen]
        (folder / "objectives.json").write_text(json.dumps(objectives))
        with engine_workers.two_ranks(SUPPORT.joinpath(script), folder) as ranks:
            yield ranks

    @pytest.fixture(scope="module")
    def one_rank(two_ranks: Any) -> Iterator[None]:
        with engine_workers.one_rank():
            dist.init_process_group("gloo")
            yield

    @pytest.fixture(scope="module")
    def of_two_ranks(two_ranks: list[subprocess.Popen[bytes]], folder: Path) -> dict[Any, Learned]:
        engine_workers.wait_for(two_ranks, folder)
        learned: dict[Any, Learned] = torch.load(folder / "learned.pt", weights_only=False)
        return learned

    @pytest.fixture(scope="module")
    def from_calls(one_rank: None, config: Any) -> Callable[[str, str], Learned]:
        @cache
        def learned(policy_loss: str, aggregation: str) -> Learned:
            asked = invariance.ask_for(config, policy_loss, aggregation)
            return invariance.learned_by_plain_model(calls, asked)

        return learned

    return folder, config, two_ranks, one_rank, of_two_ranks, from_calls
