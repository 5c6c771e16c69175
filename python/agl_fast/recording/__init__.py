"""Recordings: files of rollouts. docs/recording.md is the specification."""

from __future__ import annotations

from agl_fast.recording.reader import Recording, RecordingError, read_recording
from agl_fast.recording.run_recorder import RunRecorder
from agl_fast.recording.writer import VERSION, RecordingWriter

__all__ = [
    "VERSION",
    "Recording",
    "RecordingError",
    "RecordingWriter",
    "RunRecorder",
    "read_recording",
]
