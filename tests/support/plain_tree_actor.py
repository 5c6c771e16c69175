"""Plain Hugging Face models in float64 that are given trees, and wrong ways to do it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from verl.utils import tensordict_utils as tu

from agl_fast.tree import attention
from agl_fast.tree.ancestors import link
from agl_fast.tree.attention import Tree
from agl_fast.tree.inputs import TreeInputs
from support.plain_actor import PlainActor


class PlainTreeActor(PlainActor):
    def __init__(self, model: Any, **settings: Any) -> None:
        super().__init__(model, **settings)
        model.set_attn_implementation(attention.NAME)

    def trains_trees(self) -> bool:
        return True

    def inputs(self, data: Any) -> TreeInputs:
        return TreeInputs.of(data)

    def _outputs(self, data: Any) -> dict[str, torch.Tensor]:
        inputs = self.inputs(data)
        logits = self.model(inputs.ids, position_ids=inputs.depths, tree=inputs.tree).logits[0]
        return {
            name: inputs.in_rows(values)
            for name, values in self._of_tokens(logits[inputs.parents], inputs, data).items()
        }

    def _of_tokens(
        self, logits: torch.Tensor, inputs: TreeInputs, data: Any
    ) -> dict[str, torch.Tensor]:
        log_probs = torch.log_softmax(logits / tu.get(data, "temperature"), dim=-1)
        chosen = log_probs.gather(1, inputs.tokens[:, None])[:, 0]
        return {"log_probs": chosen, "entropy": -(log_probs.exp() * log_probs).sum(dim=-1)}


class PlainTreeCritic(PlainTreeActor):
    """Takes the logit of the first token for the value."""

    def _of_tokens(
        self, logits: torch.Tensor, inputs: TreeInputs, data: Any
    ) -> dict[str, torch.Tensor]:
        return {"values": logits[:, 0]}


class LogitsOfTheTokenBefore(PlainTreeActor):
    def inputs(self, data: Any) -> TreeInputs:
        inputs = super().inputs(data)
        return replace(inputs, parents=inputs.trained - 1)


class PlainCausalMask(PlainTreeActor):
    def inputs(self, data: Any) -> TreeInputs:
        tree = Tree(link(_places(data)), torch.device("cpu"))
        return replace(super().inputs(data), tree=tree)


class PlacesForPositions(PlainTreeActor):
    def inputs(self, data: Any) -> TreeInputs:
        return replace(super().inputs(data), depths=torch.from_numpy(_places(data))[None])


MUTANTS = {
    "logits at i - 1": LogitsOfTheTokenBefore,
    "plain causal mask": PlainCausalMask,
    "positions = arange": PlacesForPositions,
}


def _places(data: Any) -> np.ndarray:
    return np.concatenate([np.arange(n) for n in data["input_ids"].offsets().diff().tolist()])
