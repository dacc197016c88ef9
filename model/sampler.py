"""Picking tokens. Randomness is a function of (seed, sequence number, step), never of the batch.

A row's uniform number comes from a counter-based generator in the sense of Salmon et al.,
"Parallel Random Numbers: As Easy as 1, 2, 3", 2011: hash the counter instead of keeping a state. So
no row's draw depends on who else is decoded, on its place, or on what was cancelled before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from model.sequence import Sequence as Row

_MASK = 2**64 - 1

BLOCK = 256
"""Scores of which only the highest is looked at first. 128 to 512 are equally good."""


def mix(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014): scatters 64 bits, one to one."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, sequence_number: int, step: int) -> float:
    """A number in [0, 1) with 53 random bits, keyed by the three counters."""
    state = 0x9E3779B97F4A7C15
    for counter in (seed, sequence_number, step):
        state = mix((state + counter * 0x9E3779B97F4A7C15) & _MASK)
    return (state >> 11) * 2.0**-53


def draw(scores: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from ``softmax(scores)`` by inverting its cumulative distribution in the order of ids.

    Args:
        scores: ``[rows, vocab]``; -inf bans a token.
        uniforms: ``[rows]`` in [0, 1), float64.

    Returns:
        ids ``[rows]``; never a banned one.
    """
    cumulative = scores.double().softmax(dim=-1).cumsum(dim=-1)
    wanted = uniforms[:, None] * cumulative[:, -1:]
    # The first id whose cumulative mass exceeds the wanted mass has mass of its own.
    drawn = torch.searchsorted(cumulative, wanted, right=True)[:, 0]
    return drawn.clamp(max=scores.shape[-1] - 1)


def log_probabilities(logits: Tensor) -> Tensor:
    """Those of ``[rows, vocab]``, on a CPU written over the logits: so wide a tensor is new memory
    each time, which costs three times what the numbers do."""
    on_cpu = logits.device.type == "cpu"
    return torch.log_softmax(logits, dim=-1, out=logits if on_cpu else None)


class Scores:
    """Scores to pick from, and the highest of each block of them.

    A maximum alone is found many times as fast as with its place. So the highest of each block
    comes first, and places are sought among blocks, and in those that can have what is sought.

    Args:
        values: ``[rows, vocab]``.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.vocab = values.shape[-1]

    @cached_property
    def highest(self) -> Tensor:
        """``[rows, blocks]``; NaN where one of a block is."""
        whole = self.vocab // BLOCK * BLOCK
        parts = [self.values[:, :whole].reshape(len(self.values), -1, BLOCK).amax(dim=-1)]
        if whole < self.vocab:
            parts.append(self.values[:, whole:].amax(dim=-1, keepdim=True))
        return torch.cat(parts, dim=1)

    def likeliest(self) -> Tensor:
        """Each row's token of the highest score ``[rows]``; of ties the first."""
        first = self.highest.max(dim=-1).indices * BLOCK  # [rows]
        # Ids behind the vocabulary repeat its last one: no tie of theirs comes first.
        ids = self._ids(first).clamp_(max=self.vocab - 1)  # [rows, BLOCK]
        within: Tensor = self.values.gather(1, ids).max(dim=-1).indices
        return first + within

    def best(self, rows: Tensor, sums: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """As `best_of_all`, by blocks where that is less work; which of equal ones may differ.

        Where fewer than `count` are above -inf, the others' ids may be none.
        """
        if len(rows) * self.vocab <= count * BLOCK:
            return self.best_of_all(rows, sums, count)
        highest = (self.highest[rows] + sums[:, None]).flatten()  # [n * blocks]
        # What is among the `count` highest lies in one of the `count` blocks of the highest peaks.
        peaks = highest.topk(count).indices.sort().values
        per_row = self.highest.shape[-1]
        row, first = peaks // per_row, peaks % per_row * BLOCK
        ids = self._ids(first)  # [peaks, BLOCK]
        found = self.values[rows[row][:, None], ids.clamp(max=self.vocab - 1)] + sums[row][:, None]
        values, places = found.masked_fill(ids >= self.vocab, -torch.inf).flatten().topk(count)
        return values, row[places // BLOCK], ids.flatten()[places]

    def best_of_all(self, rows: Tensor, sums: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The highest of ``values[rows] + sums[:, None]``, highest first; of ties any.

        Args:
            rows: ``[n]``.
            sums: ``[n]``, what each row's scores are added to.
            count: at most ``n * vocab``.

        Returns:
            values, which of `rows`, ids; each ``[count]``.
        """
        values, places = (self.values[rows] + sums[:, None]).flatten().topk(count)
        return values, places // self.vocab, places % self.vocab

    def _ids(self, first: Tensor) -> Tensor:
        """``[n]`` first ids of blocks -> ``[n, BLOCK]``, with some behind the vocabulary."""
        return first[:, None] + torch.arange(BLOCK, device=first.device)


def pick(scores: Scores, rows: Sequence[Row]) -> Tensor:
    """Each row's next token ``[rows]``: drawn where it samples, else the likeliest."""
    greedy = scores.likeliest()
    if not any(row.decoding.sample for row in rows):
        return greedy
    samples = torch.tensor([row.decoding.sample for row in rows], device=greedy.device)
    uniforms = torch.tensor([_uniform_of(row) for row in rows], dtype=torch.float64)
    return torch.where(samples, draw(scores.values, uniforms.to(greedy.device)), greedy)


def _uniform_of(row: Row) -> float:
    decoding = row.decoding
    return uniform(decoding.seed, decoding.sequence_number, len(row.tokens))
