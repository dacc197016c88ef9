"""Rates, at times that a test decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.rates import LONGEST, WINDOW, FinishRate, RestartBudget


def rate(*finished: tuple[float, float]) -> FinishRate:
    """A rate told of amounts at times."""
    measured = FinishRate()
    for now, amount in finished:
        measured.record(amount, now)
    return measured


def test_the_time_follows_from_the_rate() -> None:
    measured = rate(*((second, 2.0) for second in range(10)))  # 18 in the 9 seconds after the first
    assert measured.seconds_until(10, now=9.0) == 5
    assert measured.seconds_until(11, now=9.0) == 6


def test_a_stall_makes_it_longer() -> None:
    measured = rate((0.0, 1.0), (1.0, 1.0))
    assert measured.seconds_until(4, now=1.0) == 4
    assert measured.seconds_until(4, now=3.0) == 12


def test_what_is_long_past_says_nothing() -> None:
    measured = rate((0.0, 1000.0), (1.0, 1000.0), (20.0, 1.0), (21.0, 1.0))
    assert measured.seconds_until(5, now=21.0) == 5


@pytest.mark.parametrize("measured", [rate(), rate((0.0, 5.0))])
def test_without_a_measurement_it_is_the_window(measured: FinishRate) -> None:
    assert measured.seconds_until(1, now=1.0) == WINDOW


@given(
    finished=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 100))),
    amount=st.integers(1, 10**9),
)
def test_it_is_always_whole_seconds_within_bounds(
    finished: list[tuple[float, int]], amount: int
) -> None:
    now, measured = 0.0, FinishRate()
    for pause, size in finished:
        now += pause
        measured.record(size, now)
    assert 1 <= measured.seconds_until(amount, now) <= LONGEST


def test_restarts_are_bounded_within_a_time_and_allowed_again_after_it() -> None:
    budget = RestartBudget(2, seconds=10.0)
    assert [budget.take(now) for now in (0.0, 1.0, 2.0, 9.9)] == [True, True, False, False]
    assert [budget.take(now) for now in (10.0, 10.5, 11.0)] == [True, False, True]


def test_a_budget_of_none_allows_none() -> None:
    assert not RestartBudget(0).take(0.0)
