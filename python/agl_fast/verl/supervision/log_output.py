"""agl_fast's warnings reach the terminal, whatever imports do to logging."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

PACKAGE = "agl_fast"


@contextmanager
def warnings_shown() -> Iterator[None]:
    """Print agl_fast's warnings to stderr where no handler of the root logger would.

    What verl 0.9.1 imports in the driver with its vLLM server raises the root logger and its
    handlers to ERROR. A level that the user has given the logger `agl_fast` stays.
    """
    logger = logging.getLogger(PACKAGE)
    level = logger.level
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
    handler.addFilter(_is_not_shown_otherwise)
    if level == logging.NOTSET:
        # The root logger's may be lower now, and higher soon.
        logger.setLevel(min(logging.WARNING, logger.getEffectiveLevel()))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _is_not_shown_otherwise(record: logging.LogRecord) -> bool:
    return not any(
        isinstance(handler, logging.StreamHandler) and handler.level <= record.levelno
        for handler in logging.getLogger().handlers
    )
