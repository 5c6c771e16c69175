"""Checks and defaults of `agentlightning.collection` and `algorithm.filter_groups`."""

from __future__ import annotations

from collections.abc import Collection

from omegaconf import DictConfig, OmegaConf

from agl_fast.verl.config.defaults import Defaults, fill_in

KEY = "agentlightning.collection"
ROLLOUT = "actor_rollout_ref.rollout"

CORRECTION = Defaults(
    why="rollouts may be older than the policy: a weight per token bounds the ratio between the "
    "actor and the policy that sampled it",
    set={"algorithm.rollout_correction.rollout_is": "token"},
)


def fill_in_collection(config: DictConfig, user_keys: Collection[str]) -> list[str]:
    """Correct stale rollouts by importance sampling, unless the user chooses otherwise."""
    correction = config.algorithm.get("rollout_correction") or {}
    if not is_asynchronous(config) or correction.get("bypass_mode"):
        return []
    if correction.get("rollout_rs") is not None:
        return []
    return fill_in(config, user_keys, [CORRECTION])


def is_asynchronous(config: DictConfig) -> bool:
    """Whether rollouts may be stale: `agentlightning.collection.mode` is not sync."""
    return bool(OmegaConf.select(config, f"{KEY}.mode", default="sync") != "sync")


def check_collection(config: DictConfig) -> list[str]:
    """Combinations that cannot keep `max_staleness`, or train something else."""
    settings = config.agentlightning.collection
    mode = settings.mode
    filters = config.algorithm.get("filter_groups") or {}
    if filters.get("enable"):
        _check_filter_groups(config)
    _check_devices(config)
    if mode == "sync":
        return []
    for key, value, expected, is_wrong in (
        (
            f"{KEY}.max_staleness",
            settings.max_staleness,
            "at least 1 with mode='overlap', as rollouts that start during an update are one "
            "policy version old when they are trained; mode='partial' may have 0",
            mode == "overlap" and settings.max_staleness < 1,
        ),
        (
            f"{KEY}.oversample",
            settings.oversample,
            f"at most max_staleness + 1 = {settings.max_staleness + 1}, as more samples in flight "
            "could not be trained in time",
            settings.oversample > settings.max_staleness + 1,
        ),
        (
            "algorithm.adv_estimator",
            config.algorithm.adv_estimator,
            f"an estimator without a critic, such as 'grpo', with {KEY}.mode={mode!r}, as the "
            "critic's values of stale rollouts are those of another policy",
            bool(config.critic.enable),
        ),
        (
            "agentlightning.mode",
            config.agentlightning.mode,
            f"'v1' or null with {KEY}.mode={mode!r}, as the clients of mode v0 serve one batch "
            "after another",
            config.agentlightning.mode == "v0",
        ),
    ):
        if is_wrong:
            raise ValueError(f"{key}={value!r}: expected {expected}")
    lines = []
    if settings.on_stale == "drop":
        lines.append(
            f"{KEY}.on_stale=drop: long rollouts are trained less often than short ones; their "
            "tokens count as training/skipped_tokens/stale"
        )
    return lines


def _check_devices(config: DictConfig) -> None:
    """Servers have devices of their own with mode overlap on GPUs, and only then."""
    rollout = config.actor_rollout_ref.rollout
    nnodes, backend = rollout.nnodes, rollout.checkpoint_engine.backend
    if config.agentlightning.collection.mode != "overlap" or config.trainer.device == "cpu":
        for name, value, expected in (
            ("nnodes", nnodes, 0),
            ("checkpoint_engine.backend", backend, "naive"),
        ):
            if value != expected:
                raise ValueError(
                    f"{ROLLOUT}.{name}={value!r}: expected {expected!r} unless {KEY}.mode is "
                    "'overlap' on GPUs, as the servers share the GPUs of the trainer"
                )
    elif nnodes < 1:
        raise ValueError(
            f"{ROLLOUT}.nnodes={nnodes!r}: expected at least 1 with {KEY}.mode='overlap', as the "
            f"servers need devices of their own ({ROLLOUT}.nnodes × {ROLLOUT}.n_gpus_per_node); "
            "mode='partial' shares the trainer's"
        )
    elif backend == "naive":
        raise ValueError(
            f"{ROLLOUT}.checkpoint_engine.backend={backend!r}: expected 'nccl' or another engine "
            f"between devices with {KEY}.mode='overlap': 'naive' updates servers on the trainer's "
            "own devices"
        )


def _check_filter_groups(config: DictConfig) -> None:
    filters, n = config.algorithm.filter_groups, config.actor_rollout_ref.rollout.n
    key = "algorithm.filter_groups"
    if filters.metric != "reward":
        raise ValueError(
            f"{key}.metric={filters.metric!r}: expected 'reward', as a rollout has one reward"
        )
    if n < 2:
        raise ValueError(
            f"{ROLLOUT}.n={n}: expected at least 2 with {key}.enable=true, as a group of one "
            "rollout has no variance and would be replaced for ever"
        )
    if config.agentlightning.mode == "v0":
        raise ValueError(
            f"agentlightning.mode='v0': expected 'v1' or null with {key}.enable=true, as groups "
            "are replaced while others run"
        )
