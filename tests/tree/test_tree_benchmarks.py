"""The benchmark of updates from trees, at a tiny size: the answers agree."""

import pytest
import torch

from agl_fast.tree.scores import TokenScores
from benchmarks import gpu_tree, tree_growth, tree_update
from benchmarks.workload import TINY, answers_of

# verl's, torch's and transformers' own.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", tree_update.ROWS)
def test_every_competitor_finds_the_same_gradient(name):
    prepared = tree_update.prepare(name, TINY)
    answers = answers_of(prepared)
    assert {row.baseline for row in tree_update.ROWS[name]} <= answers.keys()


def test_trees_of_all_lengths_find_the_same_log_probs():
    prepared = tree_growth.prepare(TINY)
    costs = {name: [cost] for name, cost in answers_of(prepared).items()}
    for (cost,) in costs.values():
        assert 0 < cost.seconds_of_attention < cost.seconds
    assert len(tree_growth.lines_of(costs)) == len(TINY.calls_of_growth) - 1


def test_the_script_for_gpus_compares_the_same_tokens(monkeypatch):
    monkeypatch.setattr(gpu_tree, "N_VOCABULARY", 1000)
    rollout = gpu_tree.rollout(400, 0)
    found = []
    for level in ("transition", "tree"):
        batch = tree_update.build([rollout], level)
        model = gpu_tree.model_of("cpu", trees=level == "tree", n_layers=1)
        scores = TokenScores(model.lm_head, 1000)
        with torch.no_grad():
            rows = [gpu_tree.log_probs(model, scores, batch, row) for row in range(len(batch))]
        found.append(gpu_tree.in_order_of_calls(batch, torch.cat(rows)))
    torch.testing.assert_close(*found, atol=gpu_tree.IN_BFLOAT16, rtol=0)
