"""Whose request it is: what its path and headers say."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from urllib.parse import unquote

from agl_fast.proxy.exchange import Origin
from agl_fast.proxy.outgoing import BadRequestError

# With or without /v1: a base_url of Agent-lightning ends before it, and agents may add it.
_PATH = re.compile(r"(?:/rollout/([^/]+)/attempt/([^/]+))?(?:/v1)?(/[^?]*)")
_TRAINABLE = {"1": True, "true": True, "0": False, "false": False}


def split_path(raw_path: str) -> tuple[str | None, str | None, str] | None:
    """Rollout and attempt as they are written, and the endpoint; None: it is no path of ours."""
    match = _PATH.fullmatch(raw_path)
    return None if match is None else (match[1], match[2], match[3])


def origin_of(headers: Mapping[str, str], rollout_id: str | None, attempt_id: str | None) -> Origin:
    """Whose request it is.

    Args:
        rollout_id, attempt_id: of ``split_path``.

    Raises:
        BadRequestError: an id or a header cannot be a name, as it goes into logs and recordings.
    """
    train = headers.get("X-AGL-Train", "1").strip().lower()
    if train not in _TRAINABLE:
        raise BadRequestError(f"header X-AGL-Train must be 0 or 1, got {train!r}")
    return Origin(
        rollout_id=_id("rollout id", rollout_id),
        attempt_id=_id("attempt id", attempt_id),
        trainable=_TRAINABLE[train],
        agent=_agent(headers.get("X-AGL-Agent")),
        started_at=time.time(),
    )


def _id(what: str, quoted: str | None) -> str:
    try:
        found = unquote(quoted or "", errors="strict")
    except UnicodeDecodeError as error:
        raise BadRequestError(f"the {what} {quoted!r} of the path is not UTF-8: {error}") from None
    if not found.isprintable():
        raise BadRequestError(
            f"the {what} {found!r} of the path has line breaks or control characters"
        )
    return found


def _agent(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        name.encode()
    except UnicodeEncodeError:
        # What is not UTF-8 arrives as surrogates.
        raise BadRequestError(f"header X-AGL-Agent is not UTF-8: {name!r}") from None
    if not name.replace("\t", "").isprintable():
        raise BadRequestError(f"header X-AGL-Agent has control characters: {name!r}")
    return name
