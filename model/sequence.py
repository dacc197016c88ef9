"""The state of one request inside the engine, and the events that leave it. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["eos_token", "stop_sequence", "length"]
EarlyStopping = Literal[True, False, "never"]
Positions = Literal["last", "all"]


@dataclass(frozen=True)
class Decoding:
    """How a sequence picks its tokens; every value decided, nothing optional.

    Attributes:
        max_new_tokens: at least 1; `</s>` counts.
        sample: draw tokens; otherwise take the likeliest.
        temperature, top_k, top_p: shape the distribution drawn from; no-ops 1, 0, 1.
        min_p, typical_p: likewise; no-ops 0 and 1.
        seed: keys the random numbers together with `sequence_number` and the step.
        sequence_number: which of a request's several sequences this is.
        repetition_penalty, frequency_penalty, presence_penalty: no-ops 1, 0, 0.
        no_repeat_ngram_size, encoder_no_repeat_ngram_size: no-op 0.
        min_new_tokens: `</s>` is banned until so many were generated.
        bad_words: token sequences never completed.
        logit_bias: token and what is added to its logit.
        forced_bos_token_id, forced_eos_token_id: the first and the last token; no-op -1.
        renormalize_logits: scores are log-probabilities again after all other processors.
        stop: told all generated tokens, whether they end the sequence.
        num_beams: hypotheses searched side by side; 1 is no beam search.
        length_penalty: exponent of the length that a hypothesis' score is divided by.
        early_stopping: when a beam search may end, see `model.beam`.
        beam_steps: report every hypothesis of a beam search, step by step.
        top_n_tokens: likeliest tokens to report at each step.
        logprobs: report log-probabilities, which cost a log-softmax over the vocabulary.
    """

    max_new_tokens: int
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    sequence_number: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    forced_bos_token_id: int = -1
    forced_eos_token_id: int = -1
    renormalize_logits: bool = False
    stop: Callable[[Sequence_[int]], bool] | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    beam_steps: bool = False
    top_n_tokens: int = 0
    logprobs: bool = False


@dataclass(eq=False)
class Sequence:
    """A source and the target being grown from it.

    Attributes:
        src: source ids.
        prefix: decoder ids before the first generated one: decoder start, then target prefix.
        decoding: how tokens are picked.
        tokens: generated so far.
        finish_reason: set when the sequence has left.
        request: whose it is; those that wait take turns by request.
    """

    src: list[int]
    prefix: list[int]
    decoding: Decoding
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    request: int = 0

    @property
    def target(self) -> list[int]:
        """All decoder ids so far."""
        return self.prefix + self.tokens

    @property
    def last_token(self) -> int:
        """The decoder's next input."""
        return self.tokens[-1] if self.tokens else self.prefix[-1]

    @property
    def reserved_tokens(self) -> int:
        """Cache positions that each of this sequence's rows may come to use."""
        return len(self.src) + len(self.prefix) + self.decoding.max_new_tokens


@dataclass(eq=False)
class Forward:
    """A teacher-forced pass, wanted for its logits.

    Attributes:
        src: source ids.
        tgt: decoder ids, decoder start first; at least one.
        positions: logits of the last position or of all.
        top_k: report the k likeliest tokens instead of whole rows of logits.
        labels: report the log-probability of these tokens instead, one for each of `tgt`.
        attention: report attention weights instead of anything else.
        request: whose it is; those that wait take turns by request.
    """

    src: list[int]
    tgt: list[int]
    positions: Positions = "last"
    top_k: int | None = None
    labels: list[int] | None = None
    attention: bool = False
    request: int = 0

    @property
    def reserved_tokens(self) -> int:
        """Positions that the pass fills."""
        return len(self.src) + len(self.tgt)


@dataclass(frozen=True)
class AttentionMaps:
    """Attention weights of one source and target, float32, on the CPU.

    Attributes:
        encoder: ``[layers, heads, src, src]``.
        decoder: ``[layers, heads, tgt, tgt]``.
        cross: ``[layers, heads, tgt, src]``.
    """

    encoder: Tensor
    decoder: Tensor
    cross: Tensor


@dataclass(frozen=True)
class Candidate:
    """A token that a step considered, and its log-softmax of the raw logits."""

    id: int
    logprob: float


@dataclass(frozen=True)
class Hypothesis:
    """A finished beam.

    Attributes:
        tokens: generated ones, `</s>` included.
        score: sum of log-probabilities over ``length ** length_penalty``.
        finish_reason: why it ended.
        logprobs, top_tokens: per token, where asked for.
    """

    tokens: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    logprobs: tuple[float, ...] = ()
    top_tokens: tuple[tuple[Candidate, ...], ...] = ()


@dataclass(frozen=True)
class Beam:
    """A hypothesis as one step of a beam search left it.

    Attributes:
        parent: its place among the live ones of the step before, from 0.
        token: what the step added.
        score: summed log-probability over ``length ** length_penalty``.
        logprob: the token's, where asked for.
        finished: whether it ended here; the others live on.
    """

    parent: int
    token: int
    score: float
    logprob: float | None
    finished: bool


@dataclass(frozen=True)
class TokenEvent:
    """A sequence grew by one token; a beam search, by one on which all its hypotheses agree.

    Attributes:
        index: of the token among the generated ones, from 0.
        logprob: log-softmax of the raw logits, where asked for.
        top_tokens: likeliest first, where asked for.
        finish_reason: set on the last token.
        hypotheses: of a beam search, best first, on the last token; the events' tokens are the
            first one's.
        beam_steps: with them, where asked for: the hypotheses of each step, the live ones first,
            best first.
    """

    sequence: Sequence
    index: int
    token: int
    logprob: float | None
    top_tokens: tuple[Candidate, ...]
    finish_reason: FinishReason | None
    hypotheses: tuple[Hypothesis, ...] = ()
    beam_steps: tuple[tuple[Beam, ...], ...] = ()


@dataclass(frozen=True)
class ForwardEvent:
    """A teacher-forced pass is done; tensors are on the CPU, float32.

    Attributes:
        logits: ``[positions, vocab]``; ``[positions, top_k]`` in falling order; the labels' own,
            ``[positions, 1]``; empty where attention was asked for.
        ids: like `logits`, where `top_k` or labels were asked for.
        logprobs: like `ids`: log-softmax over the whole vocabulary.
        attention: where asked for.
    """

    forward: Forward
    logits: Tensor
    ids: Tensor | None = None
    logprobs: Tensor | None = None
    attention: AttentionMaps | None = None


@dataclass(frozen=True)
class FailureEvent:
    """A sequence or pass ended without an answer; others are unaffected."""

    work: Sequence | Forward
    error: Exception


Event = TokenEvent | ForwardEvent | FailureEvent
