"""Who runs next. Plain Python, no tensors, no clock: its laws are tested in microseconds."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from model.config import EngineConfig
from model.sequence import Forward, Sequence

Work = TypeVar("Work", bound=Sequence | Forward)


@dataclass(frozen=True)
class Plan:
    """What one step takes in: sequences that join, passes that run."""

    joining: tuple[Sequence, ...]
    forwards: tuple[Forward, ...]


class TurnQueue(Generic[Work]):
    """Works that wait, each request's in a line of its own; the lines take turns.

    Its order is that of rounds: the first of every line, then the second of every line, and so
    on. The line whose turn it was goes to the back, so that a request waits for as many others
    as there are, however much each of them asks for.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[int, deque[Work]] = OrderedDict()  # request -> oldest first
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Work]:
        lines = [iter(line) for line in self._lines.values()]
        while lines:
            going_on = []
            for line in lines:
                for work in islice(line, 1):
                    yield work
                    going_on.append(line)
            lines = going_on

    @property
    def first(self) -> Work:
        """Whose turn it is: the oldest of its line."""
        return next(iter(self._lines.values()))[0]

    def append(self, work: Work) -> None:
        self._lines.setdefault(work.request, deque()).append(work)
        self._length += 1

    def put_back(self, works: Sequence_[Work]) -> None:
        """In front of everything, in this order."""
        for work in reversed(works):
            self._lines.setdefault(work.request, deque()).appendleft(work)
            self._lines.move_to_end(work.request, last=False)
        self._length += len(works)

    def remove(self, work: Work) -> None:
        """Forget a work; an unknown one is no error."""
        line = self._lines.get(work.request)
        if line is None or work not in line:
            return
        line.remove(work)
        self._length -= 1
        if not line:
            del self._lines[work.request]

    def take(self, chunk: Sequence_[Work]) -> None:
        """Remove works; the turn passes from the first one's line to the next."""
        for work in chunk:
            self.remove(work)
        if chunk and chunk[0].request in self._lines:
            self._lines.move_to_end(chunk[0].request)


class Scheduler:
    """Two queues, for sequences and for teacher-forced passes, and the live rows.

    Whoever's turn it is in a queue is always taken first, so that nobody starves. Its companions
    come from the window behind it: the longest sequences, since who begins last should end soon;
    the passes of like length, so that little is padded.

    Attributes:
        rows: live sequences, in the order of the stepper's rows.
        row_limit: rows that may live side by side: fewer than the configuration's where memory
            ran out, and one more again with every row that leaves.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.rows: list[Sequence] = []
        self.row_limit = config.max_rows
        self._sequences: TurnQueue[Sequence] = TurnQueue()
        self._forwards: TurnQueue[Forward] = TurnQueue()

    @property
    def waiting(self) -> int:
        return len(self._sequences) + len(self._forwards)

    @property
    def has_work(self) -> bool:
        return bool(self.rows or self._sequences or self._forwards)

    def submit(self, work: Sequence | Forward) -> None:
        """Queue work.

        Raises:
            ValueError: it could not run even alone.
        """
        if isinstance(work, Forward):
            self._forwards.append(work)
            return
        if row_count(work) > self.config.max_rows:
            raise ValueError(
                f"num_beams must be at most {self.config.max_rows} (max_rows), "
                f"got {row_count(work)}"
            )
        needed = row_count(work) * work.reserved_tokens
        if needed > self.config.max_cache_tokens:
            raise ValueError(
                f"source, prefix and max_new_tokens need {needed} cache positions, "
                f"at most {self.config.max_cache_tokens} are allowed (max_cache_tokens)"
            )
        self._sequences.append(work)

    def cancel(self, work: Sequence | Forward) -> None:
        """Forget waiting work; what lives is the engine's to remove. Unknown work is no error."""
        if isinstance(work, Forward):
            self._forwards.remove(work)
        else:
            self._sequences.remove(work)

    def put_back(self, sequences: Sequence_[Sequence], row_limit: int) -> None:
        """Have sequences that lived wait again, before all others, for memory's sake.

        Args:
            row_limit: rows that may live side by side for now.
        """
        self._sequences.put_back(sequences)
        self.row_limit = max(1, row_limit)

    def left(self, rows: int) -> None:
        """Rows have ended: where memory ran out there is some again."""
        self.row_limit = min(self.config.max_rows, self.row_limit + rows)

    def schedule(self) -> Plan:
        """Take what the next step runs out of the queues; who calls turns it into rows."""
        joining = self._admit()
        forwards = take(
            self._forwards,
            window=4 * self.config.max_rows,
            preference=lambda first, other: abs(_forward_tokens(other) - _forward_tokens(first)),
            fits=lambda chunk: _padded(chunk, _forward_tokens) <= self.config.max_forward_tokens,
        )
        return Plan(tuple(joining), tuple(forwards))

    def next_ones(self, tokens: int) -> list[Sequence]:
        """Those that wait and come next, with sources of at most so many tokens in all."""
        found: list[Sequence] = []
        for sequence in self._sequences:
            tokens -= max(1, len(sequence.src))
            if tokens < 0:
                break
            found.append(sequence)
        return found

    def _admit(self) -> list[Sequence]:
        if not self._sequences:
            return []
        first = self._sequences.first
        # Even where memory ran out, an idle engine tries the next one, be it alone.
        limit = self.row_limit if self.rows else max(self.row_limit, row_count(first))
        free = limit - len(self.rows)
        reserved = [sequence.reserved_tokens for sequence in self.rows]

        def fits(chunk: list[Sequence]) -> bool:
            return (
                sum(row_count(sequence) for sequence in chunk) <= free
                and _padded(chunk, _encoder_tokens) <= self.config.max_encoder_tokens
            )

        # Cache tensors are dense, so each row costs as much as the longest one reserves.
        def affordable(chunk: list[Sequence]) -> bool:
            joining = [s.reserved_tokens for s in chunk for _ in range(row_count(s))]
            everyone = reserved + joining
            return len(everyone) * max(everyone) <= self.config.max_cache_tokens

        if row_count(first) > free or not affordable([first]):
            return []  # nobody overtakes it: it would starve
        return take(
            self._sequences,
            window=2 * free,
            preference=lambda _, other: -other.reserved_tokens,
            fits=lambda chunk: fits(chunk) and affordable(chunk),
        )


def row_count(sequence: Sequence) -> int:
    """How many rows a sequence takes: its beams."""
    return sequence.decoding.num_beams


def take(
    queue: TurnQueue[Work],
    window: int,
    preference: Callable[[Work, Work], int],
    fits: Callable[[list[Work]], bool],
) -> list[Work]:
    """Remove the first from a queue, and as many companions as fit.

    Args:
        window: how many, counted from the first, are looked at.
        preference: of the first and another one; the lowest come first, of equal ones the earlier.
        fits: whether a chunk may still run; the first runs alone even where this says no.

    Returns:
        the first, then the others by preference.
    """
    if not queue:
        return []
    first, *others = islice(queue, max(1, window))
    others.sort(key=lambda work: preference(first, work))
    chunk = [first]
    for work in others:
        if not fits([*chunk, work]):
            break
        chunk.append(work)
    queue.take(chunk)
    return chunk


def _padded(chunk: Iterable[Work], tokens: Callable[[Work], int]) -> int:
    """Tokens of a chunk when every member is padded to the longest."""
    sizes = [tokens(work) for work in chunk]
    return len(sizes) * max(sizes, default=0)


def _encoder_tokens(sequence: Sequence) -> int:
    return len(sequence.src)


def _forward_tokens(forward: Forward) -> int:
    return forward.reserved_tokens
