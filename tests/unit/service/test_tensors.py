"""The safetensors writer, read back by the format's own library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load

from service.tensors import ALIGNMENT, PIECE, Padded, TensorFile

RNG = np.random.default_rng(1)


def floats(*shape: int, dtype: str = "float32") -> NDArray[Any]:
    return RNG.standard_normal(shape).astype(dtype)


def test_the_format_s_library_reads_what_was_written(tmp_path: Path) -> None:
    rows = [floats(3, 5), floats(1, 5), floats(2, 5)]
    ids = [np.array([7, 8]), np.array([9])]
    halves = floats(3, 3, dtype="float16")
    file = TensorFile(
        {"halves": halves, "rows": Padded(rows), "ids": Padded(ids, padding=-1)}, {"who": '["a"]'}
    )
    content = b"".join(file)
    assert len(content) == len(file)
    read = load(content)
    assert set(read) == {"halves", "rows", "ids"}
    assert np.array_equal(read["halves"], halves)
    assert read["ids"].tolist() == [[7, 8], [9, -1]]
    for row, written in zip(read["rows"], rows, strict=True):
        assert np.array_equal(row[: len(written)], written)
        assert not row[len(written) :].any()
    path = tmp_path / "file.safetensors"
    path.write_bytes(content)
    with safe_open(path, "numpy") as opened:
        assert opened.metadata() == {"who": '["a"]'}


def test_every_tensor_is_aligned_to_its_numbers() -> None:
    file = TensorFile({"a": floats(3, dtype="float16"), "b": np.arange(2), "c": floats(1)})
    entries = json.loads(file.header[8:])
    assert len(file.header) % ALIGNMENT == 0
    for name, width in (("a", 2), ("b", 8), ("c", 4)):
        assert entries[name]["data_offsets"][0] % width == 0


def test_pieces_show_the_tensor_itself() -> None:
    tensor = floats(PIECE // 2)  # two pieces of float32
    _, *pieces = TensorFile({"a": tensor})
    assert [len(piece) for piece in pieces] == [PIECE, PIECE]
    tensor[:] = 3.0
    assert b"".join(pieces) == tensor.tobytes(), "a copy would not have changed"
