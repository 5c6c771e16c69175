"""Messages of a run are seen, once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from agl_fast import BatchBuilder, Call, Rollout
from agl_fast.verl.supervision.log_output import PACKAGE, messages_shown


@contextmanager
def root_handler() -> Iterator[logging.StreamHandler]:
    """Alone: pytest's own would show every warning."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    handler = logging.StreamHandler()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    try:
        yield handler
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def build_without_reward() -> None:
    builder = BatchBuilder(pad_token_id=0, max_prompt_length=4, max_response_length=4)
    builder.add(Rollout("r0", "d0", [Call([1, 2], [3])]))
    builder.finish()


def test_a_missing_reward_is_said_although_an_import_silences_the_root_logger(capsys):
    with root_handler() as handler, messages_shown():
        logging.getLogger().setLevel(logging.ERROR)
        handler.setLevel(logging.ERROR)
        build_without_reward()
    said = capsys.readouterr().err
    assert said.count("1 of 1 rollouts have no reward and get 0, the first is 'r0'") == 1


def test_what_the_root_logger_shows_is_not_said_twice(capsys):
    with root_handler(), messages_shown():
        build_without_reward()
    assert capsys.readouterr().err.count("rollouts have no reward") == 1


def test_messages_have_the_prefix_and_warnings_their_level(capsys):
    logger = logging.getLogger(f"{PACKAGE}.a_module")
    with root_handler() as handler, messages_shown(), messages_shown():
        handler.setLevel(logging.ERROR)
        logger.info("step %d", 3)
        logger.warning("few tokens")
    logger.info("after the run")
    first, second = capsys.readouterr().err.splitlines()
    assert first == "agl_fast: step 3"
    assert second.startswith("WARNING:")
    assert second.endswith(":few tokens")


def test_the_user_s_level_stays(capsys):
    logger = logging.getLogger(PACKAGE)
    before = logger.level, list(logger.handlers)
    with root_handler(), messages_shown():
        assert logger.level == logging.INFO
    assert (logger.level, logger.handlers) == before
    logger.setLevel(logging.ERROR)
    try:
        with root_handler(), messages_shown():
            build_without_reward()
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before[0])
    assert capsys.readouterr().err == ""
