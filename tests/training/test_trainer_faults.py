"""A full disk, and Ctrl-C at each stage of a run, without Ray or models."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

# First: importing verl makes noise.
from support.training_loop import Loop, keep_logs  # isort: skip

from verl.utils.fs import local_mkdir_safe

from agl_fast.training.checkpoints import (
    last_whole_checkpoint,
    point_to_loadable_checkpoint,
    remove_lock,
)
from agl_fast.verl import entrypoint
from agl_fast.verl.ray_cluster import Daemons
from agl_fast.verl.supervision.deadlines import OWN_CONFIG
from agl_fast.verl.supervision.leftovers import processes_of_run
from support.running_proxy import wait_until

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, Any]]]:
    return keep_logs(monkeypatch)


def save(root: Path, step: int, *parts: str, tracker: bool = True) -> None:
    """As verl does: weights, the data loader's state, the tracker."""
    (root / f"global_step_{step}").mkdir(parents=True, exist_ok=True)
    for part in parts:
        (root / f"global_step_{step}" / part).mkdir(parents=True, exist_ok=True)
    torch.save({"step": step}, root / f"global_step_{step}" / "data.pt")
    if tracker:
        (root / TRACKER).write_text(str(step))


def named(root: Path) -> str | None:
    tracker = root / TRACKER
    return tracker.read_text() if tracker.exists() else None


def fail_to_save(root: Path, step: int, begin: Any = lambda: None, error: Any = FULL) -> None:
    with last_whole_checkpoint(str(root), step):
        begin()
        raise error


def message_of_failure(root: Path, step: int, begin: Any = lambda: None) -> str:
    with pytest.raises(RuntimeError, match=rf"step {step} .*No space left") as caught:
        fail_to_save(root, step, begin)
    assert caught.value.__cause__ is FULL
    return str(caught.value)


def test_a_disk_that_is_full_at_once_keeps_the_checkpoint_before(tmp_path):
    save(tmp_path, 2, "actor")
    assert "resumes from global_step_2" in message_of_failure(tmp_path, 4)
    assert named(tmp_path) == "2"


def test_the_first_checkpoint_does_not_fit(tmp_path):
    def half() -> None:
        save(tmp_path, 2, "actor", tracker=False)
        (tmp_path / "global_step_2" / "data.pt").write_bytes(b"PK\x03\x04half")
        (tmp_path / TRACKER).touch()

    assert "no whole checkpoint" in message_of_failure(tmp_path, 2, half)
    assert named(tmp_path) is None


def test_a_tracker_that_was_emptied_names_the_new_checkpoint(tmp_path):
    """Everything fits but the last file."""
    save(tmp_path, 2, "actor")

    def all_but_the_tracker() -> None:
        save(tmp_path, 4, "actor", tracker=False)
        (tmp_path / TRACKER).write_text("")

    assert "resumes from global_step_4" in message_of_failure(tmp_path, 4, all_but_the_tracker)
    assert named(tmp_path) == "4"


@pytest.mark.parametrize(("parts", "expected"), [(("actor",), "4"), (("actor", "critic"), None)])
def test_the_checkpoint_before_was_removed_already(tmp_path, parts, expected):
    """With one to keep, verl removes it when the actor's new one is whole."""
    save(tmp_path, 2, *parts)

    def weights_only() -> None:
        save(tmp_path, 4, *parts, tracker=False)
        (tmp_path / "global_step_4" / "data.pt").write_bytes(b"")
        shutil.rmtree(tmp_path / "global_step_2" / "actor")

    message_of_failure(tmp_path, 4, weights_only)
    assert named(tmp_path) == expected
    assert not (tmp_path / "global_step_4" / "data.pt").exists()


def test_a_tracker_that_cannot_be_written_says_what_belongs_into_it(tmp_path, monkeypatch):
    save(tmp_path, 2, "actor")

    def full(*_: Any, **__: Any) -> None:
        raise FULL

    def half() -> None:
        (tmp_path / TRACKER).write_text("")
        monkeypatch.setattr(Path, "write_text", full)

    assert f"write 2 into {tmp_path / TRACKER}" in message_of_failure(tmp_path, 4, half)


