"""Tensors as a safetensors file that is sent as it is written: nothing of its size is copied.

The format (https://github.com/huggingface/safetensors): the header's length as a little-endian
64-bit number, a JSON header that says where each tensor begins and ends, then the tensors' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIECE = 1 << 19
"""Bytes handed on at once, at most: what a socket takes without having to be asked again."""

DTYPES = {"float32": "F32", "float16": "F16", "int64": "I64"}
"""What the format calls them."""

ALIGNMENT = 8
"""Bytes: tensors begin at a multiple of it, so that readers can map them."""


@dataclass(frozen=True)
class Padded:
    """Arrays of several lengths as one tensor, ``[batch, longest, ...]``.

    Attributes:
        rows: of one dtype, and of one shape but for the first axis.
        padding: what stands behind the shorter ones.
    """

    rows: Sequence[NDArray[Any]]
    padding: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        longest = max(len(row) for row in self.rows)
        return (len(self.rows), longest, *self.rows[0].shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.rows[0].dtype

    def blocks(self) -> Iterator[NDArray[Any]]:
        """The rows and what pads them, in the order of memory."""
        _, longest, *rest = self.shape
        for row in self.rows:
            yield row
            for _ in range(longest - len(row)):
                yield np.full(rest, self.padding, self.dtype)


Tensor = NDArray[Any] | Padded


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file that has yet to be written.

    Attributes:
        tensors: by name.
        metadata: texts that go with them.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] | None = None

    @property
    def header(self) -> bytes:
        """All that stands before the tensors' bytes."""
        entries: dict[str, Any] = {"__metadata__": self.metadata} if self.metadata else {}
        begin = 0
        for name, tensor in self._ordered():
            end = begin + size(tensor)
            entries[name] = {
                "dtype": DTYPES[tensor.dtype.name],
                "shape": tensor.shape,
                "data_offsets": (begin, end),
            }
            begin = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    def __len__(self) -> int:
        return len(self.header) + sum(map(size, self.tensors.values()))

    def __iter__(self) -> Iterator[bytes | memoryview]:
        """The file's bytes, in pieces."""
        yield self.header
        for _, tensor in self._ordered():
            for block in tensor.blocks() if isinstance(tensor, Padded) else (tensor,):
                view = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
                for begin in range(0, len(view), PIECE):
                    yield view[begin : begin + PIECE]

    def _ordered(self) -> list[tuple[str, Tensor]]:
        """Wide numbers first, so that every tensor is aligned."""
        return sorted(self.tensors.items(), key=lambda item: -item[1].dtype.itemsize)


def size(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    return int(np.prod(tensor.shape)) * tensor.dtype.itemsize
