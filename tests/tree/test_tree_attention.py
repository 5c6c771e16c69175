"""Links, attention and scores of trees, against every path by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers import AutoConfig, AutoModelForCausalLM

from agl_fast.tree import attention, scores
from agl_fast.tree.ancestors import link
from agl_fast.tree.attention import Tree
from agl_fast.tree.flex import ancestor_blocks
from agl_fast.tree.segments import segment_attention
from support.small_trees import forked_calls, tree_of

# torch's and transformers' own.
pytestmark = pytest.mark.filterwarnings("ignore")

SEEDS = range(20)


def sees(depths: np.ndarray) -> torch.Tensor:
    """(T, T) bool, from parents found one by one."""
    n = len(depths)
    seen = torch.zeros(n, n, dtype=torch.bool)
    for i, depth in enumerate(depths):
        above = [j for j in range(i) if depths[j] == depth - 1]
        if depth > 0:
            seen[i] = seen[above[-1]]
        seen[i, i] = True
    return seen


def forest(seed: int) -> np.ndarray:
    return np.concatenate([tree_of(forked_calls(seed + k)).depths for k in (0, 100)])


@pytest.mark.parametrize("seed", SEEDS)
def test_links_follow_from_depths(seed):
    depths = forest(seed)
    links, seen = link(depths), sees(depths)
    for i, depth in enumerate(depths):
        above = seen[i].nonzero()[:, 0].tolist()
        assert links.parents[i] == (above[-2] if depth else -1)
        below = seen[:, i].nonzero()[:, 0]
        assert below.tolist() == list(range(i, links.ends[i]))
    for run in links.runs:
        path = [j for first, behind in run.above for j in range(first, behind)]
        assert [*path, *range(run.start, run.stop)] == seen[run.stop - 1].nonzero()[:, 0].tolist()
    assert [i for run in links.runs for i in range(run.start, run.stop)] == list(range(len(depths)))


def test_links_of_chains():
    links = link(np.array([0, 1, 2, 0, 1]))
    assert links.parents.tolist() == [-1, 0, 1, -1, 3]
    assert links.ends.tolist() == [3, 3, 3, 5, 5]
    assert [run.above for run in links.runs] == [(), ()]


@pytest.mark.parametrize("depths", [[1], [0, 2], [0, 1, 3], [0, 1, -1], [0, 1, 1, 3]])
def test_other_positions_are_refused(depths):
    with pytest.raises(ValueError, match=r"expected the depths of a tree"):
        link(np.array(depths))


@pytest.mark.parametrize(("n_heads", "n_keys"), [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_segments_are_dense_attention(seed, n_heads, n_keys):
    torch.manual_seed(seed)
    depths = forest(seed)
    shape = (len(depths), 8)
    query, key, value = (
        torch.randn(1, n, *shape, dtype=torch.float64, requires_grad=True)
        for n in (n_heads, n_keys, n_keys)
    )
    seen = sees(depths)
    repeated = [each.repeat_interleave(n_heads // n_keys, dim=1) for each in (key, value)]
    products = query @ repeated[0].transpose(2, 3) * 0.3
    dense = (products.masked_fill(~seen, -torch.inf).softmax(dim=3) @ repeated[1]).transpose(1, 2)
    found = segment_attention(query, key, value, link(depths).runs, 0.3)
    given = torch.randn_like(dense)
    torch.testing.assert_close(found, dense, atol=1e-12, rtol=1e-12)
    of_dense = torch.autograd.grad(dense, (query, key, value), given)
    of_found = torch.autograd.grad(found, (query, key, value), given)
    for expected, gradient in zip(of_dense, of_found, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.01), (torch.float16, 0.002)])
def test_segments_in_lower_precision(dtype, tolerance):
    """Parts are joined in float32; what is given back has the model's precision."""
    torch.manual_seed(0)
    runs = link(forest(0)).runs
    shape = (runs[-1].stop, 16)
    low = [torch.randn(1, n, *shape).to(dtype).requires_grad_() for n in (6, 2, 2)]
    exact = [each.detach().double().requires_grad_() for each in low]
    found, expected = segment_attention(*low, runs), segment_attention(*exact, runs)
    given = torch.randn_like(found)
    gradients = torch.autograd.grad(found, low, given)
    of_exact = torch.autograd.grad(expected, exact, given.double())
    for one, other in zip((found, *gradients), (expected, *of_exact), strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() < tolerance * other.norm()


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_cover_what_is_seen(seed, block):
    depths = forest(seed)
    blocks, seen = ancestor_blocks(torch.from_numpy(link(depths).ends), block), sees(depths)
    n_blocks = -(-len(depths) // block)
    padding = n_blocks * block - len(depths)
    of_blocks = torch.nn.functional.pad(seen, (0, padding, 0, padding))
    of_blocks = of_blocks.view(n_blocks, block, n_blocks, block).transpose(1, 2).flatten(2)
    assert torch.equal(blocks.to_dense()[0, 0].bool(), of_blocks.any(dim=2))
    for row in range(n_blocks):
        n_whole = int(blocks.full_kv_num_blocks[0, 0, row])
        whole = blocks.full_kv_indices[0, 0, row, :n_whole]
        assert of_blocks[row, whole].all()


@pytest.mark.parametrize("seed", [0, 1])
def test_flex_attention_is_segment_attention(seed):
    torch.manual_seed(seed)
    depths = forest(seed)
    links = link(depths)
    query, key, value = (torch.randn(1, n, len(depths), 16) for n in (4, 2, 2))
    blocks = ancestor_blocks(torch.from_numpy(links.ends))
    found = flex_attention(query, key, value, block_mask=blocks, enable_gqa=True)
    expected = segment_attention(query, key, value, links.runs)
    torch.testing.assert_close(found.transpose(1, 2), expected, atol=1e-5, rtol=1e-5)


def model_of(family: str):
    torch.manual_seed(3)
    sizes = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.4,
    }
    of_family = {"mistral": {"sliding_window": None}}.get(family, {})
    config = AutoConfig.for_model(family, **sizes, **of_family)
    return AutoModelForCausalLM.from_config(config).double()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_says_of_a_tree_what_it_says_of_each_call(family, checkpointing, monkeypatch):
    model = model_of(family)
    calls = forked_calls(4)
    tree = tree_of(calls)
    of_calls = []
    for prompt, response in calls:
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / 0.7
        log_probs = logits.log_softmax(dim=1)
        chosen = log_probs.gather(1, torch.tensor(response)[:, None])[:, 0]
        entropy = -(log_probs.exp() * log_probs).sum(dim=1)
        squares = log_probs.exp().square().sum(dim=1)
        of_calls.append(torch.stack([chosen, entropy, squares.detach()], dim=1))
    expected = torch.cat(of_calls)

    monkeypatch.setattr(scores, "LOGITS_AT_ONCE", 32 * 7)  # several chunks
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.set_attn_implementation(attention.NAME)
    token_scores = scores.TokenScores(model.lm_head, 32)
    links = link(tree.depths)
    # Sampled tokens in the order of calls and places.
    sampled = np.flatnonzero(tree.call >= 0)
    sampled = sampled[np.lexsort((sampled, tree.call[sampled]))]
    ids = torch.from_numpy(tree.ids)
    temperatures = torch.full(sampled.shape, 0.7)
    token_scores.request = scores.ScoreRequest(ids[sampled], temperatures.double(), True, True)
    found = model(
        ids[None],
        position_ids=torch.from_numpy(tree.depths)[None],
        tree=Tree(links, ids.device),
        logits_to_keep=torch.from_numpy(links.parents[sampled]),
    ).logits[0]
    # Rotary angles and norms are float32 in transformers.
    tolerance = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(found, expected, **tolerance)
    given = torch.randn_like(expected)
    parameters = list(model.parameters())
    of_rows = torch.autograd.grad(expected, parameters, given)
    of_tree = torch.autograd.grad(found, parameters, given)
    for one, other in zip(of_rows, of_tree, strict=True):
        torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("n_tokens", [0, 1, 7, 8, 20])
def test_no_more_logits_at_a_time_than_asked_for(monkeypatch, n_tokens):
    monkeypatch.setattr(scores, "LOGITS_AT_ONCE", 32 * 7)
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 32, bias=False).double()
    made: list[int] = []
    logits_of = head.forward
    head.forward = lambda hidden: (made.append(len(hidden)), logits_of(hidden))[1]
    token_scores = scores.TokenScores(head, 32)
    hidden = torch.randn(1, n_tokens, 4, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(32, (n_tokens,))

    def asked_of(entropy: bool) -> torch.Tensor:
        token_scores.request = scores.ScoreRequest(tokens, None, entropy, False)
        return head(hidden)[0]

    expected = torch.distributions.Categorical(logits=logits_of(hidden[0]), validate_args=False)
    found = asked_of(entropy=True)
    torch.testing.assert_close(found[:, scores.LOG_PROB], expected.log_prob(tokens))
    torch.testing.assert_close(found[:, scores.ENTROPY], expected.entropy())
    for entropy in (True, False):
        given = torch.randn(n_tokens, 3, dtype=torch.float64)
        found = asked_of(entropy)
        wanted = (given[:, 0] * expected.log_prob(tokens)).sum()
        if entropy:
            wanted = wanted + (given[:, 1] * expected.entropy()).sum()
        inputs = (hidden, head.weight)
        for one, other in zip(
            torch.autograd.grad(found, inputs, given),
            torch.autograd.grad(wanted, inputs, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(one, other)
    assert sum(made) >= n_tokens
    assert max(made) <= 7
    assert token_scores.request is None
