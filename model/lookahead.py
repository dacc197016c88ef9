"""Several tokens a step where a target copies its source: guess them, check them in one pass.

The tokens that follow in the source are guessed to follow in the target. One decoder pass gives
the logits behind each guess; a token is picked from them as if the row had got there step by step,
and guesses count for as long as they are what was picked. So answers stay what they are, whatever
was guessed, and only the number of steps changes.

References:
    Sun et al., "Instantaneous Grammatical Error Correction with Shallow Aggressive Decoding", 2021
    (https://arxiv.org/abs/2106.04970).
    Yang et al., "Inference with Reference: Lossless Acceleration of Large Language Models", 2023
    (https://arxiv.org/abs/2304.04487).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from torch import Tensor

from model.config import EngineConfig, ModelSpec
from model.decoding import token_limit
from model.loader import LoadedModel
from model.sequence import Sequence as Row
from model.tokenizer import Tokenizer
from model.transformer import Transformer

Draft = Sequence[int]
"""Tokens guessed to follow in one row; maybe none."""

UNSHARED = -1
"""In place of the target id of a source token that targets do not have."""

FIXED_COST = 20
"""What a step costs beside its positions, in positions: reading weights, and calls. Measured on a
CPU (benchmarks/NOTES.md)."""

MEMORY = 1 / 4
"""Weight of the latest guess in how far a source is trusted."""

NEARBY = 16
"""Occurrences of a token in the source that are looked at, to either side of where it is due."""


@runtime_checkable
class Verifier(Protocol):
    """A stepper that can run several positions of a row in one pass."""

    def verify(self, rows: Sequence[Row], drafts: Sequence[Draft]) -> Tensor:
        """Logits behind each live row and behind each of its guesses.

        Nothing counts until `accept` says so.

        Returns:
            ``[positions, vocab]``: of each row first its own, then one for each guess.
        """
        ...

    def accept(self, kept: Sequence[int]) -> None:
        """Of the positions that `verify` ran for each row, let so many first ones count."""
        ...


def imagined(rows: Sequence[Row], drafts: Sequence[Draft]) -> tuple[Row, ...]:
    """Each row, and behind it the rows that it would be after each of its guesses."""
    return tuple(
        Row(row.src, row.prefix, row.decoding, [*row.tokens, *draft[:count]]) if count else row
        for row, draft in zip(rows, drafts, strict=True)
        for count in range(len(draft) + 1)
    )


class Guide:
    """Follows one target through its source.

    Args:
        src: source tokens by their target ids, `UNSHARED` where there is none.
        prefix: what the target begins with, without the decoder start.

    Attributes:
        trust: how likely the next guess is right, by those that could be made so far; at first 0.
    """

    def __init__(self, src: Sequence[int], prefix: Sequence[int] = ()) -> None:
        self.trust = 0.0
        self._src = src
        self._places: dict[int, list[int]] = {}  # token -> where it stands, rising
        for place, token in enumerate(src):
            self._places.setdefault(token, []).append(place)
        # Place -> how many tokens up to it are the target's last ones. Both begin alike.
        self._matches = {-1: 1}
        self._due = 0  # place of the token that should come next
        self._followed = 0
        for token in prefix:
            self._step(token)

    def follow(self, tokens: Sequence[int]) -> None:
        """Take in what has been generated since the last time; `tokens` is all of it."""
        for token in tokens[self._followed :]:
            self._step(token)
        self._followed = len(tokens)

    def guesses(self, most: int) -> Draft:
        """What follows in the source: a token that it lacks was put in another one's place."""
        ahead = self._src[self._due : self._due + max(0, most)]
        return ahead[: ahead.index(UNSHARED)] if UNSHARED in ahead else ahead

    def expected(self, guesses: int) -> float:
        """How many of so many guesses will be right, each as likely as the one before it."""
        if self.trust == 1.0:  # as near to it as rounding goes
            return guesses
        return self.trust * (1.0 - self.trust**guesses) / (1.0 - self.trust)

    def _step(self, token: int) -> None:
        if guess := self.guesses(1):
            self.trust += MEMORY * ((guess[0] == token) - self.trust)
        places = self._places.get(token, [])
        here = bisect(places, self._due)
        nearby = places[max(0, here - NEARBY) : here + NEARBY]
        self._matches = {place: self._matches.get(place - 1, 0) + 1 for place in nearby}
        # The longest match; of equal ones the nearest to where the target should be.
        self._due = 1 + max(
            nearby,
            key=lambda place: (self._matches[place], -abs(place - self._due)),
            default=self._due,
        )


