"""How often things happened lately. Pure: whoever asks says what time it is."""

from __future__ import annotations

import math
from collections import deque

WINDOW = 10.0
"""Seconds over which a rate is measured."""

RESTART_WINDOW = 600.0
"""Seconds within which restarts are counted."""

LONGEST = 60
"""Seconds that a caller is told to wait, at most."""


class FinishRate:
    """How much has finished in the last seconds, and how long it takes for more to do so."""

    def __init__(self) -> None:
        self._finished: deque[tuple[float, float]] = deque()  # when, how much
        self._amount = 0.0

    def record(self, amount: float, now: float) -> None:
        """So much has finished.

        Args:
            now: seconds; never less than before.
        """
        self._finished.append((now, amount))
        self._amount += amount
        self._forget(now)

    def seconds_until(self, amount: float, now: float) -> int:
        """Whole seconds until so much more has finished, from 1 to `LONGEST`.

        Where nothing can be measured it is the window, after which something can.
        """
        self._forget(now)
        # What finished first only says when the measurement began.
        measured = self._amount - self._finished[0][1] if self._finished else 0.0
        if not measured:
            return math.ceil(WINDOW)
        elapsed = now - self._finished[0][0]
        return max(1, min(LONGEST, math.ceil(amount * elapsed / measured)))

    def _forget(self, now: float) -> None:
        while self._finished and self._finished[0][0] < now - WINDOW:
            _, amount = self._finished.popleft()
            self._amount -= amount


class RestartBudget:
    """How often something that keeps failing is started again: so often in a time, then no more.

    Args:
        limit: restarts within `seconds`.
    """

    def __init__(self, limit: int, seconds: float = RESTART_WINDOW) -> None:
        self.limit = limit
        self.seconds = seconds
        self._restarts: deque[float] = deque()

    def take(self, now: float) -> bool:
        """Whether one more is allowed; if so, it counts."""
        while self._restarts and self._restarts[0] <= now - self.seconds:
            self._restarts.popleft()
        if len(self._restarts) >= self.limit:
            return False
        self._restarts.append(now)
        return True
