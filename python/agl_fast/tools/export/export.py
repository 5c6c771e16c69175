"""A checkpoint as a directory that transformers and vLLM load."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agl_fast.tools.export.checkpoint import actor_folder, whole_weights

_HUGGINGFACE = "huggingface"


def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Write the actor's weights with its configuration and tokenizer.

    Nothing needs a GPU or a process group; the weights are in memory once, and the shards are
    mapped from the disk.

    Args:
        checkpoint: `global_step_N`, its `actor` folder, or the run's folder (the latest step).
        out: a new or empty folder.
        dtype: of the weights; None: as they were trained.
        trust_remote_code: let the model's configuration load code of its own.

    Returns:
        The actor's folder that was read.

    Raises:
        FileNotFoundError: there is no checkpoint, or it has no configuration.
        FileExistsError: out holds something already.
        ValueError: the weights are a LoRA adapter's, do not fit the configuration, or differ where
            it ties them.
    """
    folder, out = actor_folder(Path(checkpoint)), Path(out)
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty")
    described = folder / _HUGGINGFACE
    if not (described / "config.json").is_file():
        raise FileNotFoundError(f"{described}: expected the model's config.json and tokenizer")
    weights = whole_weights(folder)
    if any("lora_" in name for name in weights):
        raise ValueError(
            f"{folder} holds a LoRA adapter: `python -m verl.model_merger merge --backend fsdp "
            "--local_dir … --target_dir …` takes it apart"
        )
    if dtype is not None:
        weights = {name: values.to(dtype) for name, values in weights.items()}
    config = AutoConfig.from_pretrained(described, trust_remote_code=trust_remote_code)
    config.dtype = next(iter(weights.values())).dtype
    with torch.device("meta"):  # only its shape: the weights are at hand
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    _require_fitting(model, weights)
    _leave_out_tied(model, weights)
    # First what describes the model, so that its configuration is written over with the dtype.
    shutil.copytree(described, out, dirs_exist_ok=True)
    model.save_pretrained(out, state_dict=weights)
    return folder


def _require_fitting(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    expected = {name: values.shape for name, values in model.state_dict().items()}
    found = {name: values.shape for name, values in weights.items()}
    # Tied weights may be told once.
    twins = {name for names in _tied(model) if not found.keys().isdisjoint(names) for name in names}
    missing = expected.keys() - found.keys() - twins
    unknown = found.keys() - expected.keys()
    if missing or unknown:
        raise ValueError(
            f"the weights do not fit the configuration: missing {sorted(missing)[:3]}, unknown "
            f"{sorted(unknown)[:3]}"
        )
    for name in found:
        if found[name] != expected[name]:
            raise ValueError(
                f"{name} has the shape {tuple(found[name])}: expected {tuple(expected[name])}"
            )


def _leave_out_tied(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Keep tied weights once, under the name that transformers saves them with."""
    for name, *others in _tied(model):
        told = [each for each in (name, *others) if each in weights]
        for each in told[1:]:
            if not torch.equal(weights[each], weights[told[0]]):
                raise ValueError(
                    f"{each} and {told[0]} differ, but the configuration ties them: expected the "
                    "same values, or tie_word_embeddings=false in its config.json"
                )
        if told:
            kept = weights[told[0]]
            for each in told:
                del weights[each]
            weights[name] = kept


def _tied(model: torch.nn.Module) -> list[list[str]]:
    """Names of the same parameter, those first that transformers keeps."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    # Names of what is tied to something else: a list, or a dictionary with that as values.
    left_out = set(getattr(model, "_tied_weights_keys", None) or ())
    return [sorted(each, key=left_out.__contains__) for each in names.values() if len(each) > 1]
