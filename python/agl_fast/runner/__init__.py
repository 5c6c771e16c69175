"""Runners for Agent-lightning that keep several rollouts in flight per process."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the libraries that agentlightning imports
    from agl_fast.runner.concurrent import ConcurrentRunner
    from agl_fast.runner.rollout_tracer import RolloutEndedError, RolloutTracer

__all__ = ["ConcurrentRunner", "RolloutEndedError", "RolloutTracer"]
