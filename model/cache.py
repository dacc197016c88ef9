"""What cached decoding remembers: keys and values of targets so far, and of sources.

Rows are kept compact: row r of every tensor is the r-th live sequence. A source lies in a *slot*
of its own, shared by all rows that continue from it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.attention import MultiHeadAttention, Pieces, mask_bias, padding_mask
from model.config import ModelSpec
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


@dataclass(frozen=True)
class RequestMemory:
    """What one request takes of a device's memory while it is decoded, in bytes.

    Attributes:
        per_source_token: keys and values of cross-attention, and the encoder's output.
        per_target_token: keys and values of self-attention, for each row: a beam search has
            `num_beams`.
        longest: of a request of one row, with the longest source and target that the model takes;
            the target's length is rounded up as the cache does.
    """

    per_source_token: int
    per_target_token: int
    longest: int

    @classmethod
    def of(cls, network: Transformer, spec: ModelSpec) -> RequestMemory:
        shape = CacheShape.of(network)
        table = network.encoder.embedding.tokens.weight
        memory = table.shape[1] * table.dtype.itemsize  # the encoder's output
        per_source_token = shape.bytes_per_position + memory
        return cls(
            per_source_token=per_source_token,
            per_target_token=shape.bytes_per_position,
            longest=spec.max_src * per_source_token + shape.bytes_per_row(spec.max_tgt),
        )


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


# --- the target side ---------------------------------------------------------------------------


class TargetCache:
    """Self-attention keys and values of every live row."""

    def __init__(self, shape: CacheShape) -> None:
        self.pool = Pool(shape)

    def join(self, rows: int, prefix_length: int) -> list[PrefixKeysValues]:
        """Room for new rows of up to `prefix_length` positions: each layer's place to write."""
        first = self.pool.rows
        self.pool.reserve(first + rows, prefix_length)
        places = self.pool.tensor[:, :, first : first + rows, :, :prefix_length]
        return [PrefixKeysValues(keys, values) for keys, values in places]

    def joined(self, lengths: Sequence[int]) -> None:
        """Count the new rows in, each with its own number of positions."""
        first, longest = self.pool.rows, max(lengths)
        self.pool.lengths.extend(lengths)
        for row, length in enumerate(lengths, first):
            if length < longest:  # padding ran too; the mask hides it, but does not stop a NaN
                self.pool.tensor[:, :, row, :, length:longest].zero_()

    def next_positions(
        self, part: slice, width: int = 1
    ) -> tuple[list[StepKeysValues], Tensor | None, Tensor]:
        """Prepare a step that adds positions to each row of a part.

        Returns:
            one place to write per layer; the mask ``[rows, 1, width, longest + width]``, None where
            all rows may see everything; the positions ``[rows, width]``.
        """
        pool = self.pool
        lengths = torch.tensor(pool.lengths[part], device=pool.shape.device)
        length = max(pool.lengths[part]) + width
        pool.reserve(pool.rows, length)
        pool.begun = max(pool.begun, width)
        positions = lengths[:, None] + torch.arange(width, device=pool.shape.device)
        mask = None
        # A GPU is not asked: a mask costs it nothing, but reading positions back would.
        alike = width == 1 and min(pool.lengths[part]) + 1 == length
        if not alike or pool.shape.device.type != "cpu":
            seen = padding_mask(positions.flatten() + 1, length)
            mask = seen.view(len(lengths), 1, width, length)
        rows = torch.arange(len(lengths), device=pool.shape.device)[:, None]
        live = pool.tensor[:, :, part, :, :length]
        pieces = pool.pieces([n + width for n in pool.lengths[part]])
        layers = [StepKeysValues(keys, values, rows, positions, pieces) for keys, values in live]
        return layers, mask, positions

    def advance(self, part: slice) -> None:
        """The step is done: each row of the part has one position more."""
        lengths = self.pool.lengths
        lengths[part] = [length + 1 for length in lengths[part]]

    def accept(self, kept: Sequence[int]) -> None:
        """Each row has so many positions more; nothing stays of what was written behind them."""
        pool = self.pool
        for row, count in enumerate(kept):
            end = pool.lengths[row] + pool.begun
            pool.lengths[row] += count
            # The mask would hide it, but a mask does not stop a NaN.
            pool.tensor[:, :, row, :, pool.lengths[row] : end].zero_()

    def keep(self, rows: Sequence[int]) -> None:
        self.pool.keep(rows)


