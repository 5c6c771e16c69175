"""Workers without verl's engine: plain Hugging Face models in float64, gradients over gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.utils import tensordict_utils as tu

VOCABULARY = 32


def plain_model(seed: int) -> Any:
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.4,
            max_position_embeddings=128,
            tie_word_embeddings=False,
        )
    )
    # Transformers' own normalises in float32, whatever it is given.
    for name, module in list(model.named_modules()):
        if name.endswith("norm"):
            plain = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)
            model.set_submodule(name, plain)
    return model.double()


class PlainActor:
    """What `EveryRank` asks of a worker.

    Args:
        micro_batch_size: rows that one loss is computed of.
        learning_rate: of plain gradient descent.
    """

    def __init__(self, model: Any, *, micro_batch_size: int = 64, learning_rate: float = 0.0):
        self.model = model
        self.micro_batch_size = micro_batch_size
        self.learning_rate = learning_rate

    def set_loss_fn(self, loss: Any) -> None:
        self.loss = loss

    def infer_batch(self, data: Any) -> Any:
        with torch.no_grad():
            return tu.get_tensordict(self._outputs(data), {"metrics": {"mfu": 0.0}})

    def train_mini_batch(self, data: Any) -> Any:
        size = tu.get(data, "mini_batch_size") // dist.get_world_size()
        metrics: dict[str, Any] = {"mfu": [0.0]}
        for _ in range(tu.get(data, "epochs")):
            for start in range(0, len(data), size):
                found = self._train(
                    tu.index_select_tensor_dict(data, torch.arange(start, start + size))
                )
                for name, values in found.items():
                    metrics.setdefault(name, []).extend(values)
        return tu.get_tensordict({}, {"metrics": metrics})

    def _train(self, mini_batch: Any) -> dict[str, list[float]]:
        n_tokens = mini_batch["loss_mask"].sum()
        dist.all_reduce(n_tokens)
        tu.assign_non_tensor(
            mini_batch, dp_size=dist.get_world_size(), batch_num_tokens=n_tokens.item()
        )
        self.model.zero_grad()
        found: dict[str, list[float]] = {}
        for start in range(0, len(mini_batch), self.micro_batch_size):
            rows = torch.arange(start, min(start + self.micro_batch_size, len(mini_batch)))
            micro_batch = tu.index_select_tensor_dict(mini_batch, rows)
            loss, metrics = self.loss(model_output=self._outputs(micro_batch), data=micro_batch)
            loss.backward()
            for name, value in metrics.items():
                found.setdefault(name, []).append(float(getattr(value, "values", [value])[0]))
        with torch.no_grad():
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
                parameter -= self.learning_rate / dist.get_world_size() * parameter.grad
        return found

    def _outputs(self, data: Any) -> dict[str, torch.Tensor]:
        """What the model gives at every token, nested."""
        rows = data["input_ids"].unbind()
        # Attention looks back only, so padding behind a row changes nothing in it.
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = [len(row) for row in rows]
        return {
            name: torch.nested.as_nested_tensor(
                [row[:n] for row, n in zip(values, lengths, strict=True)], layout=torch.jagged
            )
            for name, values in self._at_tokens(ids, data).items()
        }

    def _at_tokens(self, ids: torch.Tensor, data: Any) -> dict[str, torch.Tensor]:
        logits = self.model(ids).logits / tu.get(data, "temperature")
        log_probs = torch.log_softmax(logits, dim=-1)
        chosen = log_probs.gather(2, ids.roll(-1, dims=1)[..., None])[..., 0]
        return {"log_probs": chosen, "entropy": -(log_probs.exp() * log_probs).sum(dim=-1)}


class PlainCritic(PlainActor):
    """Takes the logit of the first token for the value."""

    def _at_tokens(self, ids: torch.Tensor, data: Any) -> dict[str, torch.Tensor]:
        return {"values": self.model(ids).logits[..., 0]}
