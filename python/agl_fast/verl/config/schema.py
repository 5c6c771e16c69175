"""Schema of `agentlightning.*`: type, range, default and meaning of every key.

The docstring of a field is its meaning, in Markdown. `make generate` writes the group's section of
config.yaml and the tables of docs/configuration.md from this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from agl_fast.rows.levels import LevelName
from agl_fast.rows.options import TREE_MAX_TOKENS, OverlongPrompt, TruncatedRollouts

GROUP = "agentlightning"


@dataclass(frozen=True)
class Range:
    """What an error message says of a constrained type: 'expected `words`'."""

    words: str


Count = Annotated[int, Field(ge=1), Range("at least 1")]
NonNegativeCount = Annotated[int, Field(ge=0), Range("at least 0")]
Port = Annotated[int, Field(ge=0, le=65535), Range("a port from 0 to 65535")]
Finite = Annotated[float, Field(allow_inf_nan=False), Range("a finite number")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), Range("a finite number above 0")]
NonNegative = Annotated[
    float, Field(ge=0, allow_inf_nan=False), Range("a finite number, at least 0")
]
Fraction = Annotated[float, Field(ge=0, le=1), Range("a number from 0 to 1")]
PositiveFraction = Annotated[float, Field(gt=0, le=1), Range("a number above 0, at most 1")]
# What an HTTP header can hold.
HeaderKey = Annotated[
    str,
    Field(pattern=r"^[!-~]([ -~]*[!-~])?$"),
    Range("printable ASCII without spaces at its ends"),
]
Host = Annotated[str, Field(pattern=r"^[^\s/]+$"), Range("a host name or address, without http://")]


class Keys(BaseModel):
    """A group of keys: every default is set, and unknown keys are errors."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )


class RolloutKeys(Keys):
    """Rollouts and rewards."""

    reward_fillna_value: Finite = 0.0
    """reward of a rollout without one; finite"""

    llm_timeout_seconds: Positive = 1200.0
    """timeout of a call (status 504); the store also abandons an attempt that runs, or sends
    nothing, for this long"""

    rollout_deadline_seconds: Positive | None = 3600.0
    """maximum duration of a rollout; a longer one is cancelled and counts as failed; `null`:
    `llm_timeout_seconds`"""

    runner_silent_seconds: Positive | None = 120.0
    """a runner without a heartbeat for this long is considered dead, and its rollout fails or is
    retried (runners send one every ten seconds); `null`: only the two limits above apply"""

    first_runner_seconds: Positive | None = 300.0
    """a run without any runner ends after this time; `null`: after `rollout_deadline_seconds`"""

    failed_rollouts: Literal["skip", "zero"] = "skip"
    """`skip`: rollouts that failed or have no trainable call leave their group; `zero`: failed ones
    count with reward 0"""

    max_empty_steps: NonNegativeCount = 3
    """maximum number of consecutive empty steps (nothing to train on); each is skipped with an
    error message and leaves weights and learning rate unchanged; one more ends the run"""

    sampling: Literal["enforce", "allow"] = "enforce"
    """`enforce`: training uses the run's temperature, top_p and top_k, whatever agents request;
    `allow`: the agents' ([Requests](requests.md))"""

    audit: Literal["stop", "warn"] = "stop"
    """`stop`: end the run if its servers do not hold the actor's weights
    ([the audit](troubleshooting.md#the-audit)); `warn`: only warn"""

    record_dir: str | None = None
    """folder for recordings of every training step and validation ([Recordings](recording.md))"""

    store_port: Port = 4747
    """port on which [the train command](commands.md#train) serves the store; not used with an
    `agl.Trainer`, which has its own store"""

    mode: Literal["v0", "v1"] | None = None
    """`v1`: rollouts use the store; `v0`, deprecated:
    [a server for clients](verl.md#run-without-a-store); `null`: `v1` if there is a store"""

    port: Port = 9999
    """port of mode v0's server, on `proxy.host`; not used in mode v1"""


