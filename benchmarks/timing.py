"""Both sides of a comparison in one run, by turns: ratios hold where absolute times drift."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Work = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Timed:
    """Seconds of every round, side by side.

    Attributes:
        seconds: name -> one number per round.
    """

    seconds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def speedup(self, ours: str, theirs: str) -> float:
        """How many times as fast `ours` is: the median over rounds of the ratio within a round."""
        pairs = zip(self.seconds[theirs], self.seconds[ours], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def by_turns(
    works: Mapping[str, Work],
    rounds: int,
    least_seconds: float = 0.3,
    clock: Clock = time.perf_counter,
) -> Timed:
    """Time works round by round, after one unmeasured run of each.

    Args:
        least_seconds: a work is repeated within a round until it took so long.
        clock: seconds; `time.process_time` leaves out what other processes took, and adds threads
            up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            seconds[name].append(_seconds(work, least_seconds, clock))
    return Timed(seconds)


def _seconds(work: Work, least: float, clock: Clock) -> float:
    began, runs = clock(), 0
    while True:
        work()
        runs += 1
        taken = clock() - began
        if taken >= least:
            return taken / runs
