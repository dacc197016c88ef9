"""The scheduler's laws, without a tensor."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import EngineConfig
from model.scheduler import Scheduler, take_alike
from model.sequence import Decoding, Forward, Sequence


def sequence(src: int, new: int = 10) -> Sequence:
    return Sequence([5] * src, [1], Decoding(new))


def scheduler(**limits: int) -> Scheduler:
    return Scheduler(EngineConfig(**limits))


def admit(waiting: Scheduler) -> tuple[Sequence, ...]:
    """Let sequences join, each as one row, as the engine does."""
    joining = waiting.schedule().joining
    waiting.rows.extend(joining)
    return joining


def alike(lengths: list[int], window: int, rows: int) -> tuple[list[int], list[int]]:
    """Take from a queue of distinct lengths -> what is taken, what remains."""
    queue = deque(lengths)
    taken = take_alike(queue, window, lambda n: n, lambda chunk: len(chunk) <= rows)
    return taken, list(queue)


class TestTakeAlike:
    def test_the_oldest_goes_first_with_those_of_like_length(self) -> None:
        assert alike([10, 50, 11, 49, 9], window=5, rows=3) == ([10, 11, 9], [50, 49])

    def test_only_the_window_behind_the_oldest_is_looked_at(self) -> None:
        assert alike([10, 50, 40, 11], window=3, rows=2) == ([10, 40], [50, 11])

    def test_the_oldest_runs_even_where_nothing_fits(self) -> None:
        assert alike([10, 11], window=2, rows=0) == ([10], [11])

    def test_an_empty_queue_gives_nothing(self) -> None:
        assert alike([], window=2, rows=2) == ([], [])


class TestAdmission:
    def test_rows_are_the_limit(self) -> None:
        waiting = scheduler(max_rows=2)
        for _ in range(3):
            waiting.submit(sequence(4))
        assert len(admit(waiting)) == 2
        assert admit(waiting) == ()
        waiting.rows.pop()
        assert len(admit(waiting)) == 1
        assert waiting.waiting == 0

    def test_padded_source_tokens_of_one_step_are_the_limit(self) -> None:
        waiting = scheduler(max_encoder_tokens=100)
        for _ in range(3):
            waiting.submit(sequence(40))
        assert [len(admit(waiting)) for _ in range(2)] == [2, 1]

    def test_a_source_over_the_encoder_budget_runs_alone(self) -> None:
        waiting = scheduler(max_encoder_tokens=100)
        waiting.submit(sequence(400))
        waiting.submit(sequence(400))
        assert [len(admit(waiting)) for _ in range(2)] == [1, 1]

    def test_cache_positions_are_counted_as_padded(self) -> None:
        waiting = scheduler(max_cache_tokens=100)
        short, long = sequence(9, new=10), sequence(39, new=10)  # reserve 20 and 50
        for work in (short, long):
            waiting.submit(work)
        assert admit(waiting) == (short, long)  # 2 x 50
        waiting.submit(sequence(4, new=5))
        assert admit(waiting) == ()  # 3 x 50
        waiting.rows.remove(long)
        assert len(admit(waiting)) == 1

    def test_what_can_never_fit_is_refused(self) -> None:
        with pytest.raises(ValueError, match="need 21 cache positions, the engine has 20"):
            scheduler(max_cache_tokens=20).submit(sequence(10))


class TestPasses:
    def test_a_chunk_is_cut_by_its_padded_tokens(self) -> None:
        waiting = scheduler(max_forward_tokens=20)
        for _ in range(3):
            waiting.submit(Forward([5] * 6, [1] * 4))
        assert [len(waiting.schedule().forwards) for _ in range(3)] == [2, 1, 0]

    def test_passes_do_not_wait_for_rows(self) -> None:
        waiting = scheduler(max_rows=1)
        waiting.submit(sequence(4))
        waiting.submit(sequence(4))
        admit(waiting)
        waiting.submit(Forward([5], [1]))
        assert len(waiting.schedule().forwards) == 1


def test_cancelled_work_never_runs() -> None:
    waiting = scheduler()
    kept, cancelled, gone = sequence(4), sequence(4), Forward([5], [1])
    for work in (kept, cancelled, gone):
        waiting.submit(work)
    waiting.cancel(cancelled)
    waiting.cancel(gone)
    waiting.cancel(sequence(4))  # unknown: no error
    assert waiting.waiting == 1
    plan = waiting.schedule()
    assert (plan.joining, plan.forwards) == ((kept,), ())


@settings(max_examples=150, deadline=None)
@given(
    arrivals=st.lists(
        st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=6), max_size=30
    ),
    leave=st.lists(st.integers(0, 5), min_size=30, max_size=30),
    rows=st.integers(1, 6),
    encoder=st.integers(1, 120),
    cache=st.integers(100, 400),
)
def test_limits_hold_the_oldest_goes_first_and_everything_runs_once(
    arrivals: list[list[tuple[int, int]]], leave: list[int], rows: int, encoder: int, cache: int
) -> None:
    waiting = scheduler(max_rows=rows, max_encoder_tokens=encoder, max_cache_tokens=cache)
    submitted: list[Sequence] = []
    ran: list[Sequence] = []
    for step in range(300):
        for src, new in arrivals[step] if step < len(arrivals) else []:
            submitted.append(sequence(src, new))
            waiting.submit(submitted[-1])
        oldest = next((s for s in submitted if s not in ran), None)
        joining = admit(waiting)
        ran.extend(joining)
        if joining:
            assert joining[0] is oldest
            padded = len(joining) * max(len(s.src) for s in joining)
            assert len(joining) == 1 or padded <= encoder
            assert len(waiting.rows) * max(s.reserved_tokens for s in waiting.rows) <= cache
            assert len(waiting.rows) <= rows
        elif oldest is not None:
            assert waiting.rows, "an idle engine admits"
        del waiting.rows[: max(1, leave[step % 30])]
    assert len(ran) == len(submitted) == len(set(map(id, ran)))