class LearningKeys(Keys):
    """Learning."""

    rollout_hook: str | None = None
    """`module:function` that receives every training rollout and may change, split or drop it"""

    credit: Literal["identical", "last_call", "discounted", "per_call"] = "identical"
    """credit assignment to calls: `identical`, `last_call`, `discounted`, `per_call`"""

    credit_discount: Fraction = 0.9
    """for `discounted`: credit of a call relative to the next call; 0 to 1"""

    missing_rollout_log_probs: Literal["recompute", "drop"] = "recompute"
    """calls without the server's log-probs, if `algorithm.rollout_correction` needs them:
    `recompute` or `drop`"""

    max_ppo_update_times: Count | None = None
    """maximum number of mini-batches per step (each is passed `actor.ppo_epochs` times); whole
    rollouts are removed to meet it, first those of groups without an advantage"""


class DeadlineKeys(Keys):
    """Deadlines."""

    start_seconds: Positive | None = None
    """starting workers and vLLM servers; `null`: 1800 + 3 × bytes / `bytes_per_second`"""

    checkpoint_seconds: Positive | None = None
    """saving or loading a checkpoint; `null`: 3600 + 8 × bytes / `bytes_per_second`"""

    sync_seconds: Positive | None = None
    """sending the actor's weights to the servers; `null`: 300 + 2 × bytes / `bytes_per_second`"""

    bytes_per_second: Positive = 50e6
    """(not a time) the lowest throughput of disk or network that is considered healthy"""

    room_seconds: Positive = 300.0
    """an existing Ray cluster to have enough free resources"""

    placement_seconds: Positive = 600.0
    """Ray to place the workers and servers"""

    update_seconds: Positive = 86400.0
    """all log-probs, advantages and updates of a step"""

    sleep_seconds: Positive = 900.0
    """the servers to release their memory to the trainer; vLLM finishes running requests first"""

    server_silent_seconds: Positive = 120.0
    """a vLLM server to answer, if it is not known to be dead"""

    enqueue_seconds: Positive = 600.0
    """starting the proxy and enqueueing a step's rollouts in the store"""

    cancel_seconds: Positive = 300.0
    """cancelling abandoned rollouts in the store, and stopping the proxy"""

    store_answer_seconds: Positive = 300.0
    """one answer of the store, to the trainer or to a `ConcurrentRunner`"""

    store_away_seconds: Positive = 120.0
    """the store to become reachable, for example after a restart"""

    record_seconds: Positive = 300.0
    """writing the last rollouts to `record_dir` at the end; the rest is lost with a warning, and
    the run does not fail"""

    leave_seconds: Positive = 300.0
    """Ray to disconnect at the end"""


class ProxyKeys(Keys):
    """The proxy."""

    host: Host = "127.0.0.1"
    """address to bind to; an address other than loopback requires `api_key`"""

    port: Port | None = None
    """port; `null`: a free one"""

    advertise_host: Host | None = None
    """address that agents connect to, if it differs from `host`; `null`: `host`, or this machine's
    address if `host` is a wildcard"""

    api_key: HeaderKey | None = None
    """key that agents must send (`Authorization: Bearer …`); the resource `main_llm` contains it"""

    move_after_seconds: Positive = 30.0
    """requests move to another working server if a vLLM server has accepted no connection for this
    long, or has not answered, not even on `/health`"""

    max_body_bytes: Count = 134217728
    """maximum size of a request body, before and after decompression; above: 413"""

    max_header_bytes: Count = 65536
    """maximum size of a header or request line; above: 431"""

    header_seconds: Positive = 60.0
    """maximum time between the first byte of a request and the end of its headers; above: 408"""

    body_seconds: Positive = 300.0
    """maximum time between the headers and the end of the body; above: 408"""

    max_connections: Count = 16384
    """maximum number of open connections of agents; above: 503"""


