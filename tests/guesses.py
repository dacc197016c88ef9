"""Guesses that a test decides, right and wrong ones, whatever the model copies."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from model.config import EngineConfig, ModelSpec
from model.decoding import token_limit
from model.lookahead import Draft, Lookahead
from model.sequence import Sequence as Row


class Guesses(Lookahead):
    """For each row so many next tokens of its answer, some of them replaced.

    Args:
        answers: what each row will say; rows that are not in it get random guesses.
        spec: of the model.
        seed: of what is guessed.
        wrong: share of tokens replaced.
        most: guesses at a step.
    """

    def __init__(
        self,
        answers: Mapping[int, Sequence[int]],
        spec: ModelSpec,
        seed: int = 0,
        wrong: float = 0.2,
        most: int = 6,
    ) -> None:
        super().__init__((), spec, EngineConfig())
        self._answers = answers
        self._draw = random.Random(seed)
        self._wrong = wrong
        self._at_most = most

    def drafts(self, rows: Sequence[Row]) -> list[Draft]:
        return [self._guesses(row) for row in rows]

    def _guesses(self, row: Row) -> Draft:
        room = token_limit(row, self._spec) - len(row.tokens) - 1
        count = min(room, self._draw.randint(0, self._at_most))
        if row.decoding.num_beams > 1 or count <= 0:
            return ()
        answer = self._answers.get(id(row), ())
        return [self._guess(answer, len(row.tokens) + i) for i in range(count)]

    def _guess(self, answer: Sequence[int], place: int) -> int:
        if place < len(answer) and self._draw.random() >= self._wrong:
            return answer[place]
        return self._draw.randrange(self._spec.tgt_vocab_size)
