"""verl's FSDP engine for rows that are prefix trees, registered under a vendor of its own.

A plain row is the tree without branches, and goes through it unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from agl_fast.platform_cpu.engines import BACKENDS, CpuLanguageModelEngine
from agl_fast.verl.tree import attention
from agl_fast.verl.tree.inputs import TreeInputs
from agl_fast.verl.tree.refusals import (
    require_tree_engine,
    require_tree_model,
    require_tree_module,
)
from agl_fast.verl.tree.scores import ENTROPY, LOG_PROB, SUM_PI_SQUARED, Asked, TokenScores

VENDOR = "agl_fast_tree"


class TrainsTrees:
    """Mixin in front of an FSDP engine of a language model."""

    model_config: Any
    engine_config: Any

    def _build_module(self) -> torch.nn.Module:
        require_tree_engine(self.model_config, self.engine_config, "this worker")
        require_tree_model(self.model_config.hf_config)
        module: Any = super()._build_module()  # type: ignore[misc]
        require_tree_module(module)
        module.set_attn_implementation(attention.NAME)
        self._scores = TokenScores(
            module.get_output_embeddings(), self.model_config.hf_config.vocab_size
        )
        return module  # type: ignore[no-any-return]

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs = TreeInputs.of(micro_batch)
        asked = {
            name: bool(tu.get_non_tensor_data(data=micro_batch, key=key, default=False))
            for name, key in (
                ("entropy", "calculate_entropy"),
                ("sum_pi_squared", "calculate_sum_pi_squared"),
            )
        }
        self._scores.asked = Asked(inputs.tokens, _temperatures(micro_batch, inputs), **asked)
        told = {
            "input_ids": inputs.ids,
            "position_ids": inputs.depths,
            "attention_mask": None,
            "tree": inputs.tree,
            "logits_to_keep": inputs.parents,
        }
        return told, {"inputs": inputs, **asked}

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        inputs: TreeInputs = output_args["inputs"]
        expected = self.model_config.hf_config.num_hidden_layers
        if inputs.tree.n_layers != expected:
            raise ValueError(
                f"{inputs.tree.n_layers} of {expected} layers attended to the tree: expected all, "
                f"{self.model_config.hf_config.model_type} has layers of another kind"
            )
        scores = output.logits[0]
        found = {"log_probs": inputs.in_rows(scores[:, LOG_PROB])}
        if output_args["entropy"]:
            found["entropy"] = inputs.in_rows(scores[:, ENTROPY])
        if output_args["sum_pi_squared"]:
            found["sum_pi_squared"] = inputs.in_rows(scores[:, SUM_PI_SQUARED])
        return found


def _temperatures(micro_batch: Any, inputs: TreeInputs) -> torch.Tensor | None:
    temperature = micro_batch["temperature"]
    if isinstance(temperature, torch.Tensor):
        return temperature.float()[inputs.row]
    if temperature == 1.0:
        return None
    return torch.full(inputs.row.shape, float(temperature), device=inputs.row.device)


@EngineRegistry.register(
    model_type="language_model", backend=BACKENDS, device="cuda", vendor=VENDOR
)
class TreeLanguageModelEngine(TrainsTrees, FSDPEngineWithLMHead):
    """On an accelerator."""


@EngineRegistry.register(model_type="language_model", backend=BACKENDS, device="cpu", vendor=VENDOR)
class CpuTreeLanguageModelEngine(TrainsTrees, CpuLanguageModelEngine):
    """FSDP2 on the host."""
