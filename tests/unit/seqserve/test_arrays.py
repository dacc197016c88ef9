"""Reading safetensors without the library."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.numpy import save

import seqserve.arrays
from seqserve.arrays import chosen_kind, read_safetensors
from seqserve.client import Client

TENSORS = {
    "logits": np.arange(6, dtype=np.float32).reshape(1, 2, 3),
    "weights": np.array([0.5, 1.5, 2.5], dtype=np.float16),
    "ids": np.array([[1, 2]], dtype=np.int64),
}


def test_safetensors_are_read_as_the_library_writes_them() -> None:
    read = read_safetensors(save(TENSORS))
    assert read.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        assert read[name].dtype == array.dtype
        assert np.array_equal(read[name], array)


def test_tensors_are_read_as_arrays_are() -> None:
    read = read_safetensors(save(TENSORS), "torch")
    for name, array in TENSORS.items():
        assert isinstance(read[name], torch.Tensor)
        assert np.array_equal(read[name].numpy(), array)


def test_what_was_read_can_be_written_to() -> None:
    array = read_safetensors(save(TENSORS))["logits"]
    array += 1.0
    assert torch.from_numpy(array)[0, 0, 0] == 1.0


def test_numpy_is_taken_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_kind(None) == "numpy"
    assert chosen_kind("torch") == "torch"
    monkeypatch.setattr(seqserve.arrays.importlib.util, "find_spec", lambda _: None)
    assert chosen_kind(None) == chosen_kind("list") == "list"
    with pytest.raises(ValueError, match="arrays='torch' needs torch, which is not installed"):
        Client(arrays="torch")
