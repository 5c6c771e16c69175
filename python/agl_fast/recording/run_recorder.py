"""Record a run's rollouts on a background thread."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any, Literal

from agl_fast.recording.writer import RecordingWriter, private_folder
from agl_fast.rows.calls import Rollout

logger = logging.getLogger(__name__)

Phase = Literal["train", "val"]
_MAX_WAITING_TOKENS = 1 << 26  # 256 MiB of ids
_CLOSE_SECONDS = 30.0


class RunRecorder:
    """Records a run without blocking it; write errors never end the run.

    A run has its own subfolder of ``folder``, with one file per training step and per validation:
    ``train-000012.jsonl.gz`` holds the rollouts of step 12, ``val-000012.jsonl.gz`` the validation
    after it.

    Rollouts that cannot be written (disk full, or too slow for long) are counted, with one warning.

    Args:
        folder: created on the first write.
        about: metadata of every file.
        max_waiting_tokens: limit on prompt and response tokens that wait to be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        about: Mapping[str, Any] | None = None,
        *,
        max_waiting_tokens: int = _MAX_WAITING_TOKENS,
    ) -> None:
        began = time.strftime("%Y%m%d-%H%M%S")
        self.folder = Path(folder) / f"{began}-{os.getpid()}"
        self._about = dict(about or {})
        self._max_waiting_tokens = max_waiting_tokens
        self._waiting: deque[tuple[Rollout, Phase, int]] = deque()
        self._waiting_tokens = 0
        self._changed = threading.Condition()
        self._closing = False
        self._counts: Counter[str] = Counter()
        self._warned = False
        self._writer: RecordingWriter | None = None
        self._thread: threading.Thread | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of ``written`` and ``lost`` rollouts so far."""
        with self._changed:
            return {name: self._counts[name] for name in ("written", "lost")}

    def record(self, rollout: Rollout, policy_version: int, *, is_train: bool) -> None:
        """Queue a rollout; returns at once. Its calls may change afterwards, their ids must not.

        Args:
            policy_version: version of the sampling weights; the next step trains on the rollout.
            is_train: False for a validation rollout.
        """
        kept = copy(rollout)
        kept.calls = [copy(call) for call in rollout.calls]
        n_tokens = _n_tokens(kept)
        with self._changed:
            too_much = self._waiting_tokens + n_tokens > self._max_waiting_tokens
            if self._closing or (too_much and self._waiting):
                self._lose(f"{self._waiting_tokens} tokens wait for the disk already")
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="agl_fast-recorder", daemon=True
                )
                self._thread.start()
            self._waiting_tokens += n_tokens
            self._waiting.append((kept, "train" if is_train else "val", policy_version))
            self._changed.notify_all()

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Write the queue within ``seconds`` and end the thread; may be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)
        with self._changed:
            if self._waiting:
                self._lose(f"they were not written within {seconds:g} s", len(self._waiting))
                self._waiting.clear()

    def _serve(self) -> None:
        while (item := self._next()) is not None:
            rollout, phase, policy_version = item
            try:
                self._write(rollout, phase, policy_version)
                with self._changed:
                    self._counts["written"] += 1
            # Any error is counted and must not end the training run.
            except Exception as error:
                with self._changed:
                    self._lose(f"{type(error).__name__}: {error}")
            with self._changed:
                self._waiting_tokens -= _n_tokens(rollout)
        if self._writer is not None:
            self._writer.close()

    def _next(self) -> tuple[Rollout, Phase, int] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting.popleft() if self._waiting else None

    def _write(self, rollout: Rollout, phase: Phase, policy_version: int) -> None:
        step = policy_version + 1 if phase == "train" else policy_version
        path = self.folder / f"{phase}-{step:06}.jsonl.gz"
        if self._writer is None or self._writer.path != path:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            private_folder(self.folder)
            about = {"phase": phase, "step": step, "policy_version": policy_version}
            self._writer = RecordingWriter(path, {**about, **self._about})
        self._writer.write(rollout)

    def _lose(self, why: str, n_rollouts: int = 1) -> None:
        self._counts["lost"] += n_rollouts
        if not self._warned:
            self._warned = True
            logger.warning(
                "Rollouts are not recorded in %s: %s. The run goes on; training/recording/lost "
                "counts them.",
                self.folder,
                why,
            )


def _n_tokens(rollout: Rollout) -> int:
    return sum(len(call.prompt_ids) + len(call.response_ids) for call in rollout.calls)
