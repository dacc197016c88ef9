"""How long the phases of an engine's step take."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Literal, cast, get_args

import torch

Phase = Literal["encode", "forward", "decode", "sample"]
"""Sources and prefixes of joining rows; teacher-forced passes; one decoder position of all live
rows; from their logits to the tokens picked."""

PHASES: tuple[Phase, ...] = get_args(Phase)


class Stopwatch:
    """Splits a step into phases.

    A CUDA call returns before its work is done. There the moments are events in the device's
    stream, compared when the step has read its tokens back and there is nothing left to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[Phase | None, float | torch.cuda.Event]] = []

    def start(self) -> None:
        """A step begins."""
        self._marks = [(None, self._now())]

    def lap(self, phase: Phase) -> None:
        """What ran since the last mark was this phase."""
        self._marks.append((phase, self._now()))

    def seconds(self) -> dict[Phase, float]:
        """Of each phase that the step had."""
        seconds: dict[Phase, float] = {}
        for (_, before), (phase, after) in pairwise(self._marks):
            assert phase is not None
            seconds[phase] = seconds.get(phase, 0.0) + self._between(before, after)
        return seconds

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
        if not self._cuda:
            return cast("float", after) - cast("float", before)
        first, second = cast("torch.cuda.Event", before), cast("torch.cuda.Event", after)
        second.synchronize()
        milliseconds: float = first.elapsed_time(second)
        return milliseconds / 1e3