def test_ctrl_c_while_saving_keeps_the_checkpoint_before(tmp_path):
    save(tmp_path, 2, "actor")
    with pytest.raises(KeyboardInterrupt):
        fail_to_save(tmp_path, 4, lambda: (tmp_path / TRACKER).write_text(""), KeyboardInterrupt())
    assert named(tmp_path) == "2"


def test_a_run_that_cannot_save_ends_with_the_cause(logged, tmp_path, monkeypatch):
    save(tmp_path, 1, "actor")
    loop = Loop(save_freq=2, val_before_train=False, default_local_dir=str(tmp_path))

    def full() -> None:
        raise FULL

    monkeypatch.setattr(loop, "_save_checkpoint", full)
    with pytest.raises(RuntimeError, match=r"No space left.*resumes from global_step_1"):
        loop.fit()
    assert loop.events[-1] == "stop"
    assert logged[-1] == (-1, {"exit_code": 1})


def resuming(root: Path, *, n_ranks: int = 1, n_nodes: int = 1, mode: str = "auto") -> Any:
    """The configuration of a run that resumes."""
    part = {"strategy": "fsdp2", "checkpoint": {"load_contents": ["model", "optimizer", "extra"]}}
    trainer = {"default_local_dir": str(root), "resume_mode": mode}
    trainer |= {"nnodes": n_nodes, "n_gpus_per_node": n_ranks // n_nodes}
    models = {"actor_rollout_ref": {"actor": part}, "critic": part}
    return OmegaConf.create({"trainer": trainer} | models)


def save_ranks(root: Path, step: int, *parts: str, n_ranks: int = 1, tracker: bool = True) -> None:
    """As `save`, with the files of verl's FSDP ranks."""
    save(root, step, *parts, tracker=tracker)
    for part in parts:
        for kind in ("model", "optim", "extra_state"):
            for rank in range(n_ranks):
                name = f"{kind}_world_size_{n_ranks}_rank_{rank}.pt"
                torch.save({"of": step}, root / f"global_step_{step}" / part / name)


def model_file(root: Path, step: int, part: str = "actor", n_ranks: int = 1) -> Path:
    name = f"model_world_size_{n_ranks}_rank_{n_ranks - 1}.pt"
    return root / f"global_step_{step}" / part / name


def test_a_killed_save_leaves_the_checkpoint_before_to_the_next_run(tmp_path):
    save_ranks(tmp_path, 2, "actor")
    save_ranks(tmp_path, 4, "actor", tracker=False)
    model_file(tmp_path, 4).write_bytes(b"PK\x03\x04half")
    assert point_to_loadable_checkpoint(resuming(tmp_path), ["actor"]) is None
    assert named(tmp_path) == "2"


@pytest.mark.parametrize("removed", ["all of it", "its first file"])
def test_a_run_killed_before_the_tracker_is_written_resumes_from_the_new_checkpoint(
    tmp_path, removed
):
    """With one checkpoint to keep, verl removes the one before first."""
    save_ranks(tmp_path, 2, "actor")
    save_ranks(tmp_path, 4, "actor", tracker=False)
    (tmp_path / "global_step_4" / "data.pt").write_bytes(b"PK\x03\x04half")
    if removed == "all of it":
        shutil.rmtree(tmp_path / "global_step_2" / "actor")
        flaw = "actor is missing"
    else:
        model_file(tmp_path, 2).unlink()
        flaw = "actor/model_world_size_1_rank_0.pt is missing"
    said = point_to_loadable_checkpoint(resuming(tmp_path), ["actor"])
    assert said == f"global_step_2: {flaw}; the run resumes from global_step_4"
    assert named(tmp_path) == "4"
    assert not (tmp_path / "global_step_4" / "data.pt").exists()  # torch cannot load a part of it
    assert point_to_loadable_checkpoint(resuming(tmp_path), ["actor"]) is None


def test_a_tracker_that_a_killed_run_emptied_names_the_newest_checkpoint(tmp_path):
    for step in (2, 4):
        save_ranks(tmp_path, step, "actor", n_ranks=2)
    (tmp_path / TRACKER).write_text("")
    said = point_to_loadable_checkpoint(resuming(tmp_path, n_ranks=2), ["actor"])
    assert said is not None
    assert said.endswith("names no step; the run resumes from global_step_4")
    assert named(tmp_path) == "4"


def test_without_a_checkpoint_that_can_be_loaded_no_run_starts_from_scratch_unasked(tmp_path):
    save_ranks(tmp_path, 2, "actor", "critic")
    save_ranks(tmp_path, 4, "actor", "critic", tracker=False)
    shutil.rmtree(tmp_path / "global_step_2" / "actor")
    model_file(tmp_path, 4, "critic").write_bytes(b"PK\x03\x04half")
    with pytest.raises(RuntimeError) as caught:
        point_to_loadable_checkpoint(resuming(tmp_path), ["actor", "critic"])
    assert (
        "can be loaded: global_step_2: actor is missing; "
        "global_step_4: critic/model_world_size_1_rank_0.pt is cut off. To start from scratch"
    ) in str(caught.value)
    assert named(tmp_path) == "2"


def test_another_number_of_ranks_is_said(tmp_path):
    save_ranks(tmp_path, 2, "actor", n_ranks=2)
    with pytest.raises(RuntimeError, match="actor was saved by 2 ranks, and the run has 4"):
        point_to_loadable_checkpoint(resuming(tmp_path, n_ranks=4), ["actor"])


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(lambda root: None, id="nothing saved"),
        pytest.param(lambda root: (root / TRACKER).write_text("8"), id="its folder is gone"),
        pytest.param(lambda root: save(root, 2), id="the workers are on other machines"),
        pytest.param(lambda root: save_ranks(root, 2, "actor", n_ranks=2), id="whole"),
    ],
)
def test_a_tracker_is_left_alone_where_nothing_is_known_to_be_wrong(tmp_path, prepare):
    prepare(tmp_path)
    before = named(tmp_path)
    assert point_to_loadable_checkpoint(resuming(tmp_path, n_ranks=2), ["actor"]) is None
    assert named(tmp_path) == before


