"""Who runs next. Plain Python, no tensors, no clock: its laws are tested in microseconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from model.config import EngineConfig
from model.sequence import Forward, Sequence

Work = TypeVar("Work")


@dataclass(frozen=True)
class Plan:
    """What one step takes in: sequences that join, passes that run."""

    joining: tuple[Sequence, ...]
    forwards: tuple[Forward, ...]


class Scheduler:
    """Two queues, for sequences and for teacher-forced passes, and the live rows.

    The oldest in a queue is always taken first, so that nobody starves; its companions are those
    of like length from the window behind it, so that little is padded.

    Attributes:
        rows: live sequences, in the order of the stepper's rows.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.rows: list[Sequence] = []
        self._sequences: deque[Sequence] = deque()
        self._forwards: deque[Forward] = deque()

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
                f"num_beams {row_count(work)} is over the {self.config.max_rows} rows of the engine"
            )
        needed = row_count(work) * work.reserved_tokens
        if needed > self.config.max_cache_tokens:
            raise ValueError(
                f"source, prefix and max_new_tokens need {needed} cache positions, "
                f"the engine has {self.config.max_cache_tokens}"
            )
        self._sequences.append(work)

    def cancel(self, work: Sequence | Forward) -> None:
        """Forget waiting work; what lives is the engine's to remove. Unknown work is no error."""
        queue: deque[Sequence] | deque[Forward]
        queue = self._forwards if isinstance(work, Forward) else self._sequences
        if work in queue:
            queue.remove(work)  # type: ignore[arg-type]

    def schedule(self) -> Plan:
        """Take what the next step runs out of the queues; who calls turns it into rows."""
        joining = self._admit()
        forwards = take_alike(
            self._forwards,
            window=4 * self.config.max_rows,
            length=lambda forward: len(forward.src) + len(forward.tgt),
            fits=lambda chunk: _padded(chunk, _forward_tokens) <= self.config.max_forward_tokens,
        )
        return Plan(tuple(joining), tuple(forwards))

    def _admit(self) -> list[Sequence]:
        free = self.config.max_rows - len(self.rows)
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

        if not self._sequences:
            return []
        oldest = self._sequences[0]
        if row_count(oldest) > free or not affordable([oldest]):
            return []  # nobody overtakes it: it would starve
        return take_alike(
            self._sequences,
            window=2 * free,
            length=_encoder_tokens,
            fits=lambda chunk: fits(chunk) and affordable(chunk),
        )


def row_count(sequence: Sequence) -> int:
    """How many rows a sequence takes: its beams."""
    return sequence.decoding.num_beams


def take_alike(
    queue: deque[Work],
    window: int,
    length: Callable[[Work], int],
    fits: Callable[[list[Work]], bool],
) -> list[Work]:
    """Remove the oldest and its likeliest companions from a queue.

    Args:
        queue: oldest first.
        window: how many of the oldest may be companions.
        length: what is padded.
        fits: whether a chunk may still run; the oldest runs alone even where this says no.

    Returns:
        the oldest first, then by likeness to it.
    """
    if not queue:
        return []
    oldest = queue[0]
    candidates = list(islice(queue, 1, window))
    candidates.sort(key=lambda work: abs(length(work) - length(oldest)))  # stable: older first
    chunk = [oldest]
    for work in candidates:
        if not fits([*chunk, work]):
            break
        chunk.append(work)
    taken = set(map(id, chunk))
    remaining = [work for work in queue if id(work) not in taken]
    queue.clear()
    queue.extend(remaining)
    return chunk


def _padded(chunk: Iterable[Work], tokens: Callable[[Work], int]) -> int:
    """Tokens of a chunk when every member is padded to the longest."""
    sizes = [tokens(work) for work in chunk]
    return len(sizes) * max(sizes, default=0)


def _encoder_tokens(sequence: Sequence) -> int:
    return len(sequence.src)


def _forward_tokens(forward: Forward) -> int:
    return len(forward.src) + len(forward.tgt)
