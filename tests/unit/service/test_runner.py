"""The runner against an engine without tensors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

import service.runner
from model.sequence import Event, FailureEvent, TokenEvent
from seqserve.errors import (
    DeadlineError,
    GenerationFailedError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from service.admission import Admission
from service.figures import StepFigures
from service.rates import RestartBudget
from service.runner import Runner, work_of
from tests.fake_engine import FakeEngine, row

pytestmark = pytest.mark.anyio

SOON = 5.0


@asynccontextmanager
async def running(
    *engines: FakeEngine, max_queue: int = 100, on_end: Callable[[str], None] = print
) -> AsyncIterator[Runner]:
    """A runner of the first engine, which the others replace one by one."""
    made = iter(engines)
    runner = Runner(
        lambda: next(made),
        Admission(max_queue, max_tokens=1_000_000),
        "fake",
        RestartBudget(len(engines) - 1),
        on_end,
    )
    await runner.start()
    try:
        yield runner
    finally:
        for engine in engines:
            engine.gate.set()
        await runner.stop()


async def until_it_steps(engine: FakeEngine) -> None:
    """Wait for the engine thread to begin a step."""
    await asyncio.to_thread(engine.stepped.wait, SOON)


def tokens(events: list[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenEvent)]


async def test_a_request_gets_all_its_events_in_order() -> None:
    async with running(FakeEngine()) as runner, runner.submitted([row(tokens=4)], SOON) as ticket:
        assert tokens(await ticket.result()) == [1, 2, 3, 4]
        assert ticket.began is not None
        assert ticket.ended is not None
        assert ticket.submitted <= ticket.ended
    assert runner.outstanding == 0


async def test_works_of_one_request_share_steps_and_keep_apart() -> None:
    engine = FakeEngine()
    works = [row(tokens=2), row(tokens=5), row(tokens=1)]
    async with running(engine) as runner, runner.submitted(works, SOON) as ticket:
        events = await ticket.result()
    for work in works:
        mine = [e for e in events if work_of(e) is work]
        assert tokens(mine) == list(range(1, work.decoding.max_new_tokens + 1))
    assert engine.rows_by_step[0] == 3


async def test_only_the_engine_thread_calls_the_engine() -> None:
    engine = FakeEngine()
    async with running(engine) as runner, runner.submitted([row()], SOON) as ticket:
        await ticket.result()
    assert engine.threads == {"engine-fake"}


async def test_steps_arrive_one_by_one_for_a_request_that_forwards_them() -> None:
    async with running(FakeEngine()) as runner, runner.submitted([row(tokens=3)], SOON) as ticket:
        seen = [tokens(events) async for events in ticket.steps()]
    assert [token for step in seen for token in step] == [1, 2, 3]


async def test_a_whole_answer_wakes_its_request_once() -> None:
    async with running(FakeEngine()) as runner, runner.submitted([row(tokens=50)], SOON) as ticket:
        wakes = 0
        wait = ticket._wait

        async def counted(eager: bool) -> None:
            nonlocal wakes
            await wait(eager)
            wakes += 1

        ticket._wait = counted  # type: ignore[method-assign]
        await ticket.result()
    assert wakes == 1


async def test_many_works_are_all_freed_within_a_step() -> None:
    engine = FakeEngine()
    works = [row(tokens=500) for _ in range(1000)]
    async with running(engine, max_queue=1000) as runner:
        with engine.held_up():
            async with runner.submitted(works, SOON):
                await until_it_steps(engine)
            assert runner.outstanding == 0
            steps = len(engine.rows_by_step)
        async with runner.submitted([row(tokens=1)], SOON) as after:
            await after.result()
    assert len(engine.rows_by_step) == steps + 2  # the one it was in, and that of the next request
    assert set(engine.cancelled) == set(works)


async def test_works_tell_the_engine_whose_they_are() -> None:
    first, second, third = row(tokens=1), row(tokens=1), row(tokens=1)
    async with (
        running(FakeEngine()) as runner,
        runner.submitted([first, second], SOON),
        runner.submitted([third], SOON),
    ):
        pass
    assert first.request == second.request != third.request


async def test_a_request_without_works_is_done_at_once() -> None:
    async with running(FakeEngine()) as runner, runner.submitted([], SOON) as ticket:
        assert await ticket.result() == []


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    engine = FakeEngine()
    async with running(engine, max_queue=3) as runner:
        with engine.held_up():
            async with runner.submitted([row(), row()], SOON) as ticket:
                with pytest.raises(OverloadedError, match="2 of 3") as refused:
                    async with runner.submitted([row(), row()], SOON):
                        pass
                assert refused.value.retry_after
                assert refused.value.status == 429
                async with runner.submitted([row()], SOON) as fits:
                    engine.gate.set()
                    await fits.result()
                await ticket.result()
        async with runner.submitted([row(), row(), row()], SOON) as again:
            await again.result()


async def test_a_passed_deadline_frees_the_row_and_leaves_others_alone() -> None:
    engine = FakeEngine()
    slow, other = row(tokens=500), row(tokens=3)
    async with running(engine) as runner:
        with engine.held_up():
            async with runner.submitted([other], SOON) as kept:
                with pytest.raises(DeadlineError, match=r"0\.05 seconds"):
                    async with runner.submitted([slow], 0.05) as ticket:
                        await ticket.result()
                engine.gate.set()
                assert tokens(await kept.result()) == [1, 2, 3]
        assert runner.outstanding == 0
        async with runner.submitted([row()], SOON) as after:
            await after.result()
    assert engine.cancelled == [slow]


async def test_leaving_early_cancels_what_is_unfinished() -> None:
    engine = FakeEngine()
    engine.steps_until_held = 1
    long, short = row(tokens=500), row(tokens=1)
    async with running(engine) as runner:
        async with runner.submitted([long, short], SOON) as ticket:
            async for events in ticket.steps():
                if any(work_of(event) is short for event in events):
                    break
        engine.gate.set()
        async with runner.submitted([row()], SOON) as after:
            await after.result()
        assert runner.running == 0
    assert engine.cancelled == [long]


async def test_one_bad_row_fails_its_request_only() -> None:
    engine = FakeEngine()
    engine.poison = {13}
    async with running(engine) as runner, runner.submitted([row(tokens=4)], SOON) as good:
        async with runner.submitted([row(src=13), row(tokens=500)], SOON) as bad:
            with pytest.raises(GenerationFailedError, match="not finite"):
                await bad.result()
        assert tokens(await good.result()) == [1, 2, 3, 4]


async def test_work_that_can_never_fit_is_refused_and_the_next_runs() -> None:
    async with running(FakeEngine()) as runner:
        async with runner.submitted([row(tokens=5000)], SOON) as ticket:
            with pytest.raises(InvalidRequestError, match="5002 cache positions"):
                await ticket.result()
        async with runner.submitted([row()], SOON) as after:
            assert tokens(await after.result()) == [1, 2, 3]


async def test_an_engine_that_breaks_fails_everything_and_takes_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine()
    ends: list[str] = []
    async with running(engine, on_end=ends.append) as runner:
        engine.gate.clear()
        async with (
            runner.submitted([row()], SOON) as first,
            runner.submitted([row(), row()], SOON) as second,
        ):
            await until_it_steps(engine)
            engine.explode = RuntimeError("device lost")
            engine.gate.set()
            for ticket in (first, second):
                with pytest.raises(GenerationFailedError):
                    await ticket.result()
        assert not runner.ready
        assert (runner.outstanding, runner.admission.tokens.taken) == (0, 0)
        with pytest.raises(UnavailableError, match="has failed"):
            async with runner.submitted([row()], SOON):
                pass
    assert "engine of model fake failed: RuntimeError in " in caplog.text
    assert ends == ["the engine of model fake has failed"]


async def until_ready(runner: Runner) -> None:
    """Wait for an engine."""
    async with asyncio.timeout(SOON):
        while not runner.ready:  # noqa: ASYNC110 - as a probe does
            await asyncio.sleep(0.001)


async def test_an_engine_that_breaks_is_replaced_and_the_next_request_runs() -> None:
    broken, whole = FakeEngine(), FakeEngine()
    async with running(broken, whole) as runner:
        broken.explode = RuntimeError("device lost")
        async with runner.submitted([row(), row()], SOON) as ticket:
            with pytest.raises(GenerationFailedError, match="while it ran this request"):
                await ticket.result()
        await until_ready(runner)
        async with runner.submitted([row()], SOON) as after:
            assert tokens(await after.result()) == [1, 2, 3]
    assert runner.restarts == 1
    assert len(whole.submitted) == 1, "nothing old reaches the new engine"


async def test_restarts_are_bounded() -> None:
    engines = [FakeEngine() for _ in range(3)]
    ends: list[str] = []
    async with running(*engines, on_end=ends.append) as runner:
        for engine in engines:
            await until_ready(runner)
            assert not ends
            engine.explode = RuntimeError("device lost")
            async with runner.submitted([row()], SOON) as ticket:
                with pytest.raises(GenerationFailedError):
                    await ticket.result()
        assert runner.broken
    assert ends == ["the engine of model fake has failed after 2 restarts"]


async def test_an_engine_that_cannot_be_made_again_is_the_end() -> None:
    ends: list[str] = []
    making = iter([FakeEngine()])

    def make() -> FakeEngine:
        for engine in making:
            engine.explode = RuntimeError("device lost")
            return engine
        raise RuntimeError("still lost")

    admission = Admission(10, 1000)
    runner = Runner(make, admission, "fake", RestartBudget(2), ends.append)
    await runner.start()
    async with runner.submitted([row()], SOON) as ticket:
        with pytest.raises(GenerationFailedError):
            await ticket.result()
    async with asyncio.timeout(SOON):
        while not ends:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert ends == ["the engine of model fake has failed after 2 restarts"]
    await runner.stop()


async def test_an_engine_that_cannot_be_made_at_first_is_the_starter_s_to_hear_of() -> None:
    def make() -> FakeEngine:
        raise MemoryError

    runner = Runner(make, Admission(10, 1000), "fake", RestartBudget(2), print)
    with pytest.raises(MemoryError):
        await runner.start()
    assert not runner.ready


async def test_words_that_were_not_meant_for_callers_are_told_nowhere(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sick = FakeEngine(), row()
    event = FailureEvent(sick, IndexError("/home/me: index out of range"))
    monkeypatch.setattr(engine, "_advance", lambda _: engine._rows.clear() or event)
    async with running(engine) as runner, runner.submitted([sick], SOON) as ticket:
        with pytest.raises(GenerationFailedError) as failed:
            await ticket.result()
    assert "/home" not in str(failed.value)
    assert "model fake failed on an input: IndexError in " in caplog.text
    assert "/home" not in caplog.text


async def test_draining_finishes_what_runs_and_refuses_the_rest() -> None:
    engine = FakeEngine()
    async with running(engine) as runner, runner.submitted([row(tokens=20)], SOON) as ticket:
        drained = asyncio.create_task(runner.drain(SOON))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="shutting down"):
            async with runner.submitted([row()], SOON):
                pass
        assert len(await ticket.result()) == 20
        assert await drained


async def test_draining_gives_up_after_the_grace_period() -> None:
    engine = FakeEngine()
    async with running(engine) as runner:
        with engine.held_up():
            async with runner.submitted([row()], SOON) as ticket:
                assert not await runner.drain(0.05)
                engine.gate.set()
                await runner.stop()
                with pytest.raises(UnavailableError):
                    await ticket.result()


async def test_an_idle_engine_thread_sleeps_and_wakes() -> None:
    engine = FakeEngine()
    async with running(engine) as runner:
        for _ in range(3):
            async with runner.submitted([row(tokens=2)], SOON) as ticket:
                await ticket.result()
            steps = len(engine.rows_by_step)
            await asyncio.sleep(0.02)
            assert len(engine.rows_by_step) == steps


async def test_many_requests_at_once_each_get_exactly_their_own_answer() -> None:
    engine = FakeEngine(max_rows=8)
    async with running(engine, max_queue=1000) as runner:

        async def one(length: int) -> list[int]:
            async with runner.submitted([row(tokens=length)], SOON) as ticket:
                return tokens(await ticket.result())

        lengths = [1 + i % 7 for i in range(300)]
        with engine.held_up():
            asked = [asyncio.create_task(one(length)) for length in lengths]
            while runner.outstanding < len(lengths):  # noqa: ASYNC110 - each turn admits some
                await asyncio.sleep(0)
        answers = await asyncio.gather(*asked)
    assert answers == [list(range(1, length + 1)) for length in lengths]
    assert max(engine.rows_by_step) == 8


async def test_figures_count_rows_of_every_step() -> None:
    figures = StepFigures(max_rows=4)
    engine = FakeEngine(max_rows=4, on_step=figures.record)
    works = [row(tokens=2), row(tokens=1)]
    async with running(engine) as runner, runner.submitted(works, SOON) as ticket:
        await ticket.result()
    assert figures.rows_per_step == [0, 1, 1, 0, 0]


async def test_an_engine_that_hangs_in_a_step_does_not_hold_the_end_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service.runner, "LAST_STEP_SECONDS", 0.05)
    engine = FakeEngine()
    async with running(engine) as runner, runner.submitted([row()], SOON) as ticket:
        with engine.held_up():
            await until_it_steps(engine)
            await asyncio.wait_for(runner.stop(), SOON)
            assert "engine of model fake hangs in a step" in caplog.text
            with pytest.raises(UnavailableError):
                await ticket.result()


async def test_the_queue_is_left_when_a_row_lives_even_if_there_is_nothing_to_tell_yet() -> None:
    engine = FakeEngine()
    engine.mute = True
    async with running(engine) as runner, runner.submitted([row()], SOON) as ticket:
        await until_it_steps(engine)
        while ticket.began is None:  # noqa: ASYNC110 - the event loop hears of it in a moment
            await asyncio.sleep(0.001)
        assert runner.oldest_waiting == 0.0
        assert ticket.first_token is None
        engine.mute = False
        assert tokens(await ticket.result()) == [1, 2, 3]


async def test_time_that_has_passed_before_counts_towards_the_deadline() -> None:
    long_ago = time.perf_counter() - 2.0
    engine = FakeEngine()
    async with running(engine) as runner:
        with pytest.raises(DeadlineError, match=r"1.5 seconds"):
            async with runner.submitted([row()], 1.5, since=long_ago):
                pass
        assert engine.submitted == []
        async with runner.submitted([row()], 2.0 + SOON, since=long_ago) as ticket:
            await ticket.result()


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
async def test_what_an_engine_says_when_it_fails_is_logged_at_debug_alone(
    level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(level)
    broken = FakeEngine()
    broken.explode = KeyError("a caller's text")
    async with running(broken, FakeEngine()) as runner, runner.submitted([row()], SOON) as ticket:
        with pytest.raises(GenerationFailedError):
            await ticket.result()
    assert "engine of model fake failed: KeyError in tests.fake_engine.step:" in caplog.text
    assert ("a caller's text" in caplog.text) == (level == "DEBUG")
