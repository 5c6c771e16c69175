"""Checkpoints of verl's FSDP actor into Hugging Face directories."""

from __future__ import annotations

from agl_fast.tools.export.checkpoint import actor_folder
from agl_fast.tools.export.export import export

__all__ = ["actor_folder", "export"]
