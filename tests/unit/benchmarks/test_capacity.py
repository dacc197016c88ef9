"""What is made of measurements: costs by least squares, the fewest replicas, tables on a page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.capacity import (
    Costs,
    Live,
    least_squares,
    p99,
    predicted,
    replicas_for,
)
from benchmarks.load import Figures
from benchmarks.simulation import Cluster, StepTime

SWIFT = Cluster(StepTime(base=0.004, row=0.0005, source=0.01), max_rows=32)
COSTS = Costs(0.004, 0.0005, 0.01, hit=0.0, elsewhere=0.002, idle=0.05)


def test_costs_are_found_in_sums_of_them() -> None:
    columns = [(10, 200, 3), (40, 50, 2), (5, 5, 60), (100, 900, 30)]
    sums = [4.0 * a + 0.5 * b + 2.0 * c for a, b, c in columns]
    assert least_squares(columns, sums) == pytest.approx([4.0, 0.5, 2.0])


def test_the_fewest_replicas_keep_the_limit_and_one_less_does_not() -> None:
    rate, limit = 120.0, 0.6
    replicas = replicas_for(SWIFT, rate, limit)
    assert replicas > 1
    one_less = replace(SWIFT, replicas=replicas - 1)
    assert p99(replace(SWIFT, replicas=replicas), rate) <= limit < p99(one_less, rate)


def test_half_of_a_core_makes_requests_wait_longer() -> None:
    figures = Figures(0.0, 0.0, 0.0, first=0.0, began=0.0)
    whole, half = (
        predicted(COSTS, Live(2, 10.0, 200, 1, [(0.0, share)], 0.0, figures))[0]
        for share in (1.0, 0.5)
    )
    assert half.p50 > 1.5 * whole.p50
    assert half.tokens_per_second <= whole.tokens_per_second
