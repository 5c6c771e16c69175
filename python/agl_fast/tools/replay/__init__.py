"""Replay a recording: rows, metrics and one training step, without agents."""

from __future__ import annotations

from agl_fast.tools.replay.replay import Replay, replay

__all__ = ["Replay", "replay"]