class CollectionKeys(Keys):
    """Collection of rollouts."""

    mode: Literal["sync", "partial", "overlap"] = "sync"
    """`sync`: a step waits for all of its rollouts, and nothing is stale; `partial`: servers and
    trainer share devices, a step trains the first complete groups, and the others go on after the
    update; `overlap`: servers have devices of their own, and agents go on during the update"""

    oversample: Annotated[float, Field(ge=1, allow_inf_nan=False), Range("at least 1")] = 2.0
    """samples in flight, as a multiple of `data.train_batch_size`; at most `max_staleness` + 1"""

    max_staleness: NonNegativeCount = 2
    """maximum number of policy versions between the oldest call of a rollout and the update that
    trains it; samples start only as far as it can be kept"""

    on_stale: Literal["train", "drop"] = "train"
    """for a group that is still running when it could not be trained later: `train`: the step waits
    for it; `drop`: it is cancelled and counted, and long rollouts are trained less often than short
    ones"""

    drain_seconds: NonNegative = 5.0
    """time in which calls in flight may finish before the weights change; the proxy aborts the rest
    and repeats them afterwards"""


class TraceAggregatorKeys(Keys):
    """Row keys."""

    level: LevelName = "transition"
    """`transition`: one row per call, as wide as `data.max_prompt_length` and
    `data.max_response_length`; `trajectory`: one row per chain of calls, as wide as the next keys;
    `tree`: one row per rollout, the [prefix tree](tree_training.md) of its calls"""

    trajectory_max_prompt_length: Count = 2048
    """maximum length of a chain's first prompt"""

    trajectory_max_response_length: Count = 8192
    """maximum length of everything after it: answers, tool results, user messages"""

    trajectory_max_total_length: Annotated[int, Field(ge=2), Range("at least 2")] | None = None
    """maximum length of both together; `null`: no separate limit"""

    tree_max_tokens: Count = TREE_MAX_TOKENS
    """maximum size of a tree; a larger one is split by calls, a longer call is not trained;
    `ppo_max_token_len_per_gpu` must be at least as large"""

    overlong_prompt: OverlongPrompt | None = None
    """`drop`: the row is not trained; `spill`: the excess moves into the response, untrained;
    `null`: `drop` at level transition, `spill` at level trajectory"""

    truncated_rollouts: TruncatedRollouts = "train"
    """for a rollout that lost sampled tokens to a limit: `train` the rest, `mask` all of it, or
    `zero_reward`"""

    trim: bool = True
    """pad rows to the longest row of the batch instead of the limits; what is learned is the same
    """

    debug: bool = False
    """at level trajectory: distinguish retokenised text from rewritten history, and log each
    mismatch"""

    mismatch_log_dir: str | None = "./mismatch_cases"
    """folder of these logs, 4 MiB each at most; `null`: no logs"""


class AgentLightningKeys(LearningKeys, RolloutKeys):
    """All keys of `agentlightning`."""

    deadlines: DeadlineKeys = DeadlineKeys()
    """maximum time, in seconds, that the run waits for each of the following; bytes: the size of
    the model's files, 140e9 if they are not on this machine"""

    proxy: ProxyKeys = ProxyKeys()
    """the OpenAI-compatible server that agents call, in front of the vLLM servers"""

    collection: CollectionKeys = CollectionKeys()
    """when rollouts start, and when they are trained ([Collection](collection.md))"""

    trace_aggregator: TraceAggregatorKeys = TraceAggregatorKeys()
    """how calls become rows"""


# One table of docs/configuration.md each: its name there, the keys, and the group they are in.
TABLES: dict[str, tuple[type[Keys], str]] = {
    "rollouts": (RolloutKeys, GROUP),
    "learning": (LearningKeys, GROUP),
    "deadlines": (DeadlineKeys, f"{GROUP}.deadlines"),
    "proxy": (ProxyKeys, f"{GROUP}.proxy"),
    "collection": (CollectionKeys, f"{GROUP}.collection"),
    "rows": (TraceAggregatorKeys, f"{GROUP}.trace_aggregator"),
}
