"""Decoding parameters at work: from a step's raw logits to the scores tokens are picked from.

A parameter is one pure function ``(scores [rows, vocab], values [rows]) -> scores`` and its entry
in `PROCESSORS`, which names the field of `Decoding` that holds its value and the value that changes
nothing. A processor runs only when some row asks for it; the other rows pass through it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import ModelSpec
from model.sequence import Decoding, FinishReason
from model.sequence import Sequence as Row

Processor = Callable[[Tensor, Tensor], Tensor]


def divide_by_temperature(scores: Tensor, temperature: Tensor) -> Tensor:
    """``scores / temperature`` (Ackley, Hinton and Sejnowski, 1985). No-op: 1."""
    return scores / temperature[:, None]


def keep_top_k(scores: Tensor, k: Tensor) -> Tensor:
    """Ban all but the k likeliest tokens; ties with the k-th stay (Fan et al., 2018). No-op: 0."""
    vocab = scores.shape[-1]
    k = torch.where(k == 0, vocab, k.clamp(max=vocab))
    widest = int(k[k < vocab].max()) if bool((k < vocab).any()) else 1
    likeliest = scores.topk(widest, dim=-1).values  # [rows, widest], falling
    threshold = likeliest.gather(1, (k - 1).clamp(max=widest - 1)[:, None])
    return scores.masked_fill((scores < threshold) & (k < vocab)[:, None], -torch.inf)


def keep_top_p(scores: Tensor, p: Tensor) -> Tensor:
    """Ban all but the fewest likeliest tokens that hold p of the probability.

    The nucleus of Holtzman et al., 2020 (https://arxiv.org/abs/1904.09751), always at least one
    token. No-op: 1.
    """
    falling, order = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = falling.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # mass of all likelier tokens
    outside = (before >= p[:, None]) & (p < 1.0)[:, None]
    outside[:, 0] = False
    banned = torch.zeros_like(outside).scatter(1, order, outside)
    return scores.masked_fill(banned, -torch.inf)


@dataclass(frozen=True)
class ProcessorEntry:
    """One parameter: the field of `Decoding` with its value, the value that changes nothing."""

    field: str
    no_op: float
    apply: Processor


PROCESSORS = (
    ProcessorEntry("temperature", 1.0, divide_by_temperature),
    ProcessorEntry("top_k", 0, keep_top_k),
    ProcessorEntry("top_p", 1.0, keep_top_p),
)
"""In the order in which they apply, which is the reference implementation's."""


class ProcessorBatch:
    """The processors that the live rows ask for, with their values as tensors.

    Built when rows join or leave, not at every step.
    """

    def __init__(self, decodings: Sequence[Decoding], device: torch.device) -> None:
        self._active: list[tuple[Processor, Tensor]] = []
        for entry in PROCESSORS:
            values = [getattr(decoding, entry.field) for decoding in decodings]
            if any(value != entry.no_op for value in values):
                self._active.append((entry.apply, torch.tensor(values, device=device)))

    def __call__(self, logits: Tensor) -> Tensor:
        """``[rows, vocab]`` raw logits -> the scores to pick from, float32."""
        scores = logits.float()
        for apply, values in self._active:
            scores = apply(scores, values)
        return scores


def finish_reason(row: Row, spec: ModelSpec) -> FinishReason | None:
    """Why a row ends after its latest token, or None."""
    if row.tokens[-1] == spec.eos_id:
        return "eos_token"
    room = spec.room(len(row.src), len(row.prefix))
    if len(row.tokens) >= min(row.decoding.max_new_tokens, room):
        return "length"
    return None
