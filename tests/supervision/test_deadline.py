"""A deadline of a stage of the run."""

from __future__ import annotations

import time

import pytest

from agl_fast.verl.supervision.waits import deadline


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
