"""All checks of a run, in the order in which `VERL(config)` makes them."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from verl.utils.device import get_device_name
from verl.utils.import_utils import import_external_libs

from agl_fast.rows.levels import Level
from agl_fast.training.step import check_config
from agl_fast.tree.refusals import require_tree_config
from agl_fast.verl.config import checks, default_model_path
from agl_fast.verl.config.checks import Check, require_context
from agl_fast.verl.model_files import context_length, model_folder
from agl_fast.verl.ray_cluster import check_cpus

NOT_SET = (
    "actor_rollout_ref.model.path is not set: expected the model to train, a folder or the name of "
    "one on the Hugging Face hub"
)


def check_model(config: DictConfig) -> list[str]:
    """Check that there is a model, and that its context is as long as the servers'.

    Returns:
        A line if a name that looks like a folder will be looked up on the Hugging Face hub.
    """
    path = config.actor_rollout_ref.model.path
    if path is None:
        raise ValueError(NOT_SET)
    folder = Path(path)  # neither verl nor transformers expands ~
    if (folder / "config.json").is_file():
        _check_context(config, path)
        return []
    if path == default_model_path():
        raise ValueError(NOT_SET)
    if "://" in path:
        return []
    if path.startswith(("/", ".", "~")) or folder.exists():
        raise ValueError(
            f"actor_rollout_ref.model.path={path!r}: expected a folder with a config.json (written "
            "without ~), or the name of a model on the Hugging Face hub"
        )
    if len(folder.parts) > 1 and Path(folder.parts[0]).is_dir():
        return [
            f"actor_rollout_ref.model.path={path} is no folder with a config.json, though "
            f"{folder.parts[0]} is one: it will be asked of the Hugging Face hub"
        ]
    return []


def _check_context(config: DictConfig, path: str) -> None:
    name = "max_position_embeddings"
    model = config.actor_rollout_ref.model
    if model.hf_config_path is not None or name in (model.override_config or {}):
        return
    wanted, longest = config.actor_rollout_ref.rollout.max_model_len, context_length(path)
    if longest is None:
        return
    if wanted is not None and wanted > longest:
        raise ValueError(
            f"actor_rollout_ref.rollout.max_model_len={wanted}: expected at most {longest}, the "
            f"{name} of {path}"
        )
    if wanted is None:  # vLLM takes the model's
        require_context(config, longest, f"{name} of {path}")


def check_device(config: DictConfig) -> None:
    """verl in this process must have the device of the configuration."""
    if config.trainer.device != get_device_name():
        raise ValueError(
            f"trainer.device={config.trainer.device!r}, and verl in this process has chosen "
            f"{get_device_name()!r}: expected VERL(config) to be made in the process that fits, "
            "and trainer.device to be left as it is"
        )


def check_external_lib(config: DictConfig) -> None:
    """Import the user's module, which may register the estimator and the loss of the next check."""
    name = config.actor_rollout_ref.model.external_lib
    try:
        import_external_libs(name)
    except ImportError as error:
        raise ValueError(
            f"actor_rollout_ref.model.external_lib={name!r}: expected a module that can be "
            f"imported: {error}"
        ) from error


def check_folders(config: DictConfig) -> None:
    """Checkpoints must be found before, and can be saved after, hours of training."""
    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        step = str(trainer.resume_from_path).rstrip("/").split("global_step_")[-1]
        if not (step.isdecimal() and Path(trainer.resume_from_path).is_dir()):
            raise ValueError(
                f"trainer.resume_from_path={trainer.resume_from_path!r}: expected an existing "
                "folder global_step_N"
            )
    if trainer.save_freq > 0 and (hindrance := _hindrance(Path(trainer.default_local_dir))):
        raise ValueError(
            f"trainer.default_local_dir={trainer.default_local_dir!r}: expected a folder that can "
            f"be written, as trainer.save_freq={trainer.save_freq}: {hindrance}"
        )


def _hindrance(folder: Path) -> str | None:
    """Why files cannot be written to a folder that exists or is to be created; None: they can."""
    folder = folder.absolute()
    nearest = next(each for each in (folder, *folder.parents) if each.exists())
    if not nearest.is_dir():
        return f"{nearest} is a file"
    return None if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} is read-only"


def trains_trees(config: DictConfig) -> bool:
    level = OmegaConf.select(config, "agentlightning.trace_aggregator.level")
    return level is not None and Level.of(level).is_tree


def check_tree_engine(config: DictConfig) -> None:
    """At level tree, the tree engine must support the settings, and a model on this machine."""
    if trains_trees(config) and model_folder(config.actor_rollout_ref.model.path) is not None:
        require_tree_config(config)


# Each raises ValueError or TypeError that names key, value and expectation; the lines that it
# returns are for the user. A configuration is given with its interpolations resolved.
CHECKS: tuple[Check, ...] = (
    *checks.CHECKS,
    check_model,
    check_device,
    check_external_lib,
    check_config,
    check_cpus,
    check_tree_engine,
    check_folders,
)


def check_run(config: DictConfig) -> list[str]:
    """Run all checks on a merged configuration.

    Returns:
        Lines for the user: settings that are allowed and do less than they seem to.
    """
    config = config.copy()
    OmegaConf.resolve(config)
    return checks.run_checks(config, CHECKS)
