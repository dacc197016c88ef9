"""What cached decoding remembers: keys and values of targets so far, and of sources.

Rows are kept compact: row r of every tensor is the r-th live sequence. A source lies in a *slot*
of its own, shared by all rows that continue from it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.attention import MultiHeadAttention, Pieces, mask_bias, padding_mask
from model.config import ModelSpec
from model.pool import CacheShape, Pool
from model.transformer import Transformer


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
