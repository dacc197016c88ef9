"""Beam search over the rows of one sequence, step for step as `transformers` 5 does it.

A search keeps `num_beams` live hypotheses, each a row of the batch, and the `num_beams` best
finished ones. Every step takes the ``2 * num_beams`` best continuations of all live hypotheses, and
`num_beams` more for each further token that ends a target: those among the first `num_beams` of
them that end are finished, the best that do not end live on.
A finished hypothesis' score is its summed log-probability over ``length ** length_penalty``, where
length counts generated tokens, `</s>` included.

When it ends (`early_stopping`): True, once `num_beams` hypotheses have finished; False, once the
best live one, at its present length, scores no better than the worst finished; "never", likewise,
but judged at the length that could score best. All state belongs to one search, so that its
company decides nothing.

The arithmetic, in float32 and with -1e9 where nothing may be chosen, is the reference's, so that
ties and rounding fall as they do there. So do *stand-ins*: where fewer than `num_beams` different
continuations are allowed, copies of a beam, with a summed score near -1e9, take the places left
over. They count as finished when they end, as in the reference, but are never returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model.sampler import Scores
from model.sequence import Beam, Candidate, FinishReason, Hypothesis
from model.sequence import Sequence as Row

NOTHING = -1.0e9
"""The summed score of what must not be chosen."""

LOWEST = torch.finfo(torch.float32).min
"""The score of what has finished is at least this; that of a place not taken is lower, -inf."""


@dataclass(frozen=True)
class Told:
    """What is reported of one hypothesis' tokens, where asked for."""

    logprobs: tuple[float, ...] = ()
    top_tokens: tuple[tuple[Candidate, ...], ...] = ()

    @property
    def last(self) -> float | None:
        """The log-probability of the last token."""
        return self.logprobs[-1] if self.logprobs else None

    def at(self, index: int) -> Told:
        """Of one token alone."""
        return Told(self.logprobs[index : index + 1], self.top_tokens[index : index + 1])


@dataclass(frozen=True)
class _Finished:
    """A finished hypothesis; `reason` is None for a place that nothing has taken yet.

    Attributes:
        real: whether it may be returned: a stand-in may not.
    """

    tokens: tuple[int, ...] = ()
    reason: FinishReason | None = None
    told: Told = Told()
    real: bool = False


