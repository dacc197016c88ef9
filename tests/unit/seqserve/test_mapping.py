"""Many calls, some at a time: order, bounds, errors, progress, for threads and for tasks."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from seqserve import AsyncClient, Client
from seqserve.errors import InvalidRequestError, SeqserveError


class Crowd:
    """Calls that wait for each other: each until `size` of them run."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.running = 0
        self.most = 0
        self.full = threading.Condition()

    def call(self, each: int) -> int:
        with self.full:
            self.running += 1
            self.most = max(self.most, self.running)
            self.full.notify_all()
            self.full.wait_for(lambda: self.most >= self.size, timeout=30)
            self.running -= 1
        return 10 * each


def failing_at_3(each: int) -> int:
    if each == 3:
        raise InvalidRequestError("three", "inputs")
    return each


@pytest.fixture
def client() -> Iterator[Client]:
    with Client() as client:
        yield client


def in_tasks(function: Callable[[Any], Any], inputs: Iterable[Any], **options: Any) -> list[Any]:
    """`AsyncClient.map` to its end, of a function that need not be awaited."""

    async def later(each: Any) -> Any:
        await asyncio.sleep(0)
        return function(each)

    async def run() -> list[Any]:
        async with AsyncClient() as client:
            return [answer async for answer in client.map(later, inputs, **options)]

    return asyncio.run(run())


def in_threads(function: Callable[[Any], Any], inputs: Iterable[Any], **options: Any) -> list[Any]:
    with Client() as client:
        return list(client.map(function, inputs, **options))


both = pytest.mark.parametrize("run", [in_threads, in_tasks])
Run = Callable[..., list[Any]]


@both
def test_answers_come_in_the_order_of_the_inputs(run: Run) -> None:
    assert run(str, range(50), concurrency=4) == [str(i) for i in range(50)]
    assert run(str, []) == []


def test_as_many_calls_run_as_may_and_no_more(client: Client) -> None:
    crowd = Crowd(5)
    assert list(client.map(crowd.call, range(30), concurrency=5)) == [10 * i for i in range(30)]
    assert crowd.most == 5


def test_as_many_tasks_run_as_may_and_no_more() -> None:
    running = most = 0

    async def call(each: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return each

    async def run() -> list[int]:
        async with AsyncClient() as client:
            return [answer async for answer in client.map(call, range(30), concurrency=5)]

    assert asyncio.run(run()) == list(range(30))
    assert most == 5


def test_a_slow_call_does_not_keep_the_others_from_going_on(client: Client) -> None:
    later = threading.Event()

    def call(each: int) -> int:
        if each == 0:
            assert later.wait(30)  # until the last but one that may be taken beside it has run
        elif each == 3:
            later.set()
        return each

    assert list(client.map(call, range(8), concurrency=2)) == list(range(8))


@both
def test_inputs_are_taken_as_they_are_needed(run: Run) -> None:
    taken: list[int] = []
    behind: list[int] = []

    def inputs() -> Iterator[int]:
        for i in range(40):
            taken.append(i)
            yield i

    run(str, inputs(), concurrency=3, progress=lambda done, _: behind.append(len(taken) - done))
    assert len(taken) == 40
    assert max(behind) <= 6


@both
def test_an_error_is_raised_in_its_place(run: Run) -> None:
    seen: list[int] = []
    with pytest.raises(InvalidRequestError, match="three"):
        run(failing_at_3, range(10), progress=lambda done, _: seen.append(done))
    assert seen == [1, 2, 3, 4]


@both
def test_or_it_is_returned_there(run: Run) -> None:
    answers = run(failing_at_3, range(5), errors="return")
    assert answers[:3] + answers[4:] == [0, 1, 2, 4]
    assert isinstance(answers[3], SeqserveError)
    assert answers[3].param == "inputs"


@both
def test_a_mistake_of_the_caller_is_no_answer(run: Run) -> None:
    with pytest.raises(ZeroDivisionError):
        run(lambda each: 1 // each, [1, 0], errors="return")


@both
def test_progress_is_told_with_the_total_where_there_is_one(run: Run) -> None:
    seen: list[tuple[int, int | None]] = []
    run(str, [1, 2, 3], progress=lambda *counts: seen.append(counts))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    seen.clear()
    run(str, iter([1, 2]), progress=lambda *counts: seen.append(counts))
    assert seen == [(1, None), (2, None)]


@both
def test_a_bar_can_be_drawn(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run(str, range(7), progress=True)
    assert "7/7" in capsys.readouterr().err


@both
def test_a_bar_needs_tqdm(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ValueError, match=r"install seqserve\[progress\]"):
        run(str, range(7), progress=True)


@both
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency must be at least 1, got 0"),
        ({"errors": "ignore"}, "errors must be 'raise' or 'return', got 'ignore'"),
    ],
)
def test_what_is_out_of_range_is_refused(run: Run, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(str, range(7), **options)


def test_closing_calls_no_more(client: Client) -> None:
    called: list[int] = []
    answers: Generator[None, None, None] = client.map(called.append, range(1000), concurrency=2)
    next(answers)
    answers.close()
    assert len(called) <= 5


def test_closing_cancels_the_tasks_that_run() -> None:
    cancelled: list[int] = []

    async def call(each: int) -> int:
        if each:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(each)
                raise
        return each

    async def run() -> None:
        async with AsyncClient() as client:
            answers: AsyncGenerator[int, None] = client.map(call, range(100), concurrency=2)
            async with aclosing(answers):
                assert await anext(answers) == 0
                await asyncio.sleep(0)

    asyncio.run(run())
    assert cancelled == [1, 2]
