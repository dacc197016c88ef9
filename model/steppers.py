"""How the engine runs a model: live rows in, next-token logits out.

Most models decode with a cache (`CachedStepper`). The tutorial's model feeds one growing sequence
to its encoder as well, so that nothing can be cached (`ResubmittingStepper`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from model.cache import CacheShape, SourceCache, TargetCache
from model.config import EngineConfig, ModelSpec
from model.layers import causal_mask, padding_mask
from model.sequence import Forward
from model.sequence import Sequence as Row
from model.transformer import Transformer


class Stepper(Protocol):
    """The tensors of live rows, numbered in the order in which they joined or were kept."""

    def join(self, rows: Sequence[Row]) -> None:
        """Take new rows in, behind those that live: encode their sources, run their prefixes."""
        ...

    def step(self, rows: Sequence[Row]) -> Tensor:
        """One more decoder position for each live row -> logits ``[rows, vocab]``."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, and drop the others."""
        ...

    def forward(self, passes: Sequence[Forward]) -> list[Tensor]:
        """Teacher-forced logits of each pass, ``[positions, vocab]``."""
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
        attention = network.decoder.layers[0].self_attention
        weight = attention.key.weight
        shape = CacheShape(
            layers=len(network.decoder.layers),
            heads=attention.heads,
            head_dim=weight.shape[0] // attention.heads,
            device=weight.device,
            dtype=weight.dtype,
        )
        self.targets = TargetCache(shape)
        self.sources = SourceCache(shape)
        self.device = weight.device

    def join(self, rows: Sequence[Row]) -> None:
        sources, slots = distinct(tuple(row.src) for row in rows)
        memory, _ = self._encode(sources)
        first_row = len(self.sources.slots)
        keys_values = self.network.decoder.cross_keys_values(memory)
        self.sources.join(keys_values, [len(source) for source in sources], slots)
        # The last prefix token is the next step's input; what precedes it runs in one masked pass.
        prefixes = [row.target[:-1] for row in rows]
        lengths = [len(prefix) for prefix in prefixes]
        past = self.targets.join(len(rows), max(lengths))
        if max(lengths):
            tgt = pad_rows(prefixes, self.spec.pad_id, self.device)
            mask = causal_mask(tgt.shape[1], self.device)
            self.network.decoder(tgt, past, self.sources.layers(first_row), mask)
        self.targets.joined(lengths)

    def step(self, rows: Sequence[Row]) -> Tensor:
        tokens = torch.tensor([[row.last_token] for row in rows], device=self.device)
        past, mask, positions = self.targets.next_position()
        hidden = self.network.decoder(tokens, past, self.sources.layers(), mask, positions)
        logits: Tensor = self.network.output(hidden[:, 0])
        self.targets.advance()
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        self.targets.keep(rows)
        self.sources.keep(rows)

    def forward(self, passes: Sequence[Forward]) -> list[Tensor]:
        return teacher_forced(self.network, self.spec, passes, self.device)

    def _encode(self, sources: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        return encode(self.network, self.spec, sources, self.device)


class ResubmittingStepper:
    """Every step runs encoder and decoder over each row's whole sequence."""

    def __init__(self, network: Transformer, spec: ModelSpec, config: EngineConfig) -> None:
        self.network = network
        self.spec = spec
        self.device = next(network.parameters()).device

    def join(self, rows: Sequence[Row]) -> None:
        pass  # nothing is remembered between steps

    def step(self, rows: Sequence[Row]) -> Tensor:
        grown = [row.src + row.target for row in rows]
        last = [Forward(src=ids, tgt=ids, positions="last") for ids in grown]
        return torch.cat(self.forward(last))

    def keep(self, rows: Sequence[int]) -> None:
        pass

    def forward(self, passes: Sequence[Forward]) -> list[Tensor]:
        return teacher_forced(self.network, self.spec, passes, self.device)


def encode(
    network: Transformer, spec: ModelSpec, sources: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """One padded batch through the encoder.

    Returns:
        memory ``[sources, src, dim]`` and its mask ``[sources, 1, 1, src]``.
    """
    src = pad_rows(sources, spec.pad_id, device)
    lengths = torch.tensor([len(source) for source in sources], device=device)
    mask = padding_mask(lengths, src.shape[1])
    return network.encode(src, mask), mask


def teacher_forced(
    network: Transformer, spec: ModelSpec, passes: Sequence[Forward], device: torch.device
) -> list[Tensor]:
    """Logits of whole targets in one masked pass; a source shared by passes is encoded once."""
    sources, slots = distinct(tuple(p.src) for p in passes)
    memory, mask = encode(network, spec, sources, device)
    index = torch.tensor(slots, device=device)
    tgt = pad_rows([p.tgt for p in passes], spec.pad_id, device)
    hidden = network.decode(tgt, memory[index], mask[index])  # [passes, tgt, dim]
    wanted = [
        hidden[i, len(p.tgt) - 1 : len(p.tgt)] if p.positions == "last" else hidden[i, : len(p.tgt)]
        for i, p in enumerate(passes)
    ]
    # Only what is wanted goes through the output layer: the vocabulary is wide.
    logits: Tensor = network.output(torch.cat(wanted))
    return list(torch.split(logits, [len(w) for w in wanted]))


def distinct(
    sources: Iterable[tuple[int, ...]],
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Each source once, in order of first appearance, and which of them every input uses."""
    places: dict[tuple[int, ...], int] = {}
    slots = [places.setdefault(source, len(places)) for source in sources]
    return list(places), slots
