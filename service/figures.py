"""What an engine's steps came to: counted by its thread, read by /info and /metrics.

The engine's thread pays for every step, so nothing here locks or formats. One thread writes plain
integers and floats; readers copy them and may be a step behind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from model.engine import Padding, StepTrace
from model.timing import PHASES

STEP_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0
)  # fmt: skip
SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)

Side = Literal["source", "target"]


class Tally:
    """A histogram.

    Args:
        bounds: the most that each bucket takes, rising; one bucket more takes what is over.

    Attributes:
        counts: of each bucket alone.
        total: sum of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[int]:
        """How many values were at most each bound, and how many there were."""
        return list(accumulate(self.counts))


class StepFigures:
    """Counts of what the engine's steps did. Written by the engine thread, read by any.

    They belong to the model and outlive an engine that is started anew.

    Attributes:
        rows_per_step: ``[rows]`` -> number of steps that had so many rows.
        forward_passes: teacher-forced passes run.
        guessed_tokens, foretold_tokens: tokens guessed ahead and run; those that were right.
        step_seconds, phase_seconds: how long steps and their phases took.
        padding: share of a batch that was padding: of sources when they join, of the rows' target
            positions at each step.
    """

    def __init__(self, max_rows: int) -> None:
        self.rows_per_step = [0] * (max_rows + 1)
        self.forward_passes = 0
        self.guessed_tokens = 0
        self.foretold_tokens = 0
        self.step_seconds = Tally(STEP_SECONDS)
        self.phase_seconds = {phase: Tally(STEP_SECONDS) for phase in PHASES}
        self.padding: dict[Side, Tally] = {"source": Tally(SHARES), "target": Tally(SHARES)}

    def record(self, trace: StepTrace) -> None:
        """Count a step."""
        self.rows_per_step[len(trace.rows)] += 1
        self.forward_passes += trace.forwards
        self.guessed_tokens += trace.guessed
        self.foretold_tokens += trace.foretold
        self.step_seconds.add(trace.seconds)
        for phase, seconds in trace.phases.items():
            self.phase_seconds[phase].add(seconds)
        self._pad("source", trace.sources)
        self._pad("target", trace.targets)

    def _pad(self, side: Side, padding: Padding) -> None:
        if padding.places:
            self.padding[side].add(1.0 - padding.live / padding.places)