class BeamSearch:
    """The search of one sequence.

    Args:
        sequence: what is searched for; its `decoding.num_beams` is the width.
        finish_reason: why a row ends after its latest token, or None.
        ends: how many tokens end a target.

    Attributes:
        rows: the live hypotheses, best first.
        told: what is reported of their tokens.
        steps: where asked for, the hypotheses of each step so far: the live ones, then those that
            it finished, both best first.
    """

    def __init__(
        self, sequence: Row, finish_reason: Callable[[Row], FinishReason | None], ends: int = 1
    ) -> None:
        self.sequence = sequence
        decoding = sequence.decoding
        self.width = decoding.num_beams
        self.rows = [
            Row(sequence.src, sequence.prefix, decoding, list(sequence.tokens))
            for _ in range(self.width)
        ]
        self.told = [Told()] * self.width
        self.steps: list[tuple[Beam, ...]] = []
        self._finish_reason = finish_reason
        self._candidates = max(2, 1 + ends) * self.width  # so many that `width` of them live on
        # All beams are the same at first: only the first one may be continued.
        self._scores = torch.full((self.width,), NOTHING)
        self._scores[0] = 0.0
        self._finished = [_Finished()] * self.width
        self._finished_scores = torch.full((self.width,), -torch.inf)
        self._may_improve = True
        self._ended = False

    def advance(self, scores: Scores, at: list[int], tell: Callable[[int, int], Told]) -> list[int]:
        """One step.

        Args:
            scores: processed log-probabilities.
            at: which of their rows are the live hypotheses'.
            tell: what to report of a beam's next token, given the beam and the token.

        Returns:
            for each live hypothesis after the step, which one before it was its parent.
        """
        values, parents, tokens = self._continuations(scores, at)
        candidates = [
            replace_tokens(self.rows[parent], token)
            for parent, token in zip(parents, tokens, strict=True)
        ]
        reasons = [self._finish_reason(candidate) for candidate in candidates]
        told = [
            _and(self.told[parent], tell(parent, token))
            for parent, token in zip(parents, tokens, strict=True)
        ]
        ends = torch.tensor([reason is not None for reason in reasons])
        finished = self._take_finished(candidates, reasons, told, values, ends)
        live = values + ends.float() * NOTHING
        self._scores, chosen = live.topk(min(self.width, len(live)))
        self.rows = [candidates[i] for i in chosen.tolist()]
        self.told = [told[i] for i in chosen.tolist()]
        self._ended = bool(ends.all())
        self._judge()
        if self.sequence.decoding.beam_steps:
            comparable = self._by_length(values, len(self.rows[0].tokens)).tolist()
            lives_on = chosen[is_real(self._scores)].tolist()
            self.steps.append(
                tuple(
                    Beam(parents[i], tokens[i], comparable[i], told[i].last, i in finished)
                    for i in (*lives_on, *finished)
                )
            )
        return [parents[i] for i in chosen.tolist()]

    @property
    def over(self) -> bool:
        """Whether the search has ended."""
        full = all(finished.reason for finished in self._finished)
        stopped_early = full and self.sequence.decoding.early_stopping is True
        exhausted = not is_real(self._scores).any()  # the reference goes on with stand-ins alone
        return self._ended or stopped_early or exhausted or not self._may_improve

    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """What has finished, best first: `num_beams` or, where so many do not exist, fewer."""
        return tuple(
            Hypothesis(
                finished.tokens,
                float(score),
                finished.reason,
                finished.told.logprobs,
                finished.told.top_tokens,
            )
            for finished, score in zip(self._finished, self._finished_scores, strict=True)
            if finished.reason and finished.real
        )

    @property
    def agreed(self) -> int:
        """How many first tokens are certain to be returned, a last one always excepted."""
        live = [
            tuple(row.tokens)
            for row, real in zip(self.rows, is_real(self._scores).tolist(), strict=True)
            if real
        ]
        done = [finished.tokens for finished in self._finished if finished.real]
        return min(common_prefix(live + done), min(map(len, live + done)) - 1)

    def _continuations(self, scores: Scores, at: list[int]) -> tuple[Tensor, list[int], list[int]]:
        """Summed scores of the best ones, on the CPU, their parents and last tokens."""
        rows = torch.tensor(at, device=scores.values.device)
        sums = self._scores.to(rows.device)
        count = min(self._candidates, len(at) * scores.vocab)
        values, parents, tokens = scores.best(rows, sums, count)
        if not is_real(values).all():  # near NOTHING all are equal: taken as the reference does
            values, parents, tokens = scores.best_of_all(rows, sums, count)
        return values.cpu(), parents.tolist(), tokens.tolist()

    def _take_finished(
        self,
        candidates: list[Row],
        reasons: list[FinishReason | None],
        told: list[Told],
        values: Tensor,
        ends: Tensor,
    ) -> list[int]:
        """Merge what has just ended into the finished ones and keep the best; what has ended."""
        if not any(reasons):
            return []
        scores = self._by_length(values, len(candidates[0].tokens))
        # Stand-ins take a place only above NOTHING, which free places hold in the reference.
        finished = ends & (torch.arange(len(candidates)) < self.width)
        finished &= is_real(values) | (scores > NOTHING)
        scores = scores.masked_fill(~finished, -torch.inf)
        real = (is_real(values) & finished).tolist()
        just_ended = [
            _Finished(tuple(row.tokens), reason if place < self.width else None, about, real[place])
            for place, (row, reason, about) in enumerate(
                zip(candidates, reasons, told, strict=True)
            )
        ]
        merged = [*self._finished, *just_ended]
        self._finished_scores, best = torch.cat([self._finished_scores, scores]).topk(self.width)
        self._finished = [merged[i] for i in best.tolist()]
        return [i for i, ended in enumerate(real) if ended]

    def _judge(self) -> None:
        """Whether a live hypothesis could still displace a finished one."""
        decoding = self.sequence.decoding
        length = len(self.rows[0].tokens)
        if decoding.early_stopping == "never" and decoding.length_penalty > 0.0:
            length = decoding.max_new_tokens
        best_possible = self._by_length(self._scores[0], length)
        # While a place is free, the worst is -inf, which anything displaces.
        displaces = bool(best_possible > self._finished_scores.min())
        self._may_improve = self._may_improve and displaces

    def _by_length(self, sums: Tensor, length: int) -> Tensor:
        """What hypotheses of a length are compared by; within float32 for any length penalty."""
        divisor: float = length**self.sequence.decoding.length_penalty
        return (sums / divisor).clamp(min=LOWEST)


def places_of_children(places: list[int], parents: list[int]) -> list[int]:
    """Where hypotheses lie after a step: each parent's first child in its place, where nothing has
    to be copied, others in those of parents without any.

    Args:
        places: of the parents.
        parents: of each child, counted from 0.

    >>> places_of_children([4, 5, 6], parents=[1, 0, 1])
    [5, 4, 6]
    """
    free = [place for parent, place in enumerate(places) if parent not in parents]
    found = []
    for child, parent in enumerate(parents):
        found.append(free.pop(0) if parent in parents[:child] else places[parent])
    return found


def is_real(scores: Tensor) -> Tensor:
    """Which summed log-probabilities are not a stand-in's, nor of what is banned."""
    return scores > NOTHING / 2


def replace_tokens(row: Row, token: int) -> Row:
    """A new row that goes on from `row` with `token`."""
    return Row(row.src, row.prefix, row.decoding, [*row.tokens, token], request=row.request)


def common_prefix(sequences: list[tuple[int, ...]]) -> int:
    """The length of the longest beginning that all have.

    >>> common_prefix([(1, 2, 3), (1, 2), (1, 2, 4)])
    2
    """
    first, last = min(sequences), max(sequences)  # in the order of words in a dictionary
    pairs = enumerate(zip(first, last, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(last)))


def _and(told: Told, more: Told) -> Told:
    return Told(told.logprobs + more.logprobs, told.top_tokens + more.top_tokens)