class Lookahead:
    """Decides which tokens to guess, for all live rows of a step.

    Every row's source is followed at every step, which costs little next to a step: one that
    would have been right is trusted, and one that was wrong can earn trust again. Guesses are
    run only where more tokens are to be expected in the same time.

    Args:
        shared: target id of each source id, or `UNSHARED`.
        spec: of the model.
        config: how far to look ahead; a step never has more positions than rows it may have.
    """

    def __init__(self, shared: Sequence[int], spec: ModelSpec, config: EngineConfig) -> None:
        self._shared = shared
        self._spec = spec
        self._most = config.lookahead
        self._most_positions = config.max_rows
        self._guides: WeakKeyDictionary[Row, Guide] = WeakKeyDictionary()

    @classmethod
    def of(cls, model: LoadedModel, config: EngineConfig) -> Lookahead | None:
        """None where nothing is to be guessed, or source and target share no tokens."""
        shared = shared_ids(model) if config.lookahead else ()
        return cls(shared, model.spec, config) if shared else None

    def guide_for(self, row: Row) -> Guide:
        """A guide through a new row's source."""
        return Guide([self._shared[id] for id in row.src], row.prefix[1:])

    def drafts(self, rows: Sequence[Row]) -> list[Draft]:
        """What to run for each row; nothing for any where that is faster."""
        if 2 * len(rows) > self._most_positions:
            return [()] * len(rows)  # no room; guides follow when there is
        drafts = [self._draft(row) for row in rows]
        if not any(drafts):
            return drafts
        length = self._best_length(rows, drafts)
        return [draft[:length] for draft in drafts]

    def _draft(self, row: Row) -> Draft:
        if row.decoding.num_beams > 1:
            return ()
        guide = self._guides.get(row)
        if guide is None:
            guide = self._guides[row] = self.guide_for(row)
        guide.follow(row.tokens)
        return guide.guesses(min(self._most, token_limit(row, self._spec) - len(row.tokens) - 1))

    def _best_length(self, rows: Sequence[Row], drafts: Sequence[Draft]) -> int:
        """The length of drafts that gives the most tokens in the same time."""
        live = len(rows)
        guessing = [(row, len(draft)) for row, draft in zip(rows, drafts, strict=True) if draft]

        def tokens_per_time(length: int) -> float:
            right = sum(self._guides[row].expected(min(length, most)) for row, most in guessing)
            return (live + right) / (FIXED_COST + live * (1 + length))

        longest = min(self._most, self._most_positions // live - 1)
        return max([0, *lengths(longest)], key=tokens_per_time)


def lengths(longest: int) -> list[int]:
    """Drafts that are tried: those that make powers of two with the row's own position.

    >>> lengths(10)
    [1, 3, 7, 10]
    """
    return [min((2 << bits) - 1, longest) for bits in range((max(0, longest)).bit_length())]


def shared_ids(model: LoadedModel) -> Sequence[int]:
    """The target id of each source id, `UNSHARED` where there is none; empty where all lack one.

    One table for both sides is one vocabulary. Otherwise tokens are the same that have the same
    name in both tokenizers. Without those, and where a source grows with its target, nothing is
    known to be the same.
    """
    network, spec = model.network, model.spec
    if not isinstance(network, Transformer) or spec.source_is_target:
        return ()
    if network.encoder.embedding.tokens.weight is network.decoder.embedding.tokens.weight:
        return range(spec.src_vocab_size)
    if model.source_tokenizer is None or model.target_tokenizer is None:
        return ()
    ids = {name: id for id, name in _names(model.target_tokenizer, spec.tgt_vocab_size)}
    shared = [UNSHARED] * spec.src_vocab_size
    for id, name in _names(model.source_tokenizer, spec.src_vocab_size):
        shared[id] = ids.get(name, UNSHARED)
    said = {*shared} - {UNSHARED, spec.pad_id, spec.unk_id, *spec.eos_ids, *spec.decoder_start_ids}
    return shared if said else ()


def _names(tokenizer: Tokenizer, size: int) -> Iterator[tuple[int, str]]:
    for id in range(min(size, tokenizer.vocab_size)):
        with suppress(KeyError):  # a gap
            yield id, tokenizer.token(id)