def test_ranks_of_another_machine_have_their_files_there(tmp_path):
    save_ranks(tmp_path, 2, "actor", n_ranks=2)
    model_file(tmp_path, 2, n_ranks=2).unlink()
    two_machines = resuming(tmp_path, n_ranks=2, n_nodes=2)
    assert point_to_loadable_checkpoint(two_machines, ["actor"]) is None
    assert "is missing" in message_of_one_machine(tmp_path)


def message_of_one_machine(root: Path) -> str:
    with pytest.raises(RuntimeError) as caught:
        point_to_loadable_checkpoint(resuming(root, n_ranks=2), ["actor"])
    return str(caught.value)


def test_a_tracker_is_left_alone_by_a_run_that_does_not_follow_it(tmp_path):
    save_ranks(tmp_path, 2, "actor")
    (tmp_path / TRACKER).write_text("")
    disabled = resuming(tmp_path, mode="disable")
    assert point_to_loadable_checkpoint(disabled, ["actor"]) is None
    assert named(tmp_path) == ""


def test_no_lock_is_left_of_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for checkpoint in ("checkpoints/global_step_1", str(tmp_path / "global_step_2")):
        local_mkdir_safe(checkpoint)
        assert list(tmp_path.glob("*.lock")) != []
        remove_lock(checkpoint)
        assert list(tmp_path.glob("*.lock")) == []


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
    raise AssertionError("the signal did not interrupt")


STAGES = {
    "loading the checkpoint": ("_load_checkpoint", False),
    "sending weights": ("sync_weights", False),
    "making the daemon": ("make_daemon", False),
    "validating": ("validate", True),
    "sampling": ("sample", True),
    "learning": ("learn", True),
    "saving": ("_save_checkpoint", True),
}


