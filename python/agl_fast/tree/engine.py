"""verl's FSDP engines for prefix trees, registered under their own vendor.

A plain row is a tree without branches and gives the same results as with verl's engines.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import (
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
)

from agl_fast.tree import attention
from agl_fast.tree.engine_name import ENGINE
from agl_fast.tree.inputs import TreeInputs
from agl_fast.tree.refusals import (
    require_language_module,
    require_tree_engine,
    require_tree_model,
    require_tree_module,
)
from agl_fast.tree.scores import ENTROPY, LOG_PROB, SUM_PI_SQUARED, ScoreRequest, TokenScores
from agl_fast.verl.platform_cpu.engines import (
    BACKENDS,
    CpuLanguageModelEngine,
    CpuValueModelEngine,
)

VENDOR = ENGINE


class TrainsTrees:
    """Mixin for an FSDP engine: tree attention."""

    model_config: Any
    engine_config: Any

    def _build_module(self) -> Any:
        require_tree_engine(self.model_config, self.engine_config, "this worker")
        model = self.model_config.hf_config
        require_tree_model(model)
        # Load with an attention that needs no further package. Remove verl's attribute of the
        # setting: checkpoints with it could not be loaded elsewhere.
        model._attn_implementation = "sdpa"
        vars(model).pop("attn_implementation", None)
        module: Any = super()._build_module()  # type: ignore[misc]
        require_tree_module(module)
        module.set_attn_implementation(attention.NAME)
        return module

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs = TreeInputs.of(micro_batch)
        arguments = {
            "input_ids": inputs.ids,
            "position_ids": inputs.depths,
            "attention_mask": None,
            "tree": inputs.tree,
        }
        return arguments, {"inputs": inputs}

    def _require_every_layer(self, inputs: TreeInputs) -> None:
        model = self.model_config.hf_config
        if inputs.tree.n_layers != model.num_hidden_layers:
            raise ValueError(
                f"{inputs.tree.n_layers} of {model.num_hidden_layers} layers attended to the tree: "
                f"expected all, {model.model_type} has layers of another kind"
            )


class ScoresTokens(TrainsTrees):
    """Mixin for an FSDP engine of a language model."""

    def _build_module(self) -> Any:
        module = super()._build_module()
        require_language_module(module)
        head, n_vocabulary = module.get_output_embeddings(), self.model_config.hf_config.vocab_size
        self._scores = TokenScores(head, n_vocabulary)
        return module

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        arguments, output_args = super().prepare_model_inputs(micro_batch)
        inputs: TreeInputs = output_args["inputs"]
        request = ScoreRequest(
            inputs.tokens,
            _temperatures(micro_batch, inputs),
            entropy=_is_set(micro_batch, "calculate_entropy"),
            sum_pi_squared=_is_set(micro_batch, "calculate_sum_pi_squared"),
        )
        self._scores.request = request
        return arguments | {"logits_to_keep": inputs.parents}, output_args | {"request": request}

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        inputs: TreeInputs = output_args["inputs"]
        request: ScoreRequest = output_args["request"]
        self._require_every_layer(inputs)
        scores = output.logits[0]
        outputs = {"log_probs": inputs.in_rows(scores[:, LOG_PROB])}
        if request.entropy:
            outputs["entropy"] = inputs.in_rows(scores[:, ENTROPY])
        if request.sum_pi_squared:
            outputs["sum_pi_squared"] = inputs.in_rows(scores[:, SUM_PI_SQUARED])
        return outputs


class ValuesTokens(TrainsTrees):
    """Mixin for an FSDP engine of a value model: a token's value is read at its parent."""

    module: Any

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        inputs: TreeInputs = output_args["inputs"]
        self._require_every_layer(inputs)
        # TRL's value heads return values as third output, token classifiers as one logit.
        values = output[2][0] if hasattr(self.module, "v_head") else output.logits[0, :, 0]
        return {"values": inputs.in_rows(values[inputs.parents])}


def _temperatures(micro_batch: Any, inputs: TreeInputs) -> torch.Tensor | None:
    temperature = micro_batch["temperature"]
    if isinstance(temperature, torch.Tensor):
        return temperature.float()[inputs.row]
    if temperature == 1.0:
        return None
    return torch.full(inputs.row.shape, float(temperature), device=inputs.row.device)


def _is_set(micro_batch: Any, key: str) -> bool:
    return bool(tu.get_non_tensor_data(data=micro_batch, key=key, default=False))


@EngineRegistry.register(
    model_type="language_model", backend=BACKENDS, device="cuda", vendor=VENDOR
)
class TreeLanguageModelEngine(ScoresTokens, FSDPEngineWithLMHead):
    """On an accelerator."""


@EngineRegistry.register(model_type="language_model", backend=BACKENDS, device="cpu", vendor=VENDOR)
class CpuTreeLanguageModelEngine(ScoresTokens, CpuLanguageModelEngine):
    """FSDP2 on the host."""


@EngineRegistry.register(model_type="value_model", backend=BACKENDS, device="cuda", vendor=VENDOR)
class TreeValueModelEngine(ValuesTokens, FSDPEngineWithValueHead):
    """On an accelerator."""


@EngineRegistry.register(model_type="value_model", backend=BACKENDS, device="cpu", vendor=VENDOR)
class CpuTreeValueModelEngine(ValuesTokens, CpuValueModelEngine):
    """FSDP2 on the host."""
