"""What leaves the driver for the workers: every rank gets its rows, and nothing of the others'."""

from __future__ import annotations

import cloudpickle
import pytest
import torch

pytest.importorskip("verl", reason="needs the extra [cpu]")

import support.verl_trainer_imports  # noqa: F401
from agl_fast.training.minibatches import lay_out
from agl_fast.training.step_rows import Rows
from agl_fast.training.worker_groups import (
    ACTOR_KEYS,
    FORWARD_KEYS,
    forward_layout,
    laid_out_rows,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # verl's, torch's and tensordict's own

N_ROWS, P, R, N_PROMPT, N_RESPONSE = 256, 512, 64, 256, 32
RANKS = (1, 8, 64)


@pytest.fixture(scope="module")
def rows() -> Rows:
    ids = torch.randint(0, 1000, (N_ROWS, P + R), generator=torch.Generator().manual_seed(0))
    attention = torch.zeros_like(ids)
    attention[:, P - N_PROMPT : P + N_RESPONSE] = 1
    tensors = {
        "prompts": ids[:, :P].clone(),
        "responses": ids[:, P:].clone(),
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": attention[:, P:].clone(),
        **{name: torch.rand(N_ROWS, R) for name in ACTOR_KEYS},
    }
    return Rows(tensors, {}, [])


def bytes_of_ranks(rows: Rows, n_ranks: int, *, update: bool) -> list[int]:
    """What verl's dispatch pickles for each rank."""
    from verl.protocol import BatchData

    if update:
        layout = lay_out([range_of(len(rows))], rows.lengths, n_ranks=n_ranks)
        laid_out = laid_out_rows(
            rows,
            layout,
            (*FORWARD_KEYS, *ACTOR_KEYS),
            temperature=1.0,
            mini_batch_size=N_ROWS,
        )
    else:
        layout = forward_layout(rows, n_ranks, None)
        laid_out = laid_out_rows(rows, layout, FORWARD_KEYS, temperature=1.0, compute_loss=False)
    return [
        len(cloudpickle.dumps(share, protocol=5)) for share in BatchData(laid_out).chunk(n_ranks)
    ]


def range_of(n: int):
    return torch.arange(n).numpy()


@pytest.mark.parametrize("update", [False, True])
def test_bytes_do_not_grow_with_the_ranks(rows, update):
    total = {n: sum(bytes_of_ranks(rows, n, update=update)) for n in RANKS}
    # What a rank gets beside its rows: names and types, and the lengths of all rows.
    beside = 16 * 2**10
    for n in RANKS[1:]:
        assert total[n] < total[1] + n * beside, total
    assert total[64] < 1.5 * total[1], total


def test_a_larger_batch_adds_to_a_rank_only_its_share(rows):
    """64 ranks get equal shares: no tensor of the whole batch is among them."""
    of_ranks = bytes_of_ranks(rows, 64, update=False)
    of_a_row = bytes_of_ranks(rows, 1, update=False)[0] / N_ROWS
    assert max(of_ranks) < (N_ROWS / 64) * of_a_row + 16 * 2**10
