"""What one step computed: a pick for every row, and what is reported of it."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from itertools import accumulate

import torch
from torch import Tensor

from model.beam import Told
from model.faults import GenerationError
from model.lookahead import Draft
from model.sampler import Scores, log_probabilities, pick
from model.sequence import Candidate, Sequence

ALL_BANNED = "the decoding parameters ban every token"


class Step:
    """What one step computed for its rows, read back once.

    Args:
        rows: those decoded; behind each, what it is after each of its guesses.
        logits: ``[rows, vocab]``, raw, float32; may be overwritten.
        scores: ``[rows, vocab]`` to pick from.
        faults: rows that could not be run, and why.
        drafts: of each live row, the tokens that were guessed.

    Attributes:
        guessed: their number.
        tokens: each row's pick.
        parents: of the search that was advanced last, for each of its rows.
    """

    def __init__(
        self,
        rows: tuple[Sequence, ...],
        logits: Tensor,
        scores: Tensor,
        faults: dict[int, Exception],
        drafts: Sequence_[Draft],
    ) -> None:
        self.rows = rows
        self.scores = Scores(scores)
        self.guessed = len(rows) - len(drafts)
        self._faults = faults
        self._ends = list(accumulate(1 + len(draft) for draft in drafts))
        self.parents: list[int] = []
        picked = pick(self.scores, rows)
        self.tokens: list[int] = picked.tolist()
        highest = self.scores.highest.amax(dim=-1)  # a NaN anywhere shows here
        finite = (highest if scores is logits else logits.amax(dim=-1)).isfinite()
        self._finite = finite.tolist()
        self._allowed = (highest > -torch.inf).tolist()
        asking = rows_told(rows)
        self._place = {i: place for place, i in enumerate(asking)}
        if not asking:
            return
        # The last to read the logits, which were copied for searches if these ask.
        raw = logits if len(asking) == len(rows) else logits[asking]
        self._logprobs = log_probabilities(raw)  # [asking, vocab]
        self._picked = self._logprobs.gather(1, picked[asking][:, None])[:, 0].tolist()
        self._counts = [rows[i].decoding.top_n_tokens for i in asking]
        if widest := min(max(self._counts), logits.shape[-1]):
            values, ids = self._logprobs.topk(widest, dim=-1)
            self._top = list(zip(ids.tolist(), values.tolist(), strict=True))

    def positions(self, row: int) -> range:
        """Where a live row and what was guessed of it stand among the step's rows."""
        return range(self._ends[row - 1] if row else 0, self._ends[row])

    def fault(self, row: int, any_token: bool = False) -> Exception | None:
        """Why a row cannot go on.

        Args:
            any_token: whether the row may find no token allowed.
        """
        if row in self._faults:
            return self._faults[row]
        if not self._finite[row]:
            return GenerationError("the model's logits are not finite")
        if not self._allowed[row] and not any_token:
            return GenerationError(ALL_BANNED)
        return None

    def told(self, row: int, token: int) -> Told:
        """What is reported of a row that takes a token, where it asked."""
        place = self._place.get(row)
        if place is None:
            return Told()
        picked = token == self.tokens[row]
        logprob = self._picked[place] if picked else float(self._logprobs[place, token])
        if not (count := self._counts[place]):
            return Told((logprob,))
        ids, values = self._top[place]
        top = zip(ids[:count], values[:count], strict=True)
        return Told((logprob,), (tuple(Candidate(id, value) for id, value in top),))


def rows_told(rows: Sequence_[Sequence]) -> list[int]:
    """Which rows are told of their log-probabilities."""
    return [i for i, row in enumerate(rows) if row.decoding.logprobs]
