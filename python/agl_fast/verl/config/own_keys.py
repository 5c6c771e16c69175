"""The types of agl_fast's own keys. `config.yaml` says what they mean and holds the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ProxyKeys:
    """`agentlightning.proxy`."""

    host: str
    port: int | None
    advertise_host: str | None
    api_key: str | None
    move_after_seconds: float
    max_body_bytes: int
    max_header_bytes: int
    header_seconds: float
    body_seconds: float
    max_connections: int


@dataclass(frozen=True)
class DeadlineKeys:
    """`agentlightning.deadlines`."""

    start_seconds: float | None
    checkpoint_seconds: float | None
    sync_seconds: float | None
    bytes_per_second: float
    room_seconds: float
    placement_seconds: float
    update_seconds: float
    sleep_seconds: float
    server_silent_seconds: float
    enqueue_seconds: float
    cancel_seconds: float
    store_answer_seconds: float
    store_away_seconds: float
    record_seconds: float
    leave_seconds: float


@dataclass(frozen=True)
class TraceAggregatorKeys:
    """`agentlightning.trace_aggregator`."""

    level: Literal["transition", "trajectory", "tree"]
    trajectory_max_prompt_length: int
    trajectory_max_response_length: int
    trajectory_max_total_length: int | None
    tree_max_tokens: int
    overlong_prompt: Literal["drop", "spill"] | None
    truncated_rollouts: Literal["train", "mask", "zero_reward"]
    trim: bool
    debug: bool
    mismatch_log_dir: str | None


@dataclass(frozen=True)
class AgentLightningKeys:
    """`agentlightning`."""

    mode: Literal["v0", "v1"] | None
    port: int
    store_port: int
    reward_fillna_value: float
    llm_timeout_seconds: float
    rollout_deadline_seconds: float | None
    runner_silent_seconds: float | None
    first_runner_seconds: float | None
    failed_rollouts: Literal["skip", "zero"]
    max_empty_steps: int
    rollout_hook: str | None
    credit: Literal["identical", "last_call", "discounted", "per_call"]
    credit_discount: float
    missing_rollout_log_probs: Literal["recompute", "drop"]
    max_ppo_update_times: int | None
    record_dir: str | None
    sampling: Literal["enforce", "allow"]
    deadlines: DeadlineKeys
    audit: Literal["stop", "warn"]
    proxy: ProxyKeys
    trace_aggregator: TraceAggregatorKeys
