"""Picking tokens. Randomness is a function of (seed, sequence number, step), never of the batch.

A row's uniform number comes from a counter-based generator in the sense of Salmon et al.,
"Parallel Random Numbers: As Easy as 1, 2, 3", 2011: hash the counter instead of keeping a state. So
no row's draw depends on who else is decoded, on its place, or on what was cancelled before.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def likeliest(scores: Tensor) -> Tensor:
    """The token of the highest score; of ties the first.

    On a CPU a maximum alone is found many times as fast as with its place. So the highest of each
    block comes first, and places are sought among blocks, and in the one block that has it.

    Args:
        scores: ``[rows, vocab]``.

    Returns:
        ids ``[rows]``.
    """
    vocab = scores.shape[-1]
    whole = vocab // BLOCK * BLOCK
    if scores.device.type != "cpu" or not whole:
        return scores.max(dim=-1).indices
    blocks = scores[:, :whole].reshape(len(scores), -1, BLOCK)
    highest = blocks.amax(dim=-1)  # [rows, blocks]
    if whole < vocab:
        rest = scores[:, whole:].amax(dim=-1, keepdim=True)
        highest = torch.cat([highest, rest], dim=1)
    first = highest.max(dim=-1).indices * BLOCK  # [rows]
    # Ids behind the vocabulary repeat its last one: no tie of theirs comes first.
    ids = (first[:, None] + torch.arange(BLOCK)).clamp_(max=vocab - 1)  # [rows, block]
    within: Tensor = scores.gather(1, ids).max(dim=-1).indices
    return first + within


def pick(scores: Tensor, rows: Sequence[Row]) -> Tensor:
    """Each row's next token ``[rows]``: drawn where it samples, else the likeliest."""
    greedy = likeliest(scores)
    if not any(row.decoding.sample for row in rows):
        return greedy
    samples = torch.tensor([row.decoding.sample for row in rows], device=scores.device)
    uniforms = torch.tensor([_uniform_of(row) for row in rows], dtype=torch.float64)
    return torch.where(samples, draw(scores, uniforms.to(scores.device)), greedy)


def _uniform_of(row: Row) -> float:
    decoding = row.decoding
    return uniform(decoding.seed, decoding.sequence_number, len(row.tokens))
