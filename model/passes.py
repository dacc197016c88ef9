"""What teacher-forced passes report, read from a bounded number of logits at a time.

A row of logits is as wide as the vocabulary: 8,192 positions of a vocabulary of 256,000 would be
8 GB in float32, where a few numbers of each row are all that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.sequence import Forward, ForwardEvent

MAX_LOGITS = 2**25
"""Logits formed at once, 128 MiB of float32; at least one position's, however wide."""


@dataclass(frozen=True)
class Piece:
    """Positions `start` to `stop`, the latter excluded, of the pass of this index."""

    index: int
    start: int
    stop: int


def slabs(lengths: Iterable[int], rows: int) -> Iterator[list[Piece]]:
    """Cut passes, one behind the other, into slabs of so many positions; the last may have fewer.

    Args:
        lengths: positions of each pass.
        rows: at least 1.
    """
    slab: list[Piece] = []
    room = rows
    for index, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + room)
            slab.append(Piece(index, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield slab
                slab, room = [], rows
    if slab:
        yield slab


def read_out(
    passes: Sequence[Forward],
    hidden: Sequence[Tensor],
    output: Callable[[Tensor], Tensor],
    vocab: int,
) -> list[ForwardEvent]:
    """What passes report of their logits, on the CPU, float32.

    Args:
        hidden: ``[positions, dim]`` of each pass: the positions that it wants.
        output: ``[rows, dim] -> [rows, vocab]``.
        vocab: width of the vocabulary.
    """
    parts: list[list[tuple[Tensor, ...]]] = [[] for _ in passes]
    for slab in slabs(map(len, hidden), max(1, MAX_LOGITS // vocab)):
        # A function of its own, so that these logits are gone when the next ones are formed.
        for piece, part in zip(slab, _read_slab(slab, passes, hidden, output), strict=True):
            parts[piece.index].append(part)
    return [_event(forward, own) for forward, own in zip(passes, parts, strict=True)]


def _read_slab(
    slab: Sequence[Piece],
    passes: Sequence[Forward],
    hidden: Sequence[Tensor],
    output: Callable[[Tensor], Tensor],
) -> list[tuple[Tensor, ...]]:
    """The part of its report that each piece makes."""
    states = torch.cat([hidden[piece.index][piece.start : piece.stop] for piece in slab])
    sizes = [piece.stop - piece.start for piece in slab]
    rows = torch.split(output(states).float(), sizes)
    return [
        _read(passes[piece.index], piece, logits) for piece, logits in zip(slab, rows, strict=True)
    ]


def _read(forward: Forward, piece: Piece, logits: Tensor) -> tuple[Tensor, ...]:
    """Logits ``[positions, vocab]``; or logits, ids and log-probabilities of some tokens."""
    if forward.labels is not None:
        labels = forward.labels[piece.start : piece.stop]
        ids = torch.tensor(labels, device=logits.device)[:, None]
        values = logits.gather(1, ids)
    elif forward.top_k is not None:
        values, ids = logits.topk(min(forward.top_k, logits.shape[-1]), dim=-1)
    else:
        return (logits.to("cpu", copy=True),)  # a view would keep the whole slab
    logprobs = values - logits.logsumexp(dim=-1, keepdim=True)
    return values.cpu(), ids.cpu(), logprobs.cpu()


def _event(forward: Forward, parts: Sequence[tuple[Tensor, ...]]) -> ForwardEvent:
    """The report that these parts make, in order."""
    logits, *chosen = (
        torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        for tensors in zip(*parts, strict=True)
    )
    if not chosen:
        return ForwardEvent(forward, logits)
    ids, logprobs = chosen
    return ForwardEvent(forward, logits, ids, logprobs)
