"""One call for each of many inputs: some at a time, answers in the order of the inputs."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sized,
)
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from seqserve.errors import SeqserveError

A = TypeVar("A")
R = TypeVar("R")

OnError = Literal["raise", "return"]

Progress = bool | Callable[[int, int | None], object]
"""A bar (drawn by tqdm), or what is called with how many answers there are, and how many inputs:
None where these have no length."""

AHEAD = 2
"""Inputs taken for each call that may run: a slow one does not keep the others from going on."""


def map_threads(
    function: Callable[[A], R],
    inputs: Iterable[A],
    concurrency: int,
    errors: OnError,
    progress: Progress,
) -> Generator[R | SeqserveError, None, None]:
    """Call a function in threads; its answers come in order, as soon as they can.

    Raises:
        SeqserveError: a call failed, unless errors are to be returned.
        ValueError: an argument is out of range.
    """
    _check(concurrency, errors)
    pool = ThreadPoolExecutor(concurrency, "seqserve-map")
    pending: deque[Future[R]] = deque()

    with _advancing(progress, inputs) as advance:

        def take() -> R | SeqserveError:
            try:
                return pending.popleft().result()
            except SeqserveError as error:
                if errors == "raise":
                    raise
                return error
            finally:
                advance()

        try:
            for each in inputs:
                pending.append(pool.submit(function, each))
                if len(pending) == AHEAD * concurrency:
                    yield take()
            while pending:
                yield take()
        finally:
            pool.shutdown(cancel_futures=True)


async def map_tasks(
    function: Callable[[A], Awaitable[R]],
    inputs: Iterable[A],
    concurrency: int,
    errors: OnError,
    progress: Progress,
) -> AsyncGenerator[R | SeqserveError, None]:
    """`map_threads` with tasks in place of threads; those that still run are cancelled at the end.

    Raises:
        SeqserveError: a call failed, unless errors are to be returned.
        ValueError: an argument is out of range.
    """
    _check(concurrency, errors)
    room = asyncio.Semaphore(concurrency)
    pending: deque[asyncio.Task[R]] = deque()

    async def one(each: A) -> R:
        async with room:
            return await function(each)

    with _advancing(progress, inputs) as advance:

        async def take() -> R | SeqserveError:
            try:
                return await pending.popleft()
            except SeqserveError as error:
                if errors == "raise":
                    raise
                return error
            finally:
                advance()

        try:
            for each in inputs:
                pending.append(asyncio.create_task(one(each)))
                if len(pending) == AHEAD * concurrency:
                    yield await take()
            while pending:
                yield await take()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)


def _check(concurrency: int, errors: str) -> None:
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    if errors not in ("raise", "return"):
        raise ValueError(f"errors must be 'raise' or 'return', got {errors!r}")


@contextmanager
def _advancing(progress: Progress, inputs: Iterable[object]) -> Iterator[Callable[[], object]]:
    """What is to be called after each answer."""
    total = len(inputs) if isinstance(inputs, Sized) else None
    if progress is True:
        with _bar(total) as bar:
            yield bar.update
    elif progress is False:
        yield lambda: None
    else:
        counted = itertools.count(1)
        yield lambda: progress(next(counted), total)


def _bar(total: int | None) -> Any:
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise ValueError(
            "progress=True needs tqdm, which is not installed: install seqserve[progress], or give "
            "a function of (done, total)"
        ) from error
    return tqdm(total=total, unit=" answers")
