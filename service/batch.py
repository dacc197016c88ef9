"""Many inputs through an engine in this thread, in order, without a server."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from model.engine import Engine
from model.sequence import Event, FailureEvent, Sequence, TokenEvent
from seqserve.errors import GenerationFailedError, InvalidRequestError, SeqserveError
from seqserve.schemas import GenerateRequest, GenerateResponse
from service.generation import Generator
from service.planning import Plan
from service.runner import is_last, work_of

Answer = GenerateResponse | SeqserveError
Item = GenerateRequest | SeqserveError
"""A request with one input, or why there is none."""


@dataclass
class _Pending:
    """An item whose turn has not come.

    Attributes:
        plan: what to do; None if that failed.
        error: why there will be no answer.
        events: of each of the plan's sequences, so far.
        unfinished: sequences that still run.
    """

    plan: Plan | None = None
    error: SeqserveError | None = None
    events: dict[Sequence, list[TokenEvent]] = field(default_factory=dict)
    unfinished: int = 0


class Batch:
    """Answers requests in order as soon as each and all before it are done.

    Args:
        window: requests held in memory at most; when the first is slow, the others wait for it.
    """

    def __init__(self, generator: Generator, engine: Engine, window: int) -> None:
        self.generator = generator
        self.engine = engine
        self.window = window
        self._pending: deque[_Pending] = deque()
        self._owners: dict[Sequence, _Pending] = {}

    def run(self, items: Iterable[Item]) -> Iterator[Answer]:
        """The answer to each item; errors take the place of answers."""
        source = Prefetched(items, self.window)
        while True:
            while len(self._pending) < self.window:
                # With nothing to compute, wait for input; otherwise take only what is there.
                item = source.take(wait=not self._pending)
                if item is None:
                    break
                self._admit(item)
            if not self._pending:
                return
            if self.engine.has_work:
                self._take_in(self.engine.step())
            while self._pending and not self._pending[0].unfinished:
                yield self._finish(self._pending.popleft())

    def _admit(self, item: Item) -> None:
        pending = _Pending()
        self._pending.append(pending)
        try:
            if isinstance(item, SeqserveError):
                raise item
            [pending.plan] = self.generator.plan(item)
            for sequence in pending.plan.sequences:
                self.engine.submit(sequence)
                self._owners[sequence] = pending
                pending.events[sequence] = []
                pending.unfinished += 1
        except SeqserveError as error:
            pending.error = error
        except ValueError as error:  # it could never fit into the engine
            pending.error = InvalidRequestError(str(error))

    def _take_in(self, events: list[Event]) -> None:
        for event in events:
            work = work_of(event)
            assert isinstance(work, Sequence)
            pending = self._owners[work]
            if isinstance(event, FailureEvent):
                pending.error = GenerationFailedError(str(event.error))
            elif isinstance(event, TokenEvent):
                pending.events[work].append(event)
            if is_last(event):
                pending.unfinished -= 1
                del self._owners[work]

    def _finish(self, pending: _Pending) -> Answer:
        if pending.error:
            return pending.error
        assert pending.plan
        return self.generator.answer(pending.plan, pending.events)


class Prefetched:
    """Reads an iterable in a thread, a bounded number of items ahead."""

    def __init__(self, items: Iterable[Item], ahead: int) -> None:
        self._items = items
        self._queue: queue.Queue[Item | None] = queue.Queue(ahead)
        self._ended = False
        self._failure: Exception | None = None
        threading.Thread(target=self._read, name="reader", daemon=True).start()

    def take(self, wait: bool) -> Item | None:
        """The next item; None at the end, or if there is none yet and `wait` is false."""
        if self._ended:
            return None
        try:
            item = self._queue.get(block=wait)
        except queue.Empty:
            return None
        self._ended = item is None
        if self._failure and self._ended:
            raise self._failure
        return item

    def _read(self) -> None:
        try:
            for item in self._items:
                self._queue.put(item)
        except Exception as error:  # noqa: BLE001 - raised again where the items are taken
            self._failure = error
        self._queue.put(None)
