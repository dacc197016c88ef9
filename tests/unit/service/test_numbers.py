"""float32 digits."""

from __future__ import annotations

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from service.numbers import dump_json, shortest, shortest_halves


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_the_shortest_digits_read_back_as_the_same_float32(value: float) -> None:
    short = shortest(value)
    assert short is not None
    assert np.float32(short) == np.float32(value)
    assert len(repr(short)) <= len(repr(value)) or abs(short) >= 1e16


def test_what_is_not_finite_is_null() -> None:
    assert shortest(None) is shortest(math.inf) is shortest(-math.inf) is shortest(math.nan) is None
    array = np.array([1.5, -np.inf, np.nan, np.inf, 0.1], dtype=np.float32)
    assert json.loads(dump_json({"a": array})) == {"a": [1.5, None, None, None, 0.1]}
    assert dump_json(array).endswith(b"0.1]")


def test_the_shortest_digits_read_back_as_the_same_float16() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)].reshape(2, -1)
    short = shortest_halves(finite)
    assert short.shape == finite.shape
    assert np.array_equal(short.astype(np.float16), finite)
    assert dump_json(shortest_halves(np.array([0.1, 1, 6e-8, 0.3333], dtype=np.float16))) == (
        b"[0.1,1.0,6e-8,0.3333]"
    )
    assert (
        dump_json(shortest_halves(np.array([np.nan, np.inf], dtype=np.float16))) == b"[null,null]"
    )
