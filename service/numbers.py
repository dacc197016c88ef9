"""float32 as JSON: the shortest digits that read back as the same float32; not finite is null."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray


def shortest(value: float | None) -> float | None:
    """A float32 as the float64 whose digits are shortest; None if it is not finite.

    >>> shortest(-0.10000000149011612)
    -0.1
    """
    if value is None or not math.isfinite(value):
        return None
    return float(str(np.float32(value)))


def shortest_halves(values: NDArray[np.float16]) -> NDArray[np.float64]:
    """float16 numbers as the float64 whose digits are shortest and read back as the same float16.

    >>> float(np.float16(0.1))
    0.0999755859375
    >>> shortest_halves(np.array([0.1], dtype=np.float16)).tolist()
    [0.1]
    """
    table: NDArray[np.float64] = _halves()
    return table[values.view(np.uint16)]


@cache
def _halves() -> NDArray[np.float64]:
    """Every float16 there is, by its bits."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    return every.astype(str).astype(np.float64)


def dump_json(content: Any) -> bytes:
    """JSON of plain values and float32 arrays."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
