"""A bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from model.evaluation import Evaluation
from model.training import Progress
from service.training_progress import show_progress

STATES = [
    Progress(1, 1200, 0, 3.5, 1234.0),
    Progress(2, 1200, 0, 3.25, 1234.0),
    Progress(2, 1200, 0, 3.25, 1234.0, Evaluation(1, 50, 0.5, 0.125, 0.25)),
    Progress(1200, 1200, 9, 0.5, 1234.0),
]


@pytest.mark.parametrize("terminal", [True, False])
def test_step_loss_speed_and_error_rates_are_shown(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, highlight=False)
    with show_progress(console) as report:
        for state in STATES:
            report(state)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "step 1,200/1,200" in text
    assert "loss 0.500" in text
    assert "1,234 pairs/s" in text
    assert "after epoch 1: dev error rate 50.00%, token error rate 12.50% (50 sources)" in text
    if not terminal:
        assert "\x1b" not in text
        assert len(text.splitlines()) == 3  # steps that come at once share a line
