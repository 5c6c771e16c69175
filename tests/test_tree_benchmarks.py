"""The benchmark of updates from trees, at a tiny size: the answers agree."""

import pytest

from benchmarks import tree_update
from benchmarks.workload import TINY, answers_of

# verl's, torch's and transformers' own.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", tree_update.ROWS)
def test_every_competitor_finds_the_same_gradient(name):
    prepared = tree_update.prepare(name, TINY)
    answers = answers_of(prepared)
    assert {row.baseline for row in tree_update.ROWS[name]} <= answers.keys()