@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_ends_the_loop(logged, monkeypatch, tmp_path, stage):
    method, has_daemon = STAGES[stage]
    loop = Loop(save_freq=1, default_local_dir=str(tmp_path))
    monkeypatch.setattr(loop, method, lambda *_, **__: interrupt())
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyboardInterrupt), entrypoint.interruptible():
        loop.fit()
    assert ("stop" in loop.events) == has_daemon
    assert logged[-1] == (-1, {"exit_code": 1})
    assert signal.getsignal(signal.SIGALRM) is before
    wait_until(lambda: "agl_fast-watch" not in {each.name for each in threading.enumerate()})


class StubTrainer:
    """A trainer whose start or training is interrupted."""

    stage = ""
    ended: list[Any]
    global_steps = 0
    total_training_steps = 9

    def __init__(self, **_: Any) -> None:
        self._at("making the trainer")
        self.resource_pool_manager = SimpleNamespace(
            resource_pool_dict={"p": SimpleNamespace(pgs=["placement"])}
        )
        self.actor_rollout_wg = SimpleNamespace(workers=["worker"])

    def init_workers(self) -> None:
        self._at("starting the workers")

    def worker_groups(self) -> None: ...

    def fit(self) -> None:
        self.global_steps = 3
        self._at("training")

    def _at(self, stage: str) -> None:
        if stage == self.stage:
            interrupt()


@pytest.mark.parametrize(
    ("stage", "removed", "said"),
    [
        ("connecting to Ray", [], ""),
        ("making the trainer", [], ""),
        ("starting the workers", ["worker", "placement"], "interrupted before step 1 of 9"),
        ("training", ["worker", "placement"], "interrupted in step 3 of 9"),
    ],
)
def test_ctrl_c_leaves_nothing_of_a_run(monkeypatch, messages, stage, removed, said):
    found: list[Any] = []
    ray = SimpleNamespace(
        kill=found.append,
        util=SimpleNamespace(remove_placement_group=found.append),
    )
    disconnected: list[bool] = []

    @contextmanager
    def ray_cluster(config: Any, scope: Any, interrupts: Any):
        if stage == "connecting to Ray":
            interrupt()
        try:
            yield Daemons([], interrupts)
        finally:
            disconnected.append(True)

    monkeypatch.setattr(entrypoint, "ray", ray)
    monkeypatch.setattr(entrypoint, "ray_cluster", ray_cluster)
    monkeypatch.setattr(entrypoint, "trainer_arguments", lambda *_: {})
    monkeypatch.setattr(entrypoint, "require_loadable_weights", lambda _: None)
    monkeypatch.setattr(entrypoint, "set_objectives", lambda *_: None)
    monkeypatch.setattr(entrypoint, "is_refused_as_tree", lambda _: False)
    monkeypatch.setattr(entrypoint, "Placements", lambda _: None)
    config = OmegaConf.create(
        {
            "agentlightning": {"deadlines": OmegaConf.load(OWN_CONFIG).agentlightning.deadlines},
            "algorithm": {"adv_estimator": "grpo"},
            "critic": {"enable": False},
            "ray_kwargs": {"ray_init": {}},
            "trainer": {"nnodes": 1, "n_gpus_per_node": 1, "device": "cpu"},
        }
    )
    trainer_cls = type("Interrupted", (StubTrainer,), {"stage": stage})
    run_ids: list[str] = []
    nothing_left_behind = entrypoint.nothing_left_behind

    @contextmanager
    def remembering():
        with nothing_left_behind() as scope:
            run_ids.append(scope.run_id)
            yield scope
        assert not scope.folder.exists()

    monkeypatch.setattr(entrypoint, "nothing_left_behind", remembering)
    with pytest.raises(KeyboardInterrupt):
        entrypoint.run(config=config, train_dataset=[{}], store=None, trainer_cls=trainer_cls)
    assert found == removed
    assert said in str(messages())
    assert disconnected == ([] if stage == "connecting to Ray" else [True])
    assert processes_of_run(run_ids[0]) == []
