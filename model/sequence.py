"""The state of one request inside the engine, and the events that leave it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["eos_token", "length"]
Positions = Literal["last", "all"]


@dataclass(frozen=True)
class Decoding:
    """How a sequence picks its tokens; every value decided, nothing optional.

    Attributes:
        max_new_tokens: at least 1; `</s>` counts.
        sample: draw tokens; otherwise take the likeliest.
        temperature, top_k, top_p: shape the distribution drawn from; no-ops 1, 0, 1.
        seed: keys the random numbers together with `sequence_number` and the step.
        sequence_number: which of a request's several sequences this is.
        top_n_tokens: likeliest tokens to report at each step.
        logprobs: report log-probabilities, which cost a log-softmax over the vocabulary.
    """

    max_new_tokens: int
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    sequence_number: int = 0
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
    """

    src: list[int]
    prefix: list[int]
    decoding: Decoding
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

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
        """Cache positions that this sequence may come to use."""
        return len(self.src) + len(self.prefix) + self.decoding.max_new_tokens


@dataclass(eq=False)
class Forward:
    """A teacher-forced pass, wanted for its logits.

    Attributes:
        src: source ids.
        tgt: decoder ids, decoder start first; at least one.
        positions: logits of the last position or of all.
        top_k: report the k likeliest tokens instead of whole rows of logits.
    """

    src: list[int]
    tgt: list[int]
    positions: Positions = "last"
    top_k: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A token that a step considered, and its log-softmax of the raw logits."""

    id: int
    logprob: float


@dataclass(frozen=True)
class TokenEvent:
    """A sequence grew by one token.

    Attributes:
        index: of the token among the generated ones, from 0.
        logprob: log-softmax of the raw logits, where asked for.
        top_tokens: likeliest first, where asked for.
        finish_reason: set on the last token.
    """

    sequence: Sequence
    index: int
    token: int
    logprob: float | None
    top_tokens: tuple[Candidate, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class ForwardEvent:
    """A teacher-forced pass is done; tensors are on the CPU, float32.

    Attributes:
        logits: ``[positions, vocab]``, or ``[positions, top_k]`` in falling order.
        ids: ``[positions, top_k]`` where `top_k` was asked for.
        logprobs: like `logits`, where `top_k` was asked for: log-softmax over the whole vocabulary.
    """

    forward: Forward
    logits: Tensor
    ids: Tensor | None = None
    logprobs: Tensor | None = None


@dataclass(frozen=True)
class FailureEvent:
    """A sequence or pass ended without an answer; others are unaffected."""

    work: Sequence | Forward
    error: Exception


Event = TokenEvent | ForwardEvent | FailureEvent
