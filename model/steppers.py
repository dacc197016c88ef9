"""How the engine runs a model: live rows in, next-token logits out.

Most models decode with a cache (`CachedStepper`). The tutorial's model feeds one growing sequence
to its encoder as well, so that nothing can be cached (`ResubmittingStepper`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from model.attention import MultiHeadAttention, causal_mask, padding_mask
from model.cache import EncoderCache, SourceCache, TargetCache
from model.config import EngineConfig, ModelSpec
from model.graphs import StepGraphs
from model.passes import read_out
from model.pool import CacheShape
from model.sequence import AttentionMaps, Forward, ForwardEvent
from model.sequence import Sequence as Row
from model.transformer import Transformer

MOVE_COST = 2
"""What moving a position costs in positions that attention reads."""


class Stepper(Protocol):
    """The tensors of live rows, numbered in the order in which they joined or were kept."""

    def expect(self, joining: Sequence[Row], soon: Sequence[Row]) -> None:
        """Do what can be done together for rows that join now and others that will.

        It changes no answer, and never raises for a row's sake.
        """
        ...

    def join(self, rows: Sequence[Row]) -> None:
        """Take new rows in, behind those that live: encode their sources, run their prefixes.

        Where it raises, nothing has changed.
        """
        ...

    def step(self, rows: Sequence[Row], first: int = 0) -> Tensor:
        """One more decoder position for live rows, from the first-th on -> ``[rows, vocab]``.

        Where it raises, nothing has changed, so that a part of the rows may be tried.
        """
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, and drop the others."""
        ...

    def better_order(self) -> list[int] | None:
        """Live rows in the order in which a step reads least, once moving them pays."""
        ...

    def release(self) -> None:
        """Return, where no rows live, all memory that is held for rows to come."""
        ...

    def forward(self, passes: Sequence[Forward]) -> list[ForwardEvent]:
        """What each teacher-forced pass reports of its logits."""
        ...

    def attention(self, passes: Sequence[Forward]) -> list[AttentionMaps]:
        """Attention weights of each pass."""
        ...

    @property
    def encoder_cache(self) -> EncoderCache | None:
        """Sources encoded lately, where that is of use."""
        ...


