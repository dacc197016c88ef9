"""Memory for keys and values of rows that come, grow, change places and go.

On a CPU a step waits for memory more than for anything else in its attention, so that how keys and
values lie there, and in which pieces they are read, is decided here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.attention import Pieces
from model.transformer import Transformer

IDLE_BYTES = 2**28
"""Of keys and values that a cache without rows holds on to, at most: new memory costs a burst of
requests up to a tenth of its time."""

PIECE = 16
"""Positions to read side by side, all rows of each: a CPU foresees so many streams."""

STREAMED_LENGTH, STREAMED_PER_ROW = 64, 32
"""Positions, and more for each row, beyond which those of a head lie together: as many streams as
that cost more than waits between pieces of memory that long."""

LENGTH_BLOCK = 64
"""Target lengths grow by so many positions, so that growing is rare and padding small."""


@dataclass(frozen=True)
class CacheShape:
    """Sizes that do not change: decoder layers, heads and width of a head."""

    layers: int
    heads: int
    head_dim: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, network: Transformer) -> CacheShape:
        """What a network's decoder remembers, of either side."""
        attention = network.decoder.layers[0].self_attention
        table = network.decoder.embedding.tokens.weight  # linear layers may be packed
        return cls(
            layers=len(network.decoder.layers),
            heads=attention.heads,
            head_dim=attention.head_dim,
            device=table.device,
            dtype=table.dtype,
        )

    @property
    def bytes_per_position(self) -> int:
        """Of keys and values, of one row."""
        return self.layers * 2 * self.heads * self.head_dim * self.dtype.itemsize

    def bytes_per_row(self, positions: int) -> int:
        """What is allocated on the target side for a row of so many positions."""
        return self.bytes_per_position * _round_up(positions, LENGTH_BLOCK)

    def size(self, rows: int, length: int) -> tuple[int, ...]:
        """``[layers, 2, rows, heads, length, head_dim]``: keys at 0, values at 1."""
        return (self.layers, 2, rows, self.heads, length, self.head_dim)

    def zeros(self, numbers: int) -> Tensor:
        """Memory for so many."""
        return torch.zeros(numbers, device=self.device, dtype=self.dtype)

    def view(self, memory: Tensor, rows: int, length: int) -> Tensor:
        """The beginning of flat memory as a tensor of this size.

        In memory, a head's positions follow one another. Where steps read them on a CPU, rows
        and their heads do, position behind position, unless rows are few and long: wherever a
        reader leaves a piece of memory for one that is not the next, it waits.
        """
        size = self.size(rows, length)
        memory = memory[: math.prod(size)]
        streamed = self.device.type == "cpu" and self.dtype == torch.float32
        if not streamed or length > STREAMED_LENGTH + STREAMED_PER_ROW * rows:
            return memory.view(size)
        layers, sides, _, heads, _, head_dim = size
        by_position = memory.view(layers, sides, length, rows, heads, head_dim)
        return by_position.permute(0, 1, 3, 4, 2, 5)


