"""``build_batch`` of plain rollouts, by the reference or natively, both giving lists."""

from __future__ import annotations

from typing import Any

import agl_fast
from agl_fast import reference
from support.batch_lists import as_lists
from support.plain_rollouts import PlainRollout, to_native


def build_native(rollouts: list[PlainRollout], **options: Any) -> reference.Batch:
    return as_lists(agl_fast.build_batch([to_native(one) for one in rollouts], **options))


BUILDS = {"reference": reference.build_batch, "native": build_native}
