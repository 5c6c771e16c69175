"""Prefix trees: what a gradient of the same objective costs, from rows and from trees.

`python -m benchmarks.tree_update [TRACE ...]`, minutes each; answers are compared.

The model is random, with layers half as wide as Qwen2.5-0.5B's; its vocabulary is what the traces
use, so that the lm_head's share is like a large model's. Rows go through it one at a time, with
logits of all tokens and sdpa: as they are, or as wide as the batch, as verl has them.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.utils.padding import left_right_2_no_padding

import agl_fast
from agl_fast.tree import attention
from agl_fast.tree.inputs import TreeInputs
from agl_fast.tree.scores import LOG_PROB, ScoreRequest, TokenScores
from benchmarks import report
from benchmarks.bench_tree import NO_LIMIT
from benchmarks.conversations import for_agl_fast, load_traces
from benchmarks.workload import FULL, Answers, Competitor, Prepared, Row, Size

SAME = 1e-4


class Batches(NamedTuple):
    """The same rollouts at each level, padded."""

    calls: agl_fast.Batch
    merged: agl_fast.Batch
    trees: agl_fast.Batch


def batches(name: str, size: Size) -> Batches:
    """The largest rollouts whose trees are not too large."""
    rollouts = for_agl_fast(load_traces(name))
    lengths = {id(each): tree_tokens([each]) for each in rollouts}
    fitting = [each for each in rollouts if lengths[id(each)] <= size.tree_tokens_of_updates]
    largest = sorted(fitting, key=lambda each: lengths[id(each)])[-size.rollouts_of_updates :]
    chosen = [
        agl_fast.Rollout(each.rollout_id, each.data_id, each.calls[: size.calls_of_updates], 1.0)
        for each in largest
    ]
    return Batches(*(build(chosen, level) for level in ("transition", "trajectory", "tree")))


def build(rollouts: list[agl_fast.Rollout], level: Any) -> agl_fast.Batch:
    return agl_fast.build_batch(
        rollouts,
        level=level,
        max_prompt_length=NO_LIMIT,
        max_response_length=NO_LIMIT,
        pad_token_id=0,
        trim=True,
        call_index=True,
        tree_max_tokens=NO_LIMIT,
    )


def tree_tokens(rollouts: list[agl_fast.Rollout]) -> int:
    return int(build(rollouts, "tree").tensors["attention_mask"].sum())


def in_own_vocabulary(made: Batches) -> tuple[Batches, int]:
    """With ids from 0 to how many differ."""
    used = np.unique(np.concatenate([each.tensors["input_ids"].flatten() for each in made]))
    for each in made:
        for key in ("input_ids", "prompts", "responses"):
            ids = np.searchsorted(used, each.tensors[key].numpy())
            each.tensors[key] = torch.from_numpy(ids)
    return made, len(used)


def config_of(n_vocabulary: int, n_layers: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=n_vocabulary,
        hidden_size=448,
        intermediate_size=2432,
        num_hidden_layers=n_layers,
        num_attention_heads=7,
        num_key_value_heads=1,
        max_position_embeddings=NO_LIMIT,
        tie_word_embeddings=False,
    )


def model_of(n_vocabulary: int, n_layers: int) -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config_of(n_vocabulary, n_layers)).train()


def weights_of(batch: agl_fast.Batch) -> torch.Tensor:
    """(B, R): of each trained token, by its call and its place there, whatever its row."""
    calls = batch.tensors["call_index"]
    weights = torch.zeros(calls.shape)
    for row in range(len(batch)):
        for call in calls[row].unique().tolist():
            if call >= 0:
                own = calls[row] == call
                places = torch.arange(int(own.sum()))
                weights[row, own] = torch.cos(0.1 * places + call)
    return weights / 100


def gradient(model: Any, losses: Callable[[], Any]) -> torch.Tensor:
    model.zero_grad()
    for loss in losses():
        loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def of_rows(model: Any, batch: agl_fast.Batch, *, padded: bool) -> Callable[[], Any]:
    """Row by row, as they are, or as wide as the batch."""
    weights = weights_of(batch)
    width = batch.tensors["responses"].shape[1]

    def losses() -> Any:
        for row in range(len(batch)):
            real = batch.tensors["attention_mask"][row].bool()
            taken = torch.ones_like(real) if padded else real
            ids = batch.tensors["input_ids"][row, taken]
            logits = model(
                ids[None],
                attention_mask=real[None].long() if padded else None,
                position_ids=batch.tensors["position_ids"][row, taken][None],
            ).logits[0]
            log_probs = logprobs_from_logits(logits, ids.roll(-1))
            n_responses = int(taken[-width:].sum())
            of_responses = log_probs[-n_responses - 1 : -1]
            yield (of_responses * weights[row, taken[-width:]]).sum()

    return losses


def micro_batch(batch: agl_fast.Batch, row: int) -> Any:
    """One row as verl gives it to an engine."""
    keys = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")
    tensors = {key: batch.tensors[key][row : row + 1] for key in keys}
    return left_right_2_no_padding(tu.get_tensordict(tensors, {}))


def log_probs(model: Any, scores: TokenScores, batch: agl_fast.Batch, row: int) -> torch.Tensor:
    """(N,) of a row's trained tokens; a plain row is a tree without branches."""
    device = next(model.parameters()).device
    inputs = TreeInputs.of(micro_batch(batch, row).to(device))
    scores.request = ScoreRequest(inputs.tokens, None, entropy=False, sum_pi_squared=False)
    told = {"tree": inputs.tree} if model.config._attn_implementation != "sdpa" else {}
    found: torch.Tensor = model(
        inputs.ids, position_ids=inputs.depths, logits_to_keep=inputs.parents, **told
    ).logits[0, :, LOG_PROB]
    return found