class Pool:
    """Keys and values of rows that come, grow and go, in one tensor that grows as needed.

    Args:
        tight: whether rows are as long as the longest one needs, and no longer: no memory is spent
            on gaps, which are read around, but each time that the longest one grows all are copied.

    Attributes:
        tensor: ``[layers, 2, row capacity, heads, length capacity, head_dim]``, in memory as
            `CacheShape.view` lays it out.
        lengths: positions in use, one per live row.
        begun: positions behind those in use that a step may have begun to write.
        held: whether the tensor stays as it is when rows leave, for what is bound to it.
    """

    def __init__(self, shape: CacheShape, tight: bool = False) -> None:
        self.shape = shape
        self.tight = tight
        self._memory = shape.zeros(0)
        self.tensor = shape.view(self._memory, 0, 0)
        self.lengths: list[int] = []
        self.begun = 1
        self.held = False
        self._reached = 0  # no position from here on was written since the pool was empty

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    def reserve(self, rows: int, length: int) -> None:
        """Make room; contents stay. Row capacity at least doubles where it grows."""
        have_rows, have_length = self.tensor.shape[2], self.tensor.shape[4]
        needed = max(length, self.longest)
        self._reached = max(self._reached, needed + self.begun)
        roomy = have_length - needed >= (needed if self.rows else 1)
        if rows <= have_rows and needed <= have_length and not (self._may_shrink and roomy):
            return
        new_rows = have_rows if rows <= have_rows else max(rows, 2 * have_rows)
        new_length = needed if self.tight else max(have_length, _round_up(needed, LENGTH_BLOCK))
        numbers = math.prod(self.shape.size(new_rows, new_length))
        if not self.rows and numbers <= len(self._memory):  # all of it zeros
            self.tensor = self.shape.view(self._memory, new_rows, new_length)
            return
        memory = self.shape.zeros(numbers)
        grown = self.shape.view(memory, new_rows, new_length)
        in_use = (slice(None), slice(None), slice(self.rows), slice(None), slice(self.longest))
        grown[in_use] = self.tensor[in_use]
        self.tensor, self._memory = grown, memory

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; only those that change place are copied."""
        if not rows and not self.held and self._memory.nbytes > IDLE_BYTES:
            self.release()
        moves = [(new, old) for new, old in enumerate(rows) if new != old]
        if self.tensor.device.type == "cpu":
            self._copy_one_by_one(moves)
        elif moves:
            in_use = self.tensor[..., : self.longest + self.begun, :]
            new, old = map(list, zip(*moves, strict=True))
            in_use[:, :, new] = in_use[:, :, old]
        # Whoever comes next masks what lies here, but a mask does not stop a NaN.
        self.tensor[:, :, len(rows) : self.rows, :, : self._reached].zero_()
        self.lengths = [self.lengths[row] for row in rows]
        if not rows:
            self._reached = 0

    def _copy_one_by_one(self, moves: Sequence[tuple[int, int]]) -> None:
        """Each row as far as it is in use; nothing stays of what the row there had."""
        aside = self.tensor[:0]
        for new, old in one_by_one(moves):
            row = aside if old is None else self.tensor[:, :, old, :, : self.lengths[old]]
            if new is None:
                aside = row.clone()
                continue
            place, length = self.tensor[:, :, new], row.shape[3]
            place[..., :length, :] = row
            place[..., length : self.lengths[new] + self.begun, :] = 0.0

    def release(self) -> None:
        """Return the memory; no rows live."""
        self._memory = self.shape.zeros(0)
        self.tensor = self.shape.view(self._memory, 0, 0)

    def wipe(self) -> None:
        """Leave nothing behind the live rows: a join that failed may have written there."""
        self.tensor[:, :, self.rows :].zero_()

    def pieces(self, lengths: Sequence[int]) -> Pieces | None:
        """How `attention` best reads rows of these lengths; None is all at once."""
        if self.tensor.stride(4) < self.tensor.stride(3):  # one piece of memory each
            return None
        return cut_keys(lengths)

    def excess(self, order: Sequence[int]) -> int:
        """Positions that attention would not read if the rows were in another order."""
        if self.pieces(self.lengths) is None:
            return 0
        return _read(self.lengths) - _read([self.lengths[row] for row in order])

    @property
    def _may_shrink(self) -> bool:
        return self.tight and not self.held


def one_by_one(moves: Iterable[tuple[int, int]]) -> Iterator[tuple[int | None, int | None]]:
    """Moves from old to new places, all of them at once, as copies that come one after another.

    Args:
        moves: pairs of new and old place; several may come from one.

    Yields:
        pairs of new and old place, None for one aside.

    >>> list(one_by_one([(0, 1), (1, 0), (2, 0)]))
    [(2, 0), (None, 1), (1, 0), (0, None)]
    """
    origin = dict(moves)
    readers = Counter(origin.values())
    free = [new for new in origin if not readers[new]]
    while free:
        new = free.pop()
        old = origin.pop(new)
        yield new, old
        readers[old] -= 1
        if old in origin and not readers[old]:
            free.append(old)
    while origin:  # rings, each place read by one other
        new, old = origin.popitem()
        yield None, new
        last = new
        while old != last:
            yield new, old
            new, old = old, origin.pop(old)
        yield new, None


def cut_keys(lengths: Sequence[int]) -> Pieces:
    """Keys in pieces of `PIECE`; of few rows in larger ones, since another one costs two calls.

    >>> [(part.start, part.stop, rows) for part, rows in cut_keys([70, 3, 17, *[5] * 10])]
    [(0, 16, 13), (16, 48, 3), (48, 70, 1)]
    """
    longest = max([1, *lengths])
    pieces = []
    start, rows = 0, len(lengths)
    while start < longest:
        while start and lengths[rows - 1] <= start:
            rows -= 1
        stop = start + PIECE * max(1, 8 // rows)
        if longest - stop < PIECE // 2:
            stop = longest
        pieces.append((slice(start, stop), rows))
        start = stop
    return pieces


def _read(lengths: Sequence[int]) -> int:
    """Positions in all pieces."""
    return sum((part.stop - part.start) * rows for part, rows in cut_keys(lengths))


def _round_up(n: int, block: int) -> int:
    return -(-n // block) * block