def pad_rows(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> Tensor:
    """Right-pad rows of ids -> ``[rows, longest]``, at least one column wide."""
    longest = max(1, *(len(row) for row in rows))
    return torch.tensor([[*row, *[pad_id] * (longest - len(row))] for row in rows], device=device)


class CachedStepper:
    """Encoder once per source, then one decoder position a step on cached keys and values."""

    def __init__(self, network: Transformer, spec: ModelSpec, config: EngineConfig) -> None:
        self.network = network
        self.spec = spec
        shape = CacheShape.of(network)
        self.targets = TargetCache(shape)
        self.sources = SourceCache(shape)
        self.device = shape.device
        self.encoder_cache = EncoderCache(config.max_encoder_cache_bytes)
        self._ahead: dict[tuple[int, ...], Tensor] = {}  # of rows that have not joined yet
        self._excess = 0  # positions read since rows were moved that another order would spare
        self.graphs: StepGraphs | None = None
        if config.cuda_graphs and self.device.type == "cuda":
            self.graphs = StepGraphs(network, self.targets, self.sources)

    def expect(self, joining: Sequence[Row], soon: Sequence[Row]) -> None:
        """Encode sources side by side: alone, one costs a CPU three times as much.

        Where one of them cannot be encoded, those that join are encoded without the others.
        """

        def unknown(rows: Sequence[Row]) -> list[tuple[int, ...]]:
            sources, _ = distinct(tuple(row.src) for row in rows)
            return [s for s in sources if s not in self._ahead and s not in self.encoder_cache]

        expected = {tuple(row.src) for row in (*joining, *soon)}
        self._ahead = {source: self._ahead[source] for source in expected & self._ahead.keys()}
        if self.device.type != "cpu" or not soon or not unknown(joining):
            return
        sources = unknown([*joining, *soon])
        try:
            found = memories(self.network, self.spec, sources, self.device)
        except Exception:  # noqa: BLE001  whose fault it was shows when they join
            return
        self._ahead.update(zip(sources, found, strict=True))

    def join(self, rows: Sequence[Row]) -> None:
        live = len(self.sources.slots)
        try:
            self._join(rows)
        except Exception:
            self.sources.keep(range(live))
            self.sources.pool.wipe()
            self.targets.pool.wipe()
            raise

    def _join(self, rows: Sequence[Row]) -> None:
        sources, slots = distinct(tuple(row.src) for row in rows)
        ahead = self._ahead
        known = memories(self.network, self.spec, sources, self.device, self.encoder_cache, ahead)
        first_row = len(self.sources.slots)
        # One behind the other, [1, sum of lengths, dim]: padding has neither keys nor values.
        keys_values = self.network.decoder.cross_keys_values(torch.cat(known)[None])
        self.sources.join(keys_values, [len(source) for source in sources], slots)
        # The last prefix token is the next step's input; what precedes it runs in one masked pass.
        prefixes = [row.target[:-1] for row in rows]
        lengths = [len(prefix) for prefix in prefixes]
        past = self.targets.join(len(rows), max(lengths))
        if max(lengths):
            tgt = pad_rows(prefixes, self.spec.pad_id, self.device)
            mask = causal_mask(tgt.shape[1], self.device)
            self.network.decoder(tgt, past, self.sources.layers(slice(first_row, None)), mask)
        self.targets.joined(lengths)
        for source in sources:
            ahead.pop(source, None)

    def step(self, rows: Sequence[Row], first: int = 0) -> Tensor:
        part = slice(first, first + len(rows))
        if self.graphs and len(rows) == self.targets.pool.rows:
            repeated = self.graphs.step([row.last_token for row in rows])
            if repeated is not None:
                self.targets.advance(part)
                return repeated
        tokens = torch.tensor([[row.last_token] for row in rows], device=self.device)
        past, mask, positions = self.targets.next_positions(part)
        hidden = self.network.decoder(tokens, past, self.sources.layers(part), mask, positions)
        logits: Tensor = self.network.output(hidden[:, 0])
        self.targets.advance(part)
        return logits

    def verify(self, rows: Sequence[Row], drafts: Sequence[Sequence[int]]) -> Tensor:
        """See `model.lookahead.Verifier`."""
        inputs = [[row.last_token, *draft] for row, draft in zip(rows, drafts, strict=True)]
        tokens = pad_rows(inputs, self.spec.pad_id, self.device)
        everyone, width = slice(0, len(rows)), tokens.shape[1]
        past, mask, positions = self.targets.next_positions(everyone, width)
        # Padding stays where its row ends: behind that the model may have no position.
        guesses = torch.tensor([[len(draft)] for draft in drafts], device=self.device)
        positions = positions.minimum(positions[:, :1] + guesses)
        sources = self.sources.layers(everyone)
        hidden = self.network.decoder(tokens, past, sources, mask, positions)
        real = [row * width + i for row, ids in enumerate(inputs) for i in range(len(ids))]
        # [rows, width, dim] -> [positions, dim]
        wanted = hidden.flatten(0, 1)[torch.tensor(real, device=self.device)]
        logits: Tensor = self.network.output(wanted)
        return logits

    def accept(self, kept: Sequence[int]) -> None:
        """See `model.lookahead.Verifier`."""
        self.targets.accept(kept)

    def keep(self, rows: Sequence[int]) -> None:
        self.targets.keep(rows)
        self.sources.keep(rows)

    def better_order(self) -> list[int] | None:
        """The longest first, of targets and sources together: they keep that order as they grow."""
        live = len(self.sources.slots)
        if live < 2 or self.sources.slots != list(range(live)):  # rows that share a source stay
            return None
        pools = self.targets.pool, self.sources.pool
        lengths = [sum(both) for both in zip(*(pool.lengths for pool in pools), strict=True)]
        order = sorted(range(live), key=lambda row: -lengths[row])
        excess = sum(pool.excess(order) for pool in pools)
        self._excess = max(0, self._excess + excess)
        moved = sum(lengths[old] for new, old in enumerate(order) if new != old)
        if excess <= 0 or self._excess < MOVE_COST * moved:
            return None
        self._excess = 0
        return order

    def release(self) -> None:
        if self.graphs is not None:
            self.graphs.release()
        self.targets.pool.release()
        self.sources.pool.release()
        self.encoder_cache.clear()
        self._ahead.clear()

    def forward(self, passes: Sequence[Forward]) -> list[ForwardEvent]:
        return teacher_forced(self.network, self.spec, passes, self.device, self.encoder_cache)

    def attention(self, passes: Sequence[Forward]) -> list[AttentionMaps]:
        return attention_maps(self.network, self.spec, passes, self.device)


class ResubmittingStepper:
    """Every step runs encoder and decoder over each row's whole sequence."""

    def __init__(self, network: Transformer, spec: ModelSpec, config: EngineConfig) -> None:
        self.network = network
        self.spec = spec
        self.device = next(network.parameters()).device
        self.encoder_cache = None  # a source grows with every token

    def expect(self, joining: Sequence[Row], soon: Sequence[Row]) -> None:
        pass

    def join(self, rows: Sequence[Row]) -> None:
        pass  # nothing is remembered between steps

    def step(self, rows: Sequence[Row], first: int = 0) -> Tensor:
        grown = [row.src + row.target for row in rows]
        last = [Forward(src=ids, tgt=ids, positions="last") for ids in grown]
        hidden = torch.cat(hidden_states(self.network, self.spec, last, self.device))
        logits: Tensor = self.network.output(hidden)
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        pass

    def better_order(self) -> list[int] | None:
        return None

    def release(self) -> None:
        pass

    def forward(self, passes: Sequence[Forward]) -> list[ForwardEvent]:
        return teacher_forced(self.network, self.spec, passes, self.device)

    def attention(self, passes: Sequence[Forward]) -> list[AttentionMaps]:
        return attention_maps(self.network, self.spec, passes, self.device)


PADDING = 64
"""Of one batch of sources on a CPU, in tokens: another batch costs what encoding so many does. A
GPU encodes them in no time, and calls are what costs."""

ENCODED_AT_ONCE = 512
"""Tokens of one batch of sources on a CPU, where there are several: what layers hand on stays
within its caches."""


def alike(lengths: Sequence[int], padding: int, most: int) -> list[list[int]]:
    """Indices in groups of like length, longest first.

    Args:
        padding: tokens by which each group is padded, at most.
        most: tokens of each group, padding included, but that one alone may have more.

    >>> alike([3, 9, 4, 8, 3, 3], padding=2, most=18)
    [[1, 3], [2, 0, 4, 5]]
    """
    groups: list[list[int]] = []
    spare = -1
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups:
            spare -= lengths[groups[-1][0]] - lengths[index]
        if spare < 0:
            groups.append([])
            spare = padding
        groups[-1].append(index)
    parts: list[list[int]] = []
    for group in groups:
        together = max(1, most // max(1, lengths[group[0]]))
        count = -(-len(group) // together)
        ends = [len(group) * i // count for i in range(count + 1)]
        parts.extend(group[start:end] for start, end in pairwise(ends))
    return parts


def encode(
    network: Transformer,
    spec: ModelSpec,
    sources: Sequence[tuple[int, ...]],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Encoder outputs of one padded batch.

    Returns:
        memory ``[sources, src, dim]`` and its mask ``[sources, 1, 1, src]``.
    """
    src = pad_rows(sources, spec.pad_id, device)
    mask = padding_mask(_lengths(sources, device), src.shape[1])
    return network.encode(src, mask), mask


def memories(
    network: Transformer,
    spec: ModelSpec,
    sources: Sequence[tuple[int, ...]],
    device: torch.device,
    cache: EncoderCache | None = None,
    ahead: Mapping[tuple[int, ...], Tensor] = MappingProxyType({}),
) -> list[Tensor]:
    """Each source's encoder outputs ``[src, dim]``; of an empty one a column nobody may see.

    Sources that the cache does not know, and that were not encoded ahead, run in batches of those
    alike.
    """
    known = {source: cache.get(source) for source in sources} if cache else {}
    found = {source: memory for source, memory in known.items() if memory is not None}
    for source in sources:
        if source not in found and source in ahead:
            found[source] = ahead[source]
    new = [source for source in dict.fromkeys(sources) if source not in found]
    lengths = [len(source) for source in new]
    everyone = [list(range(len(new)))] if new else []
    for group in alike(lengths, PADDING, ENCODED_AT_ONCE) if device.type == "cpu" else everyone:
        batch = [new[index] for index in group]
        for source, row in zip(batch, encode(network, spec, batch, device)[0], strict=True):
            found[source] = row[: max(1, len(source))]
    if cache:
        for source in sources:
            cache.put(source, found[source])
    return [found[source] for source in sources]


def _lengths(sources: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    return torch.tensor([len(source) for source in sources], device=device)


def teacher_forced(
    network: Transformer,
    spec: ModelSpec,
    passes: Sequence[Forward],
    device: torch.device,
    cache: EncoderCache | None = None,
) -> list[ForwardEvent]:
    """Whole targets in one masked pass, and what is asked of their logits."""
    hidden = hidden_states(network, spec, passes, device, cache)
    return read_out(passes, hidden, network.output, spec.tgt_vocab_size)


def hidden_states(
    network: Transformer,
    spec: ModelSpec,
    passes: Sequence[Forward],
    device: torch.device,
    cache: EncoderCache | None = None,
) -> list[Tensor]:
    """What the decoder has at each pass' wanted positions, ``[positions, dim]``.

    A source shared by passes is encoded once.
    """
    sources, slots = distinct(tuple(p.src) for p in passes)
    known = memories(network, spec, sources, device, cache)
    memory = torch.nn.utils.rnn.pad_sequence(known, batch_first=True)  # [sources, src, dim]
    mask = padding_mask(_lengths(sources, device), memory.shape[1])
    index = torch.tensor(slots, device=device)
    tgt = pad_rows([p.tgt for p in passes], spec.pad_id, device)
    hidden = network.decode(tgt, memory[index], mask[index])  # [passes, tgt, dim]
    return [
        hidden[i, len(p.tgt) - 1 : len(p.tgt)] if p.positions == "last" else hidden[i, : len(p.tgt)]
        for i, p in enumerate(passes)
    ]


MAX_WEIGHTS = 2**24
"""Attention weights, padding included, that are in memory at once for one chunk of passes."""


def attention_maps(
    network: Transformer, spec: ModelSpec, passes: Sequence[Forward], device: torch.device
) -> list[AttentionMaps]:
    """Every layer's attention weights over whole sources and targets, without padding.

    Few passes at a time: unlike everything else, weights grow with the square of a length.
    """
    heads = network.heads
    longest = max(max(len(p.src), len(p.tgt)) for p in passes)
    chunk = max(1, MAX_WEIGHTS // max(1, heads.weights(longest, longest)))
    maps: list[AttentionMaps] = []
    for first in range(0, len(passes), chunk):
        maps.extend(_attention_maps(network, spec, passes[first : first + chunk], device))
    return maps


def _attention_maps(
    network: Transformer, spec: ModelSpec, passes: Sequence[Forward], device: torch.device
) -> list[AttentionMaps]:
    sources, slots = distinct(tuple(p.src) for p in passes)
    index = torch.tensor(slots, device=device)
    tgt = pad_rows([p.tgt for p in passes], spec.pad_id, device)
    encoder, decoder = network.encoder.layers, network.decoder.layers
    with (
        recording([layer.attention for layer in encoder]) as in_encoder,
        recording([layer.self_attention for layer in decoder]) as in_decoder,
        recording([layer.cross_attention for layer in decoder]) as across,
    ):
        memory, mask = encode(network, spec, sources, device)
        network.decode(tgt, memory[index], mask[index])

    def cut(maps: list[Tensor], i: int, queries: int, keys: int) -> Tensor:
        # layers x [passes, heads, query, key] -> [layers, heads, query, key]
        return torch.stack([layer[i, :, :queries, :keys] for layer in maps]).cpu()

    return [
        AttentionMaps(
            encoder=cut(in_encoder, slots[i], len(p.src), len(p.src)),
            decoder=cut(in_decoder, i, len(p.tgt), len(p.tgt)),
            cross=cut(across, i, len(p.tgt), len(p.src)),
        )
        for i, p in enumerate(passes)
    ]


@contextmanager
def recording(attentions: Sequence[MultiHeadAttention]) -> Iterator[list[Tensor]]:
    """Note the weights of these attentions, in the order in which they run.

    They are computed beside the pass, from the same inputs: the fast path never forms them.
    """
    noted: list[Tensor] = []

    def note(attention: Any, args: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
        queries, keys, _, mask = args
        noted.append(attention.weights(queries, keys, mask))

    handles = [attention.register_forward_hook(note) for attention in attentions]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


def distinct(
    sources: Iterable[tuple[int, ...]],
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Each source once, in order of first appearance, and which of them every input uses."""
    places: dict[tuple[int, ...], int] = {}
    slots = [places.setdefault(source, len(places)) for source in sources]
    return list(places), slots
