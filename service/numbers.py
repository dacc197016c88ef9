"""float32 as JSON: the shortest digits that read back as the same float32; not finite is null."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson


def shortest(value: float | None) -> float | None:
    """A float32 as the float64 whose digits are shortest; None if it is not finite.

    >>> shortest(-0.10000000149011612)
    -0.1
    """
    if value is None or not math.isfinite(value):
        return None
    return float(str(np.float32(value)))


def dump_json(content: Any) -> bytes:
    """JSON of plain values and float32 arrays."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
