"""What a run would refuse later, said when the algorithm is made."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from agl_fast.training.step import check_config
from agl_fast.tree.refusals import require_tree_config
from agl_fast.verl.entrypoint import trains_trees
from agl_fast.verl.ray_cluster import check_cpus


def check_before_the_run(config: Any, daemon_cls: type[Any] | None) -> None:
    """Raise what the run would raise, as far as it can be known now.

    A model that is not in a folder of this machine is looked at when the run starts, before Ray
    does.

    Args:
        config: as `agl_fast.verl.config.compose` gives it.
        daemon_cls: the user's, if any.

    Raises:
        ValueError: a setting would be computed wrongly, or cannot work on this machine.
        TypeError: the daemon does not take what the settings need.
    """
    config = config.copy()
    OmegaConf.resolve(config)
    if config.actor_rollout_ref.model.external_lib is None:
        check_config(config)  # the module may register an estimator
    check_cpus(config)
    if trains_trees(config) and Path(config.actor_rollout_ref.model.path).is_dir():
        require_tree_config(config)
    if daemon_cls is not None:
        _require_credit(config, daemon_cls)


def _require_credit(config: Any, daemon_cls: type[Any]) -> None:
    ours = config.agentlightning
    if ours.rollout_hook is None and ours.credit == "identical":
        return
    parameters = inspect.signature(daemon_cls).parameters.values()
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    if not takes_all and "credit" not in {each.name for each in parameters}:
        raise TypeError(
            f"agentlightning.rollout_hook={ours.rollout_hook!r} and credit={ours.credit!r} need a "
            f"daemon that takes `credit`: {daemon_cls!r} does not"
        )
