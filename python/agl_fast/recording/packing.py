"""Arrays as base64 text, little-endian."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
from numpy.typing import NDArray

_INT32 = np.iinfo(np.int32)
_IDS = np.dtype("<i4")
_LOG_PROBS = np.dtype("<f4")


def as_ids(values: Any, where: str) -> NDArray[np.int32]:
    """Token ids as int32, (N,).

    Raises:
        TypeError: they are not whole numbers in one dimension. ValueError: one does not fit.
    """
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(
            f"{where} must be a sequence of int, got {array.dtype} of shape {array.shape}"
        )
    if array.min() < _INT32.min or array.max() > _INT32.max:
        raise ValueError(f"{where} has ids that do not fit into int32")
    return array.astype(np.int32)


def pack_ids(ids: NDArray[np.int32]) -> str:
    return _pack(ids.astype(_IDS))


def pack_log_probs(values: Any, where: str) -> str:
    """Log-probs as float32.

    Raises:
        TypeError: they are not numbers in one dimension.
    """
    array = np.asarray(values)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iuf"):
        raise TypeError(
            f"{where} must be a sequence of float, got {array.dtype} of shape {array.shape}"
        )
    return _pack(array.reshape(-1).astype(_LOG_PROBS))


def unpack_ids(text: str) -> NDArray[np.int32]:
    """int32, (N,).

    Raises:
        ValueError: the text is no base64 of whole numbers of 4 bytes.
    """
    return _unpack(text, _IDS).astype(np.int32)


def unpack_log_probs(text: str) -> NDArray[np.float32]:
    """float32, (N,).

    Raises:
        ValueError: as for ``unpack_ids``.
    """
    return _unpack(text, _LOG_PROBS).astype(np.float32)


def _pack(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _unpack(text: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        packed = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"expected base64: {error}") from None
    if len(packed) % dtype.itemsize:
        raise ValueError(f"expected a multiple of {dtype.itemsize} bytes, got {len(packed)}")
    return np.frombuffer(packed, dtype)
