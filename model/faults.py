"""What may go wrong while the engine runs, and finding out whose fault it is."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

DOES_NOT_FIT = "out of memory: this input does not fit even alone"

ALLOCATION_FAILURES = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")
"""How torch words it on a CPU, where it raises nothing but a RuntimeError."""


class GenerationError(RuntimeError):
    """One sequence or pass could not be computed; the message is for its caller."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether fewer rows might do."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ALLOCATION_FAILURES
    )


def is_fatal(error: BaseException) -> bool:
    """Whether the device itself failed, after which every call fails, whoever's it is."""
    return isinstance(error, torch.AcceleratorError)


def for_caller(error: Exception) -> Exception:
    """The error that a sequence or pass ends with when nobody else is to blame."""
    return GenerationError(DOES_NOT_FIT) if is_out_of_memory(error) else error


def release_memory(device: torch.device) -> None:
    """Give back what is no longer in use, so that a second attempt finds it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def isolated(
    run: Callable[[Sequence[Item]], Result],
    items: Sequence[Item],
    not_theirs: Callable[[Exception], bool] = is_fatal,
) -> list[tuple[Sequence[Item], Result | Exception]]:
    """Run items together and, where that fails, in halves, so that only those at fault fail.

    Args:
        run: raises without having changed anything, or succeeds for all.
        items: at least one.
        not_theirs: whether an error says nothing of the items; it is raised.

    Returns:
        parts in order, each with its result; a part that failed is a single item.
    """
    try:
        return [(items, run(items))]
    except Exception as error:
        if not_theirs(error):
            raise
        failure = error
    if len(items) == 1:
        return [(items, failure)]
    del failure  # its traceback keeps the attempt's tensors alive
    middle = len(items) // 2
    return [
        *isolated(run, items[:middle], not_theirs),
        *isolated(run, items[middle:], not_theirs),
    ]
