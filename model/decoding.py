"""Decoding parameters at work: from a step's raw logits to the scores tokens are picked from.

A parameter is one function ``(scores [rows, vocab], history, values) -> scores`` and its entry in
`PROCESSORS`, which names the field of `Decoding` that holds its value; the field's default changes
nothing. A processor runs only when some row asks for it, and leaves other rows unchanged.

The definitions are those of `transformers`' `GenerationConfig` (frequency and presence penalty:
OpenAI's); `docs/decoding.md` has them as formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from model.config import ModelSpec
from model.sequence import Decoding, FinishReason
from model.sequence import Sequence as Row

BANNED = -torch.inf

LOWEST_DIVISOR = 1e-6
"""Lower temperatures and penalties would carry float32 logits over its range."""

LARGEST_COUNT = 2**31 - 1
"""Longer than any sequence, larger than any vocabulary."""


class History:
    """What live rows have said so far; a tensor is made only when a processor asks for it.

    Ids fill up to the longest row with `vocab`, which is no token's id: what is scattered there
    lands in a spare column that is cut off again.
    """

    def __init__(self, rows: Sequence[Row], spec: ModelSpec, device: torch.device) -> None:
        self.rows = rows
        self.spec = spec
        self.device = device
        self.vocab = spec.tgt_vocab_size

    @cached_property
    def target(self) -> Tensor:
        """``[rows, longest]``: decoder start, target prefix, generated tokens."""
        return self._pad([row.target for row in self.rows])

    @cached_property
    def target_lengths(self) -> Tensor:
        """``[rows]``."""
        return self._tensor([len(row.prefix) + len(row.tokens) for row in self.rows])

    @cached_property
    def generated(self) -> Tensor:
        """``[rows, longest]``: generated tokens alone."""
        return self._pad([row.tokens for row in self.rows])

    @cached_property
    def source(self) -> Tensor:
        """``[rows, longest]``."""
        return self._pad([row.src for row in self.rows])

    @cached_property
    def generated_lengths(self) -> Tensor:
        """``[rows]``."""
        return self._tensor([len(row.tokens) for row in self.rows])

    @cached_property
    def last_step(self) -> Tensor:
        """``[rows]``: whether the next token is the last one that may be generated."""
        return self._tensor(
            [len(row.tokens) + 1 >= token_limit(row, self.spec) for row in self.rows]
        )

    def tail(self, length: int) -> Tensor:
        """``[rows, length]``: the last target ids; before the first, what equals nothing."""
        index = self.target_lengths[:, None] - length + torch.arange(length, device=self.device)
        ids = self.target.gather(1, index.clamp(min=0))
        return ids.masked_fill(index < 0, self.vocab + 1)

    def _pad(self, rows: Sequence[Sequence[int]]) -> Tensor:
        longest = max(1, *(len(row) for row in rows))
        return self._tensor([[*row, *[self.vocab] * (longest - len(row))] for row in rows])

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, device=self.device)


# --- the parameters ------------------------------------------------------------------------------


def add_bias(scores: Tensor, history: History, bias: Tensor) -> Tensor:
    """``scores + bias``, the bias ``[rows, vocab]``. No-op: no entry."""
    return scores + bias


def penalize_repetition(scores: Tensor, history: History, penalty: Tensor) -> Tensor:
    """Divide the positive, multiply the negative scores of tokens in the target so far.

    Keskar et al., "CTRL", 2019 (https://arxiv.org/abs/1909.05858), with the decoder start in the
    history. No-op: 1.
    """
    said = _occurrences(history.target, history.vocab) > 0
    penalty = penalty.clamp(min=LOWEST_DIVISOR)[:, None]
    penalized = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(said, penalized, scores)


def penalize_frequency(scores: Tensor, history: History, penalty: Tensor) -> Tensor:
    """Subtract ``penalty * count`` of each token among the generated ones. No-op: 0."""
    return scores - penalty[:, None] * _occurrences(history.generated, history.vocab)


def penalize_presence(scores: Tensor, history: History, penalty: Tensor) -> Tensor:
    """Subtract ``penalty`` from each token that was generated already. No-op: 0."""
    return scores - penalty[:, None] * (_occurrences(history.generated, history.vocab) > 0)


def ban_repeated_ngrams(scores: Tensor, history: History, size: Tensor) -> Tensor:
    """Ban what would repeat an n-gram of the target so far. No-op: 0.

    Paulus, Xiong and Socher, 2017 (https://arxiv.org/abs/1705.04304).
    """
    return _ban_ngrams_of(history.target, scores, history, size)


def ban_source_ngrams(scores: Tensor, history: History, size: Tensor) -> Tensor:
    """Ban what would repeat an n-gram of the source. No-op: 0."""
    return _ban_ngrams_of(history.source, scores, history, size)


def ban_words(scores: Tensor, history: History, words: BannedWords) -> Tensor:
    """Ban each token that would complete one of a row's banned sequences. No-op: none."""
    for rows, beginnings, last in words.by_length:
        if beginnings.shape[1] > history.target.shape[1]:
            continue
        said = (history.tail(beginnings.shape[1])[rows] == beginnings).all(dim=1)
        scores = scores.index_put((rows[said], last[said]), scores.new_tensor(BANNED))
    return scores


def ban_early_end(scores: Tensor, history: History, minimum: Tensor) -> Tensor:
    """Ban what ends a target until `minimum` tokens are generated, itself not counted. No-op: 0.

    Writes into `scores`: a copy of a large vocabulary's takes longer than the rest.
    """
    too_early = history.generated_lengths < minimum
    for id in history.spec.eos_ids:
        scores[:, id].masked_fill_(too_early, BANNED)
    return scores


def force_first(scores: Tensor, history: History, token: Tensor) -> Tensor:
    """The first token behind the decoder start is `token`. No-op: -1."""
    return _force(scores, token, history.target_lengths == 1)


def force_last(scores: Tensor, history: History, token: Tensor) -> Tensor:
    """The last token that the length allows is `token`. No-op: -1."""
    return _force(scores, token, history.last_step)


def divide_by_temperature(scores: Tensor, history: History, temperature: Tensor) -> Tensor:
    """``scores / temperature`` (Ackley, Hinton and Sejnowski, 1985). No-op: 1."""
    return scores / temperature.clamp(min=LOWEST_DIVISOR)[:, None]


def keep_top_k(scores: Tensor, history: History, k: Tensor) -> Tensor:
    """Ban all but the k likeliest tokens; ties with the k-th stay (Fan et al., 2018). No-op: 0."""
    vocab = scores.shape[-1]
    k = torch.where(k == 0, vocab, k.clamp(max=vocab))
    widest = int(k[k < vocab].max()) if bool((k < vocab).any()) else 1
    likeliest = scores.topk(widest, dim=-1).values  # [rows, widest], falling
    threshold = likeliest.gather(1, (k - 1).clamp(max=widest - 1)[:, None])
    return scores.masked_fill((scores < threshold) & (k < vocab)[:, None], BANNED)


def keep_top_p(scores: Tensor, history: History, p: Tensor) -> Tensor:
    """Ban all but the fewest likeliest tokens that hold p of the probability.

    The nucleus of Holtzman et al., 2020 (https://arxiv.org/abs/1904.09751), always at least one
    token. No-op: 1.
    """
    rising, order = scores.sort(dim=-1, stable=True)
    mass = rising.softmax(dim=-1).cumsum(dim=-1)  # of a token and all less likely ones
    outside = (mass <= (1.0 - p).to(mass.dtype)[:, None]) & (p < 1.0)[:, None]
    outside[:, -1] = False
    return scores.masked_fill(_unsort(outside, order), BANNED)


def keep_min_p(scores: Tensor, history: History, p: Tensor) -> Tensor:
    """Ban tokens with less than p times the likeliest one's probability. No-op: 0.

    Nguyen et al., 2024 (https://arxiv.org/abs/2407.01082).
    """
    probabilities = scores.softmax(dim=-1)
    threshold = p[:, None] * probabilities.amax(dim=-1, keepdim=True)
    return scores.masked_fill(probabilities < threshold, BANNED)


def keep_typical(scores: Tensor, history: History, p: Tensor) -> Tensor:
    """Ban all but the tokens whose surprise is nearest to the entropy and that hold p. No-op: 1.

    Meister et al., "Locally Typical Sampling", 2023 (https://arxiv.org/abs/2202.00666).
    """
    logprobs = scores.log_softmax(dim=-1)
    entropy = -(logprobs.exp() * logprobs).nansum(dim=-1, keepdim=True)
    distance, order = (-logprobs - entropy).abs().sort(dim=-1, stable=True)
    mass = logprobs.exp().gather(1, order).cumsum(dim=-1)
    last = (mass < p[:, None]).sum(dim=-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    outside = (distance > distance.gather(1, last)) & (p < 1.0)[:, None]
    outside[:, 0] = False
    return scores.masked_fill(_unsort(outside, order), BANNED)


def renormalize(scores: Tensor, history: History, wanted: Tensor) -> Tensor:
    """``log_softmax(scores)``, of which a beam search adds up the chosen ones. No-op: false."""
    return torch.where(wanted[:, None], scores.log_softmax(dim=-1), scores)


# --- what they share -----------------------------------------------------------------------------


def _occurrences(ids: Tensor, vocab: int) -> Tensor:
    """``[rows, length]`` ids -> ``[rows, vocab]``: how often each occurs."""
    counts = torch.zeros(len(ids), vocab + 1, device=ids.device)
    return counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=counts.dtype))[:, :vocab]


def _ban_ngrams_of(ids: Tensor, scores: Tensor, history: History, sizes: Tensor) -> Tensor:
    vocab = history.vocab
    banned = torch.zeros(len(ids), vocab + 1, dtype=torch.bool, device=ids.device)
    for size in set(sizes.tolist()) - {0}:
        if ids.shape[1] < size:
            continue
        windows = ids.unfold(1, size, 1)  # [rows, windows, size]
        repeats = (windows[..., :-1] == history.tail(size - 1)[:, None]).all(dim=-1)
        repeats &= (sizes == size)[:, None]
        last = torch.where(repeats, windows[..., -1], vocab).clamp(max=vocab)
        banned.scatter_(1, last, True)
    return scores.masked_fill(banned[:, :vocab], BANNED)


def _force(scores: Tensor, token: Tensor, when: Tensor) -> Tensor:
    when = when & (token >= 0)
    only = torch.full_like(scores, BANNED).scatter_(1, token.clamp(min=0)[:, None], 0.0)
    return torch.where(when[:, None], only, scores)


def _unsort(flags: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(flags).scatter(1, order, flags)


@dataclass(frozen=True)
class BannedWords:
    """Banned sequences of all rows, grouped by length.

    Attributes:
        by_length: for each length, the rows ``[n]``, what precedes the last token
            ``[n, length - 1]``, and the last token ``[n]``.
    """

    by_length: tuple[tuple[Tensor, Tensor, Tensor], ...]

    @classmethod
    def of(cls, words: Sequence[Any], spec: ModelSpec, device: torch.device) -> BannedWords:
        """``words``: one tuple of token sequences per row; an end alone is never banned."""
        groups: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for row, sequences in enumerate(words):
            for sequence in sequences:
                if len(sequence) > 1 or sequence[0] not in spec.eos_ids:
                    groups.setdefault(len(sequence), []).append((row, sequence))
        return cls(
            tuple(
                (
                    torch.tensor([row for row, _ in group], device=device),
                    torch.tensor([s[:-1] for _, s in group], device=device, dtype=torch.long),
                    torch.tensor([s[-1] for _, s in group], device=device),
                )
                for group in groups.values()
            )
        )


def _as_tensor(values: Sequence[Any], spec: ModelSpec, device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)


def _as_counts(values: Sequence[Any], spec: ModelSpec, device: torch.device) -> Tensor:
    """Counts that may be of any size; none needs to be told apart beyond the largest int32."""
    return torch.tensor([min(value, LARGEST_COUNT) for value in values], device=device)


def _as_double(values: Sequence[Any], spec: ModelSpec, device: torch.device) -> Tensor:
    return torch.tensor(values, device=device, dtype=torch.float64)


def _as_bias(values: Sequence[Any], spec: ModelSpec, device: torch.device) -> Tensor:
    rows = [row for row, entries in enumerate(values) for _ in entries]
    tokens = [token for entries in values for token, _ in entries]
    added = torch.tensor([value for entries in values for _, value in entries])
    bias = torch.zeros(len(values), spec.tgt_vocab_size)
    bias[rows, tokens] = added
    return bias.to(device)


@dataclass(frozen=True)
class Processor:
    """One parameter.

    Attributes:
        field: of `Decoding`, with each row's value.
        apply: the function.
        prepare: all rows' values as what the function takes, made when rows join or leave.
        writes: whether the function writes into the scores that it is given.
    """

    field: str
    apply: Callable[[Tensor, History, Any], Tensor]
    prepare: Callable[[Sequence[Any], ModelSpec, torch.device], Any] = _as_tensor
    writes: bool = False

    @property
    def no_op(self) -> Any:
        """The value that changes nothing: the field's default."""
        return Decoding.__dataclass_fields__[self.field].default


PROCESSORS = (
    Processor("logit_bias", add_bias, _as_bias),
    Processor("repetition_penalty", penalize_repetition),
    Processor("frequency_penalty", penalize_frequency),
    Processor("presence_penalty", penalize_presence),
    Processor("no_repeat_ngram_size", ban_repeated_ngrams, _as_counts),
    Processor("encoder_no_repeat_ngram_size", ban_source_ngrams, _as_counts),
    Processor("bad_words", ban_words, BannedWords.of),
    Processor("min_new_tokens", ban_early_end, _as_counts, writes=True),
    Processor("forced_bos_token_id", force_first),
    Processor("forced_eos_token_id", force_last),
    Processor("temperature", divide_by_temperature),
    Processor("top_k", keep_top_k, _as_counts),
    Processor("top_p", keep_top_p, _as_double),  # 1 - 0.999 is no float32
    Processor("min_p", keep_min_p),
    Processor("typical_p", keep_typical),
    Processor("renormalize_logits", renormalize),
)
"""In the order in which they apply, which is the reference implementation's."""


class ProcessorBatch:
    """The processors that the live rows ask for, with their values prepared.

    Built when rows join, leave or change places, not at every step.
    """

    def __init__(
        self, decodings: Sequence[Decoding], spec: ModelSpec, device: torch.device
    ) -> None:
        self._active: list[tuple[Processor, Any]] = []
        for processor in PROCESSORS:
            values = [getattr(decoding, processor.field) for decoding in decodings]
            if any(value != processor.no_op for value in values):
                self._active.append((processor, processor.prepare(values, spec, device)))

    def __call__(self, logits: Tensor, history: History, spare: bool = False) -> Tensor:
        """``[rows, vocab]`` logits, float32 -> the scores to pick from.

        Args:
            spare: whether the logits may be overwritten.
        """
        scores = logits
        for processor, values in self._active:
            if processor.writes and scores is logits and not spare:
                scores = scores.clone()
            scores = processor.apply(scores, history, values)
        return scores


# --- ends ----------------------------------------------------------------------------------------


def token_limit(row: Row, spec: ModelSpec) -> int:
    """How many tokens a row may generate."""
    return min(row.decoding.max_new_tokens, spec.room(len(row.src), len(row.prefix)))


def finish_reason(row: Row, spec: ModelSpec) -> FinishReason | None:
    """Why a row ends after its latest token, or None."""
    if row.tokens[-1] in spec.eos_ids:
        return "eos_token"
    if row.decoding.stop is not None and row.decoding.stop(row.tokens):
        return "stop_sequence"
    if len(row.tokens) >= token_limit(row, spec):
        return "length"
    return None
