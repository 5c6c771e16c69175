"""Trees on a GPU: `python -m benchmarks.gpu_tree`, under five minutes.

Checks attention by flex against attention run by run in float32, for heads of 64, 128 and 256
elements, log-probs and gradients of a model
in bfloat16 against rows of one call each, and times a gradient at 8k, 16k and 32k tokens.
"""

import sys
import time
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import agl_fast
from agl_fast.tree import attention
from agl_fast.tree.ancestors import link
from agl_fast.tree.flex import ancestor_blocks, flex_tree_attention
from agl_fast.tree.scores import TokenScores
from agl_fast.tree.segments import segment_attention
from benchmarks.tree_update import build, in_order_of_calls, log_probs, weights_of

N_VOCABULARY = 151_936
IN_FLOAT32 = 2e-3  # TF32 is off; flex sums in another order
IN_BFLOAT16 = 0.15  # of a log-prob
HEAD_DIMS = (64, 128, 256)  # Qwen2.5 0.5B; most models; Gemma
LENGTHS = (8_192, 16_384, 32_768)


def rollout(n_tokens: int, seed: int) -> agl_fast.Rollout:
    """Calls whose prompts leave out the end of the answer before: a trunk with a branch each."""
    chances = np.random.default_rng(seed)

    def ids(n: int) -> list[int]:
        return chances.integers(0, N_VOCABULARY, n).tolist()

    prompt, calls, n = ids(n_tokens // 8), [], n_tokens // 8
    while n < 0.95 * n_tokens:
        call = agl_fast.Call(prompt, ids(n_tokens // 40))
        calls.append(call)
        prompt = [*prompt, *call.response_ids[: n_tokens // 100], *ids(n_tokens // 50)]
        n += n_tokens // 40 + n_tokens // 50
    return agl_fast.Rollout(f"{n_tokens}", "group", calls, 1.0)


def check_attention(device: str, n_tokens: int, head_dim: int) -> float:
    """The largest difference of result and gradients."""
    depths = build([rollout(n_tokens, 0)], "tree").tensors["position_ids"][0].numpy()
    links = link(depths)
    torch.manual_seed(0)
    given = [torch.randn(1, heads, len(depths), head_dim) for heads in (8, 2, 2)]
    direction = torch.randn(1, len(depths), 8, head_dim)
    found = []
    for where in ("cpu", device):
        values = [each.to(where).requires_grad_() for each in given]
        if where == "cpu":
            result = segment_attention(*values, links.runs)
        else:
            blocks = ancestor_blocks(torch.from_numpy(links.ends).to(where))
            result = flex_tree_attention(*values, blocks)
        gradients = torch.autograd.grad(result, values, direction.to(where))
        found.append([each.detach().cpu() for each in (result, *gradients)])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def model_of(device: str, *, trees: bool, n_layers: int = 8) -> Any:
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=N_VOCABULARY,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=n_layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=65_536,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).to(device, torch.bfloat16).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.set_attn_implementation(attention.NAME if trees else "sdpa")
    return model


def gradient_seconds(model: Any, batch: agl_fast.Batch) -> tuple[float, float, torch.Tensor]:
    """Seconds and GiB of a gradient of all rows, and the log-probs of each."""
    scores = TokenScores(model.lm_head, N_VOCABULARY)
    weights = weights_of(batch)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    start = time.perf_counter()
    found = []
    for row in range(len(batch)):
        of_row = log_probs(model, scores, batch, row)
        trained = batch.tensors["response_mask"][row].bool()
        (of_row * weights[row, trained].to(of_row.device)).sum().backward()
        found.append(of_row.detach().cpu())
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return seconds, torch.cuda.max_memory_allocated() / 2**30, torch.cat(found)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device")
    for head_dim in HEAD_DIMS:
        apart = check_attention("cuda", 4_000, head_dim)
        print(f"head_dim {head_dim}: flex against run by run, float32: {apart:.1e}")
        assert apart < IN_FLOAT32
    models = {level: model_of("cuda", trees=level == "tree") for level in ("transition", "tree")}
    print("| tree tokens | row tokens | rows s | tree s | ratio | rows GiB | tree GiB | apart |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for n_tokens in LENGTHS:
        batches = {level: build([rollout(n_tokens, 2)], level) for level in models}
        measured = {}
        for level, batch in batches.items():
            gradient_seconds(models[level], batch)  # compiles
            measured[level] = gradient_seconds(models[level], batch)
        rows, tree = measured["transition"], measured["tree"]
        ordered = [in_order_of_calls(batches[level], measured[level][2]) for level in models]
        differs = float((ordered[0] - ordered[1]).abs().max())
        tokens = [int(batches[level].tensors["attention_mask"].sum()) for level in models]
        print(
            f"| {tokens[1]} | {tokens[0]} | {rows[0]:.2f} | {tree[0]:.2f} "
            f"| {rows[0] / tree[0]:.1f} | {rows[1]:.1f} | {tree[1]:.1f} | {differs:.3f} |"
        )
        assert differs < IN_BFLOAT16


if __name__ == "__main__":
    main()