def in_order_of_calls(batch: agl_fast.Batch, values: torch.Tensor) -> torch.Tensor:
    calls = batch.tensors["call_index"][batch.tensors["response_mask"].bool()]
    return values[torch.argsort(calls, stable=True)]


def of_trees(model: Any, batch: agl_fast.Batch) -> Callable[[], Any]:
    """Tree by tree, as the engine takes them."""
    scores = TokenScores(model.lm_head, model.config.vocab_size)
    weights = weights_of(batch)

    def losses() -> Any:
        for row in range(len(batch)):
            trained = batch.tensors["response_mask"][row].bool()
            yield (log_probs(model, scores, batch, row) * weights[row, trained]).sum()

    return losses


def prepare(name: str, size: Size) -> Prepared:
    made, n_vocabulary = in_own_vocabulary(batches(name, size))
    model = model_of(n_vocabulary, size.layers_of_updates)
    with_trees = model_of(n_vocabulary, size.layers_of_updates)
    with_trees.set_attn_implementation(attention.NAME)
    competitors = {
        "calls": of_rows(model, made.calls, padded=False),
        "calls, padded": of_rows(model, made.calls, padded=True),
        "merged": of_rows(model, made.merged, padded=False),
    }

    def check(answers: Answers) -> None:
        expected = answers["calls"]
        for competitor, found in answers.items():
            apart = (found - expected).norm() / expected.norm()
            assert apart < SAME, (competitor, float(apart))

    return Prepared(
        {
            **{
                each: Competitor(partial(gradient, model, losses))
                for each, losses in competitors.items()
            },
            "trees": Competitor(partial(gradient, with_trees, of_trees(with_trees, made.trees))),
        },
        check,
    )


ROWS = {
    "swe_nothink": (
        Row("gradient from trees of swe_nothink, against one row a call", "calls", "trees", 4.5),
        Row("… against rows padded to one width", "calls, padded", "trees", 9),
    ),
    "swe_think": (
        Row("gradient from trees of swe_think, against one row a call", "calls", "trees", 4.5),
        Row("… against merged rows", "merged", "trees", 3),
        Row("… against rows padded to one width", "calls, padded", "trees", 9),
    ),
    "swe_plain": (
        Row(
            "gradient from trees of swe_plain, against merged rows",
            "merged",
            "trees",
            1.1,
            at_most=True,
        ),
    ),
}


def measure(name: str) -> list[report.Line]:
    """Each competitor once, those of no row left out, in seconds of the one core they use."""
    prepared = prepare(name, FULL)
    compared = {"calls"}.union(*((row.baseline, row.ours) for row in ROWS[name]))
    seconds, answers = {}, {}
    for competitor in (each for each in prepared.competitors if each in compared):
        start = time.process_time()
        answers[competitor] = prepared.competitors[competitor].run()
        seconds[competitor] = [time.process_time() - start]
        print(f"{name}, {competitor}: {seconds[competitor][0]:.1f} s", flush=True)
    prepared.check(answers)
    lines = [report.line_of(row, seconds) for row in ROWS[name]]
    report.write_measurement(f"tree_update_{name}", lines, {"cpu_seconds": seconds})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="TRACE", help=", ".join(ROWS))
    names = parser.parse_args().names or list(ROWS)
    torch.set_num_threads(1)
    print(report.table([line for name in names for line in measure(name)]))


if __name__ == "__main__":
    main()
