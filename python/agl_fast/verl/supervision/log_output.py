"""Console output of a run: agl_fast's log messages, whatever imports do to logging."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

PACKAGE = "agl_fast"


@contextmanager
def messages_shown() -> Iterator[None]:
    """Print agl_fast's messages, INFO and above, to stderr unless the root logger does.

    What verl 0.9.1 imports in the driver with its vLLM server raises the root logger and its
    handlers to ERROR. A level that the user has given the logger `agl_fast` stays. Nested blocks
    print once.
    """
    logger = logging.getLogger(PACKAGE)
    if any(isinstance(handler, _Console) for handler in logger.handlers):
        yield
        return
    level, handler = logger.level, _Console()
    if level == logging.NOTSET:
        # The root logger's may be lower now, and higher soon.
        logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints `agl_fast: message`; with level and time from WARNING on."""

    _WARNING = logging.Formatter("%(levelname)s:%(asctime)s:%(message)s")

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(
            isinstance(handler, logging.StreamHandler) and handler.level <= record.levelno
            for handler in logging.getLogger().handlers
        )

    def format(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            return self._WARNING.format(record)
        return f"{PACKAGE}: {record.getMessage()}"
