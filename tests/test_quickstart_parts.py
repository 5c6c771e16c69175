"""The quickstart's parts that need neither verl nor Ray."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import agl_fast

pytest.importorskip("psutil", reason="needs the extra [cpu]")
pytest.importorskip("transformers", reason="needs the extra [cpu]")

from agl_fast.verl import leftovers, two_call_task
from agl_fast.verl.deadline import deadline
from agl_fast.verl.quickstart import require_rise
from agl_fast.verl.tiny_model import make_tokenizer


def test_deadline_names_what_took_too_long_and_leaves_no_alarm() -> None:
    message = r"the nap did not finish within 0\.2 s"
    with pytest.raises(TimeoutError, match=message), deadline("the nap", 0.2):
        time.sleep(60)
    with deadline("nothing", 0.2):
        pass
    time.sleep(0.4)


def test_deadline_lets_the_users_interrupt_through() -> None:
    with pytest.raises(KeyboardInterrupt), deadline("typing", 60):
        raise KeyboardInterrupt


def test_processes_of_a_run_are_found_by_their_environment_and_ended() -> None:
    run_id = uuid4().hex
    nap = [sys.executable, "-c", "import time; time.sleep(600)"]
    ours = subprocess.Popen(nap, env={**os.environ, leftovers.RUN_VARIABLE: run_id})
    others = subprocess.Popen(nap, env={**os.environ, leftovers.RUN_VARIABLE: uuid4().hex})
    try:
        while not leftovers.processes_of_run(run_id):
            time.sleep(0.01)
        assert [process.pid for process in leftovers.processes_of_run(run_id)] == [ours.pid]
        assert leftovers.stop_processes_of_run(run_id, grace_seconds=0.2) == []
        assert ours.poll() is not None
        assert others.poll() is None
    finally:
        for process in (ours, others):
            process.kill()
            process.wait()


@pytest.mark.skipif(not leftovers.SHARED_MEMORY.is_dir(), reason="no /dev/shm here")
def test_only_new_and_unmapped_segments_are_unlinked() -> None:
    before = leftovers.shared_memory_segments()
    in_use = shared_memory.SharedMemory(create=True, size=64)
    abandoned = shared_memory.SharedMemory(create=True, size=64)
    # Its unlinking is what is tested here.
    resource_tracker.unregister(f"/{abandoned.name}", "shared_memory")
    abandoned.close()
    try:
        assert {in_use.name, abandoned.name} <= leftovers.shared_memory_segments() - before
        leftovers.unlink_abandoned_segments(before)
        assert in_use.name in leftovers.shared_memory_segments()
        assert abandoned.name not in leftovers.shared_memory_segments()
    finally:
        in_use.close()
        in_use.unlink()


def test_reward_is_the_mean_share_of_digits() -> None:
    assert two_call_task.reward(["12", "ab"]) == 0.5
    assert two_call_task.reward(["1a", ""]) == 0.25


def test_most_answers_return_as_the_ids_that_were_sampled() -> None:
    tokenizer = make_tokenizer(two_call_task.corpus(), max_length=192)
    chances = random.Random(0)
    first, second = two_call_task.all_tasks()[0].questions()
    n_extending = 0
    for _ in range(200):
        prompt = ids(tokenizer, [first])
        answer_ids = chances.choices(range(len(tokenizer)), k=12)
        answer = tokenizer.decode(answer_ids, skip_special_tokens=True)
        conversation = [first, {"role": "assistant", "content": answer}, second]
        context = prompt + answer_ids
        n_extending += ids(tokenizer, conversation)[: len(context)] == context
    # The others drift, which is what an agent's calls do: they become two rows.
    assert 100 < n_extending < 200


def ids(tokenizer: Any, messages: list[two_call_task.Message]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_reward_that_does_not_rise_is_an_error() -> None:
    require_rise([0.1, 0.1, 0.2, 0.5, 0.6, 0.7], 0.4)
    with pytest.raises(RuntimeError, match=r"the reward rose by 0\.000"):
        require_rise([0.5] * 6, 0.2)


def test_configuration_is_packaged() -> None:
    assert (Path(agl_fast.__file__).parent / "verl" / "quickstart.yaml").is_file()