@dataclass(frozen=True)
class PrefixKeysValues:
    """One layer's place for the prefixes of new rows: views ``[rows, heads, prefix, head_dim]``.

    What padding leaves behind a row's length is wiped when the rows are counted in.
    """

    keys: Tensor
    values: Tensor

    def attend(self, attention: MultiHeadAttention, x: Tensor, mask: Tensor | None) -> Tensor:
        queries, keys, values = attention.queries_keys_values(x)
        self.keys.copy_(keys)
        self.values.copy_(values)
        attended: Tensor = attention(queries, keys, values, mask)
        return attended


@dataclass(frozen=True)
class StepKeysValues:
    """One layer's keys and values of live rows: views ``[rows, heads, longest, head_dim]``.

    Attributes:
        rows: ``[rows, 1]``: 0, 1, ...
        positions: ``[rows, new]``, where each row's new positions go.
        pieces: of the rows, new positions included.
    """

    keys: Tensor
    values: Tensor
    rows: Tensor
    positions: Tensor
    pieces: Pieces | None = None

    def attend(self, attention: MultiHeadAttention, x: Tensor, mask: Tensor | None) -> Tensor:
        queries, *new = attention.queries_keys_values(x)
        self.extend(*new)
        attended: Tensor = attention(queries, self.keys, self.values, mask, self.pieces)
        return attended

    def extend(self, keys: Tensor, values: Tensor) -> None:
        """Write each row's new positions ``[rows, heads, new, head_dim]`` where that row ends."""
        self.keys[self.rows, :, self.positions] = keys.transpose(1, 2)
        self.values[self.rows, :, self.positions] = values.transpose(1, 2)


# --- the source side ---------------------------------------------------------------------------


class SourceCache:
    """Cross-attention keys and values, one slot per source, shared by its rows.

    Attributes:
        slots: slot of each live row.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.pool = Pool(shape, tight=True)
        self.slots: list[int] = []
        self._layers: list[SlotKeysValues] = []

    def join(
        self, layers: Sequence[tuple[Tensor, Tensor]], lengths: Sequence[int], slots: Sequence[int]
    ) -> None:
        """Add sources, and the rows that use them.

        Args:
            layers: keys and values per layer, ``[1, heads, sum of lengths, head_dim]``: of one
                source behind the other, of an empty one a column that nobody may see.
            lengths: of each source.
            slots: which of these sources each new row uses, counted from 0.
        """
        first, device = self.pool.rows, self.pool.shape.device
        self.pool.reserve(first + len(lengths), max(1, *lengths))
        places = [
            (first + i, position)
            for i, length in enumerate(lengths)
            for position in range(max(1, length))
        ]
        row, position = torch.tensor(places, device=device).t()
        for place, sides in zip(self.pool.tensor, layers, strict=True):
            for side, new in zip(place, sides, strict=True):
                # [1, heads, sum of lengths, head_dim] -> [sum of lengths, heads, head_dim]
                side[row, :, position] = new[0].transpose(0, 1)
        self.pool.lengths.extend(lengths)
        self.slots.extend(first + slot for slot in slots)
        self._layers = []

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, and the slots that they use."""
        used = [self.slots[row] for row in rows]
        if used and used == self.slots:  # a beam's rows go on from one another
            return
        kept = list(dict.fromkeys(used))
        place = {slot: new for new, slot in enumerate(kept)}
        self.slots = [place[slot] for slot in used]
        self.pool.keep(kept)
        self._layers = []

    def layers(self, part: slice) -> list[SlotKeysValues]:
        """What each decoder layer attends to, for a part of the rows.

        What all rows attend to stays the same until some come or go.
        """
        everyone = self.slots[part] == self.slots
        if everyone and self._layers:
            return self._layers
        layers = self._layers_of(self.slots[part])
        if everyone:
            self._layers = layers
        return layers

    def _layers_of(self, slots: Sequence[int]) -> list[SlotKeysValues]:
        pool, device = self.pool, self.pool.shape.device
        first, end = min(slots), max(slots) + 1
        sharing = Sharing.of([slot - first for slot in slots], device)
        lengths = pool.lengths[first:end]
        longest = max(1, *lengths)  # an empty source keeps one column that nobody may see
        live = pool.tensor[:, :, first:end, :, :longest]
        mask = padding_mask(torch.tensor(lengths, device=device), longest)
        bias = None if min(lengths) == longest else mask_bias(mask, pool.shape.dtype)
        pieces = pool.pieces(lengths)
        return [SlotKeysValues(keys, values, bias, sharing, pieces) for keys, values in live]


