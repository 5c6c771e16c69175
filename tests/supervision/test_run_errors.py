"""A run's error is said once, with its cure."""

from __future__ import annotations

import sys
import traceback

import pytest

from agl_fast.verl.supervision.run_errors import say_once


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def chained(*texts: str) -> Exception:
    """The first text is that of the first cause."""
    error: Exception | None = None
    for text in texts:
        try:
            raise RuntimeError(text) from error
        except RuntimeError as raised:
            error = raised
    assert error is not None
    return error


def test_a_cause_that_the_error_repeats_is_left_out() -> None:
    text = "the actor died:\nits node ran out of sockets"
    error = chained(text, f"a worker is dead: {text}", f"the update: a worker is dead: {text}")
    assert shown(error).count("ran out of sockets") == 3
    say_once(error)
    assert shown(error).count("ran out of sockets") == 1


def test_a_cause_that_says_more_stays() -> None:
    error = chained("no such file", "the hook failed", "step 3: the hook failed")
    say_once(error)
    assert "the hook failed" in shown(error)
    inner = chained("no such file", "the hook failed")
    say_once(inner)
    assert "no such file" in shown(inner)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="3.10 prints it on stderr")
@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("which exceeds the memory usage threshold of 0.95", "RAY_memory_usage_threshold"),
        ("CUDA out of memory. Tried to allocate 2 GiB", "gpu_memory_utilization"),
    ],
)
def test_the_cure_is_the_last_line(text: str, cure: str) -> None:
    error = chained(text, f"the update: {text}")
    say_once(error)
    assert shown(error).count(text) == 1
    assert cure in shown(error).splitlines()[-1]
