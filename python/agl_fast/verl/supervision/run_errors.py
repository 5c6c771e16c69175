"""The error of a run, said once, with what to do about it."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

# What an error's text says, and the cure that its own text lacks.
_CURES = {
    "memory usage threshold": (
        "The machine's memory is full, and Ray ended a process. Start fewer runners (n_runners), "
        "make micro-batches smaller (actor.ppo_max_token_len_per_gpu), give vLLM less (on a CPU "
        "VLLM_CPU_KVCACHE_SPACE), or let Ray use more of it (RAY_memory_usage_threshold)."
    ),
    "CUDA out of memory": (
        "The GPU's memory is full: make micro-batches smaller (actor.ppo_max_token_len_per_gpu, "
        "rollout.log_prob_max_token_len_per_gpu), or give vLLM less "
        "(rollout.gpu_memory_utilization)."
    ),
}


def add_note(error: BaseException | None, text: str) -> None:
    """Print the text below the error's message."""
    note = getattr(error, "add_note", None)
    if note is not None:
        note(text)
    else:  # Python 3.10
        logger.error("%s", text)


def say_once(error: BaseException) -> None:
    """Leave out the causes whose text the error repeats, and add the cure, if one is known."""
    text = str(error)
    _cut_repeated_causes(error)
    for sign, cure in _CURES.items():
        if sign in text:
            add_note(error, cure)


def _cut_repeated_causes(error: BaseException) -> None:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while cause is not None:
        if _last_line(cause) and _last_line(cause) in str(error):
            error.__cause__ = None
            error.__suppress_context__ = True
            return
        error, cause = (
            cause,
            cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__),
        )


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else ""
