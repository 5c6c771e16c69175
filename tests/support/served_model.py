"""A Hugging Face directory behind `vllm serve`, as docs/commands.md serves an exported one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_SECONDS = 300.0
ANSWER_SECONDS = 60.0
END_SECONDS = 60.0
# float32, as it was trained: vLLM would serve it in half precision.
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1")
GREEDY = {"do_sample": False, "repetition_penalty": 1.0}


class ServedModel:
    """The server's answers."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._address = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._address}/health", timeout=ANSWER_SECONDS):
                return True
        except OSError:
            return False

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], list[float]]:
        """Ids and log-probs of the answer."""
        asked = {
            "model": str(self._folder),
            "prompt": list(prompt),
            "temperature": 0,
            "repetition_penalty": 1.0,  # whatever the folder says
            "max_tokens": max_tokens,
            "logprobs": 0,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self._address}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            choice = json.load(answer)["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@contextmanager
def served(folder: Path, log: Path, environment: Mapping[str, str]) -> Iterator[ServedModel]:
    """Start a server, and end it.

    Args:
        log: what the server prints goes there.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    vllm = str(Path(sys.executable).with_name("vllm"))
    with log.open("w") as out:
        started = subprocess.Popen(
            [vllm, "serve", str(folder), "--port", str(port), *OPTIONS],
            env={**environment, "VLLM_CPU_KVCACHE_SPACE": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            model = ServedModel(folder, port)
            deadline = time.monotonic() + START_SECONDS
            while not model.is_ready():
                assert started.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.5)
            yield model
        finally:
            started.terminate()
            started.wait(END_SECONDS)


def greedy_of_transformers(
    folder: Path, prompt: Sequence[int], max_tokens: int
) -> tuple[list[int], list[float]]:
    """What transformers answers from the same directory."""
    model = _loaded(folder)
    ids = model.generate(_batch(prompt), **GREEDY, max_new_tokens=max_tokens)[0].tolist()
    response = ids[len(prompt) :]
    return response, log_probs(folder, prompt, response)


def log_probs(folder: Path, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
    """Of a response, at temperature 1."""
    import torch

    with torch.no_grad():
        logits = _loaded(folder)(_batch([*prompt, *response])).logits[0].float()
    all_log_probs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(all_log_probs, response, strict=True)]


def _loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def _batch(ids: Sequence[int]) -> Any:
    import torch

    return torch.tensor([list(ids)])
