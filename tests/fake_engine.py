"""An engine without tensors, whose pace and faults a test decides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from model.config import EngineConfig
from model.engine import StepTrace
from model.faults import GenerationError
from model.sequence import (
    Decoding,
    Event,
    FailureEvent,
    Forward,
    Sequence,
    TokenEvent,
)

Work = Sequence | Forward


class FakeEngine:
    """Gives each row the tokens 1, 2, 3, ... until its max_new_tokens.

    Attributes:
        gate: steps wait for it; clear it to hold the engine up.
        steps_until_held: after so many steps it closes the gate itself, so that a test need not
            be quicker than it.
        stepped: set by every step.
        submitted, cancelled: what the runner handed over, in order.
        poison: rows whose first source id is in here fail alone.
        fail_after: every row fails alone when it has so many tokens.
        explode: raised by the next step.
        threads: names of the threads that called in.
        begun: rows that joined in the last step.
        mute: rows live without telling of their tokens, as a beam search may for long.
    """

    def __init__(self, max_rows: int = 4, on_step: Callable[[StepTrace], None] | None = None):
        self.encoder_cache = None
        self.config = EngineConfig(max_rows=max_rows, max_cache_tokens=1000)
        self.gate = threading.Event()
        self.gate.set()
        self.steps_until_held: int | None = None
        self.stepped = threading.Event()
        self.submitted: list[Work] = []
        self.cancelled: list[Work] = []
        self.poison: set[int] = set()
        self.fail_after: int | None = None
        self.explode: Exception | None = None
        self.mute = False
        self.threads: set[str] = set()
        self.rows_by_step: list[int] = []
        self._on_step = on_step
        self.begun: tuple[Work, ...] = ()
        self._waiting: list[Sequence] = []
        self._rows: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._rows)

    def submit(self, work: Work) -> None:
        assert isinstance(work, Sequence)
        self._note()
        if work.reserved_tokens > self.config.max_cache_tokens:
            raise ValueError(f"{work.reserved_tokens} cache positions are too many")
        self.submitted.append(work)
        self._waiting.append(work)

    def cancel(self, work: Work) -> None:
        self._note()
        self.cancelled.append(work)
        self._waiting = [w for w in self._waiting if w is not work]
        self._rows = [w for w in self._rows if w is not work]

    def step(self) -> list[Event]:
        self._note()
        self.stepped.set()
        assert self.gate.wait(10)
        if self.explode:
            raise self.explode
        joined = self._waiting[: self.config.max_rows - len(self._rows)]
        self._waiting = self._waiting[len(joined) :]
        self._rows += joined
        self.begun = tuple(joined)
        rows = tuple(self._rows)
        events = [] if self.mute else [self._advance(row) for row in rows]
        left = tuple(row for row in rows if row not in self._rows)
        if self._on_step:
            trace = StepTrace(len(self.rows_by_step), rows, tuple(joined), left, 0)
            self._on_step(trace)
        self.rows_by_step.append(len(rows))
        if len(self.rows_by_step) == self.steps_until_held:
            self.gate.clear()  # before anybody hears of this step
        return events

    def _advance(self, row: Sequence) -> Event:
        if row.src[0] in self.poison or len(row.tokens) == self.fail_after:
            self._rows.remove(row)
            return FailureEvent(row, GenerationError("logits are not finite"))
        token = len(row.tokens) + 1
        row.tokens.append(token)
        if token == row.decoding.max_new_tokens:
            row.finish_reason = "length"
            self._rows.remove(row)
        return TokenEvent(row, token - 1, token, -0.5, (), row.finish_reason)

    def _note(self) -> None:
        self.threads.add(threading.current_thread().name)

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Steps begin but do not end inside the block."""
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()


def row(src: int = 5, tokens: int = 3) -> Sequence:
    """A sequence that takes so many steps."""
    return Sequence([src], [1], Decoding(max_new_tokens=tokens))
