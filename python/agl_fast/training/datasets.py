"""Users' samples in the form that verl's data loader and the daemon take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Samples:
    """A sequence of samples as dictionaries.

    Args:
        samples: sequence of mappings, dataclasses, named tuples or objects with a `model_dump`
            method (pydantic).
    """

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The sample as a dictionary.

        Raises:
            TypeError: unsupported type of sample.
        """
        sample = self._samples[int(index)]
        if isinstance(sample, Mapping):
            return dict(sample)
        if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
            return dataclasses.asdict(sample)
        for method in ("model_dump", "_asdict"):
            if hasattr(sample, method):
                return dict(getattr(sample, method)())
        raise TypeError(
            f"sample {index} of the dataset is a {type(sample).__name__}: expected a mapping, a "
            "dataclass, a named tuple or a pydantic model, whose fields the agent gets"
        )


def columns_of(samples: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """verl's collate function: (samples,) objects by name, None for missing keys."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    columns = {}
    for name in names:
        columns[name] = np.empty(len(samples), dtype=object)
        for i, sample in enumerate(samples):
            columns[name][i] = sample.get(name)
    return columns


def repeated(columns: Mapping[str, NDArray[Any]], times: int) -> dict[str, NDArray[Any]]:
    """Repeat every sample `times` times."""
    return {name: np.repeat(column, times) for name, column in columns.items()}