@dataclass(frozen=True)
class Sharing:
    """Which slot each row uses, and which of its slot's rows it is; both ``[rows]``.

    Attributes:
        width: the most rows that share a slot.
    """

    slot: Tensor
    place: Tensor
    slots: int
    width: int

    @classmethod
    def of(cls, slots: Sequence[int], device: torch.device) -> Sharing | None:
        """None where row r uses slot r, which needs no regrouping."""
        if list(slots) == list(range(len(slots))):
            return None
        seen: dict[int, int] = {}
        place = []
        for slot in slots:
            place.append(seen.get(slot, 0))
            seen[slot] = place[-1] + 1
        return cls(
            torch.tensor(slots, device=device),
            torch.tensor(place, device=device),
            slots=max(slots) + 1,
            width=max(seen.values()),
        )


@dataclass(frozen=True)
class SlotKeysValues:
    """One layer's keys and values of sources: views ``[slots, heads, src, head_dim]``.

    Rows that share a source become its queries, so that keys and values are never copied.

    Attributes:
        mask: numbers to add to the scores, ``[slots, 1, 1, src]``; None where no source is padded.
        pieces: of the slots.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None
    sharing: Sharing | None
    pieces: Pieces | None = None

    def attend(self, cross: MultiHeadAttention, x: Tensor) -> Tensor:
        queries = cross.queries(x)  # [rows, heads, query, head_dim]
        if self.sharing is None:
            attended: Tensor = cross(queries, self.keys, self.values, self.mask, self.pieces)
            return attended
        share = self.sharing
        _, heads, length, head_dim = queries.shape
        grid = queries.new_zeros(share.slots, share.width, heads, length, head_dim)
        grid[share.slot, share.place] = queries
        # [slots, width, heads, query, head_dim] -> [slots, heads, width * query, head_dim]
        by_slot = grid.transpose(1, 2).flatten(2, 3)
        found = cross.attend(by_slot, self.keys, self.values, self.mask, self.pieces)
        # and back to [rows, heads, query, head_dim]
        back = found.reshape(share.slots, heads, share.width, length, head_dim).transpose(1, 2)
        return cross.merge(back[share.slot, share.place])


# --- sources encoded lately --------------------------------------------------------------------


class EncoderCache:
    """Encoder outputs of the sources used last, by their ids.

    For prefixes that are edited while the source stays, several targets of one source, and loops
    over /next. It never changes an answer: what it returns is what the encoder returned.

    Args:
        max_bytes: of tensors held at most; 0 holds nothing.

    Attributes:
        hits, misses: look-ups so far, by outcome.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.hits = 0
        self.misses = 0
        self.bytes = 0
        self._memories: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()

    def __bool__(self) -> bool:
        return self.max_bytes > 0

    def __contains__(self, source: object) -> bool:
        """Whether it is there, which counts as no look-up."""
        return source in self._memories

    def get(self, source: tuple[int, ...]) -> Tensor | None:
        """The memory ``[src, dim]`` of a source, if it is still there."""
        memory = self._memories.get(source)
        if memory is None:
            self.misses += 1
            return None
        self.hits += 1
        self._memories.move_to_end(source)
        return memory

    def put(self, source: tuple[int, ...], memory: Tensor) -> None:
        """Hold a memory ``[src, dim]``; the least recently used ones make room."""
        if memory.nbytes > self.max_bytes or source in self._memories:
            return
        self._memories[source] = memory.clone()  # not a view that keeps a whole batch alive
        self.bytes += memory.nbytes
        while self.bytes > self.max_bytes:
            _, dropped = self._memories.popitem(last=False)
            self.bytes -= dropped.nbytes

    def clear(self) -> None:
        """Hold nothing: memory is short."""
        self._memories.clear()
        self.bytes = 0


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
