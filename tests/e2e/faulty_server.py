"""`seqserve` with a model whose steps fail for some texts. A program of the tests, not a module.

A source that begins with one of the ids below brings its fault.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model.sequence import Sequence as Row
from model.steppers import CachedStepper
from seqserve.cli import main

LOST, SICK, LARGE = 20, 21, 22
"""First source ids: the device is lost; the row fails; only two rows fit beside each other."""

step = CachedStepper.step


def faulty(self: CachedStepper, rows: Sequence[Row], first: int = 0) -> Tensor:
    """As the original, unless a row brings a fault."""
    found = {row.src[0] for row in rows}
    if LOST in found:
        raise torch.AcceleratorError("CUDA error: device lost")
    if SICK in found:
        raise RuntimeError("sick")
    if LARGE in found and len(rows) > 2:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return step(self, rows, first)


CachedStepper.step = faulty  # type: ignore[method-assign]
main()
