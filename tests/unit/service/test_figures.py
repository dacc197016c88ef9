"""Counts of an engine's steps."""

from __future__ import annotations

from model.engine import Padding, StepTrace
from service.figures import StepFigures, Tally
from tests.fake_engine import row


def test_a_tally_counts_values_up_to_each_bound() -> None:
    tally = Tally([1, 2, 5])
    for value in (0.5, 1, 1.5, 5, 7):
        tally.add(value)
    tally.add(2, times=3)
    assert tally.cumulative() == [2, 6, 7, 8]
    assert tally.total == 21


def test_a_step_is_counted_with_what_it_did() -> None:
    figures = StepFigures(max_rows=4)
    rows = (row(), row())
    figures.record(
        StepTrace(
            0,
            rows,
            rows,
            (),
            3,
            Padding(6, 8),
            Padding(2, 2),
            0.02,
            {"decode": 0.01, "sample": 0.005},
            guessed=5,
            foretold=4,
        )
    )
    assert figures.rows_per_step == [0, 0, 1, 0, 0]
    assert figures.forward_passes == 3
    assert (figures.guessed_tokens, figures.foretold_tokens) == (5, 4)
    assert figures.step_seconds.total == 0.02
    assert figures.phase_seconds["decode"].total == 0.01
    assert sum(figures.phase_seconds["encode"].counts) == 0
    assert figures.padding["source"].total == 0.25
    assert figures.padding["target"].counts[0] == 1


def test_a_step_without_rows_has_no_padding() -> None:
    figures = StepFigures(max_rows=4)
    figures.record(StepTrace(0, (), (), (), 1))
    assert sum(figures.padding["source"].counts) == 0
    assert sum(figures.padding["target"].counts) == 0
