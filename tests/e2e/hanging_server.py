"""`seqserve` with a model that never ends a step for some texts. A program of the tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from model.sequence import Sequence as Row
from model.steppers import CachedStepper
from seqserve.cli import main

ENDLESS = 20
"""First source id that brings it."""

step = CachedStepper.step


def hanging(self: CachedStepper, rows: Sequence[Row], first: int = 0) -> Tensor:
    """As the original, unless a row brings the fault."""
    if any(row.src[0] == ENDLESS for row in rows):
        threading.Event().wait()
    return step(self, rows, first)


CachedStepper.step = hanging  # type: ignore[method-assign]
main()
