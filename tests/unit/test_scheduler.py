"""The scheduler's laws, without a tensor."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import EngineConfig
from model.scheduler import Scheduler, TurnQueue, take
from model.sequence import Decoding, Forward, Sequence


def sequence(src: int, new: int = 10, request: int = 0) -> Sequence:
    return Sequence([5] * src, [1], Decoding(new), request=request)


def scheduler(**limits: int) -> Scheduler:
    return Scheduler(EngineConfig(**limits))


def admit(waiting: Scheduler) -> tuple[Sequence, ...]:
    """Let sequences join, each as one row, as the engine does."""
    joining = waiting.schedule().joining
    waiting.rows.extend(joining)
    return joining


def alike(lengths: list[int], window: int, room: int) -> tuple[list[int], list[int]]:
    """Take those nearest to the first, of distinct lengths -> what is taken, what remains."""
    queue: TurnQueue[Sequence] = TurnQueue()
    for length in lengths:
        queue.append(sequence(length))

    def fits(chunk: list[Sequence]) -> bool:
        return sum(len(work.src) for work in chunk) <= room

    taken = take(queue, window, lambda one, other: abs(len(one.src) - len(other.src)), fits)
    return [len(work.src) for work in taken], [len(work.src) for work in queue]


class TestTake:
    def test_the_oldest_goes_first_and_the_others_by_preference(self) -> None:
        assert alike([10, 50, 11, 49, 9], window=5, room=30) == ([10, 11, 9], [50, 49])

    def test_only_the_window_behind_the_oldest_is_looked_at(self) -> None:
        assert alike([10, 50, 40, 11], window=3, room=50) == ([10, 40], [50, 11])

    def test_nobody_overtakes_one_that_does_not_fit(self) -> None:
        assert alike([40, 30, 20, 5], window=4, room=66) == ([40], [30, 20, 5])

    def test_the_oldest_runs_even_where_nothing_fits(self) -> None:
        assert alike([10, 11], window=2, room=0) == ([10], [11])

    def test_an_empty_queue_gives_nothing(self) -> None:
        assert alike([], window=2, room=2) == ([], [])


def waiting_in(queue: TurnQueue[Sequence]) -> list[tuple[int, int]]:
    """Request and source length of each, in order."""
    return [(work.request, len(work.src)) for work in queue]


class TestTurns:
    def test_requests_take_turns_and_keep_their_own_order(self) -> None:
        queue: TurnQueue[Sequence] = TurnQueue()
        for request, length in [(1, 1), (1, 2), (1, 3), (2, 4), (3, 5), (3, 6)]:
            queue.append(sequence(length, request=request))
        assert waiting_in(queue) == [(1, 1), (2, 4), (3, 5), (1, 2), (3, 6), (1, 3)]
        assert len(queue) == 6

    def test_the_turn_passes_from_whom_was_taken_first(self) -> None:
        queue: TurnQueue[Sequence] = TurnQueue()
        works = [sequence(1, request=1), sequence(2, request=1), sequence(3, request=2)]
        for work in works:
            queue.append(work)
        queue.take(works[:1])
        assert queue.first is works[2]
        assert waiting_in(queue) == [(2, 3), (1, 2)]

    def test_what_is_put_back_comes_before_everything(self) -> None:
        queue: TurnQueue[Sequence] = TurnQueue()
        queue.append(sequence(1, request=1))
        queue.append(sequence(2, request=2))
        queue.put_back([sequence(7, request=2), sequence(8, request=3), sequence(9, request=2)])
        assert waiting_in(queue) == [(2, 7), (3, 8), (1, 1), (2, 9), (2, 2)]
        assert len(queue) == 5

    def test_removing_is_never_an_error_and_leaves_no_empty_line(self) -> None:
        queue: TurnQueue[Sequence] = TurnQueue()
        only = sequence(1, request=1)
        queue.append(only)
        for work in (sequence(1, request=1), sequence(1, request=9), only, only):
            queue.remove(work)
        assert (len(queue), list(queue)) == (0, [])

    def test_a_request_for_one_begins_behind_one_for_a_thousand(self) -> None:
        waiting = scheduler(max_rows=8)
        for length in range(1000):
            waiting.submit(sequence(1 + length % 50, request=1))
        admit(waiting)
        single = sequence(400, request=2)  # like nothing else that waits
        waiting.submit(single)
        admissions = 0
        while single not in waiting.rows:
            waiting.rows.pop(0)
            admissions += bool(admit(waiting))
        assert admissions <= 2  # one turn for each request that waits

    def test_passes_take_turns_too(self) -> None:
        waiting = scheduler(max_forward_tokens=4)
        for _ in range(100):
            waiting.submit(Forward([5, 5], [1], request=1))
        single = Forward([5, 5], [1], request=2)
        waiting.submit(single)
        assert single in [*waiting.schedule().forwards, *waiting.schedule().forwards]


class TestShortMemory:
    def test_what_is_put_back_goes_first_and_fewer_rows_live(self) -> None:
        waiting = scheduler(max_rows=4)
        works = [sequence(4) for _ in range(6)]
        for work in works:
            waiting.submit(work)
        admit(waiting)
        waiting.rows.clear()
        waiting.put_back(works[:4], row_limit=2)
        assert admit(waiting) == tuple(works[:2])
        assert admit(waiting) == ()

    def test_the_limit_rises_with_every_row_that_leaves(self) -> None:
        waiting = scheduler(max_rows=4)
        waiting.put_back([sequence(4) for _ in range(6)], row_limit=1)
        widths = []
        while waiting.has_work:
            admit(waiting)
            widths.append(len(waiting.rows))
            waiting.rows.pop()
            waiting.left(1)
        assert widths == [1, 2, 3, 3, 2, 1]
        assert waiting.row_limit == 4

    def test_a_limit_below_a_search_s_beams_lets_it_run_alone(self) -> None:
        waiting = scheduler(max_rows=8)
        wide = Sequence([5], [1], Decoding(3, num_beams=5))
        other = Sequence([5], [1], Decoding(3))
        waiting.put_back([wide, other], row_limit=2)
        assert waiting.schedule().joining == (wide,)


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

    def test_beside_the_oldest_the_longest_join_first(self) -> None:
        waiting = scheduler(max_rows=3)
        works = [sequence(4, new=new) for new in (5, 7, 30, 20, 6)]
        for work in works:
            waiting.submit(work)
        assert admit(waiting) == (works[0], works[2], works[3])
        waiting.rows.clear()
        assert admit(waiting) == (works[1], works[4])

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
        with pytest.raises(ValueError, match="need 21 cache positions, at most 20 "):
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
        st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 4)), max_size=6),
        max_size=30,
    ),
    leave=st.lists(st.integers(0, 5), min_size=30, max_size=30),
    rows=st.integers(1, 6),
    encoder=st.integers(1, 120),
    cache=st.integers(100, 400),
)
def test_limits_hold_requests_take_turns_and_everything_runs_once(
    arrivals: list[list[tuple[int, int, int]]],
    leave: list[int],
    rows: int,
    encoder: int,
    cache: int,
) -> None:
    waiting = scheduler(max_rows=rows, max_encoder_tokens=encoder, max_cache_tokens=cache)
    submitted: list[Sequence] = []
    ran: list[Sequence] = []
    turns_missed = dict.fromkeys(range(1, 5), 0)
    for step in range(300):
        for src, new, request in arrivals[step] if step < len(arrivals) else []:
            submitted.append(sequence(src, new, request))
            waiting.submit(submitted[-1])
        waited = [s for s in submitted if s not in ran]
        joining = admit(waiting)
        ran.extend(joining)
        if joining:
            first = joining[0]
            assert first is next(s for s in waited if s.request == first.request)
            asking = {s.request for s in waited}
            for request in turns_missed:
                skipped = request in asking and request not in {s.request for s in joining}
                turns_missed[request] = turns_missed[request] + 1 if skipped else 0
                assert turns_missed[request] < 4, "every request has its turn"
            padded = len(joining) * max(len(s.src) for s in joining)
            assert len(joining) == 1 or padded <= encoder
            assert len(waiting.rows) * max(s.reserved_tokens for s in waiting.rows) <= cache
            assert len(waiting.rows) <= rows
        elif waited:
            assert waiting.rows, "an idle engine admits"
        del waiting.rows[: max(1, leave[step % 30])]
    assert len(ran) == len(submitted) == len(set(map(id, ran)))


def test_the_next_ones_are_those_whose_turn_comes_next_within_their_tokens() -> None:
    waiting = scheduler(max_rows=1)
    for length, request in ((5, 0), (6, 0), (7, 1), (8, 2)):
        waiting.submit(sequence(length, request=request))
    admit(waiting)
    assert [len(each.src) for each in waiting.next_ones(21)] == [7, 8, 6]
    assert [len(each.src) for each in waiting.next_ones(20)] == [7, 8]
    assert waiting.next_ones(6) == []
    assert waiting.waiting == 3, "they go on waiting"
