"""What the environment variables of the user say, and those that a run sets."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # The actor and the server take turns on the same cores.
    "OMP_NUM_THREADS": "1",
}


def model_and_device(parser: argparse.ArgumentParser) -> tuple[str | None, str]:
    """MODEL (None: a tiny one is to be made) and DEVICE; ends the program if they do not fit."""
    model, device = os.environ.get("MODEL"), os.environ.get("DEVICE", "cpu")
    if device not in ("cpu", "cuda"):
        parser.error(f"DEVICE={device}: expected cpu or cuda")
    if device == "cuda" and model is None:
        parser.error("DEVICE=cuda: expected MODEL=name-or-folder as well")
    return model, device


def set_environment(run_folder: Path, device: str) -> None:
    """Set what verl, Ray and vLLM read when they are imported."""
    os.environ.update(ENVIRONMENT | (CPU_ENVIRONMENT if device == "cpu" else {}))
    os.environ["VERL_FILE_LOGGER_PATH"] = str(run_folder / "metrics.jsonl")
