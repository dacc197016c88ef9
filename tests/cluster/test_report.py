"""What counts as a broken promise, and the table; the faults themselves are `make test-cluster`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.pages import write_between
from tests.cluster.report import BEGIN, END, Episode, as_markdown

GOOD = Episode("a node is killed", [0.1, 0.2], Counter({"503 unavailable": 3}), recovered=4.4)


def test_errors_that_retries_help_break_no_promise() -> None:
    assert not GOOD.broken


@pytest.mark.parametrize(
    "episode",
    [
        Episode("a"),
        Episode("a", [0.1], lost=["timed out"]),
        Episode("a", [0.1], wrong=1),
        replace(GOOD, harmless=True),
    ],
)
def test_lost_and_wrong_answers_do_and_no_request_at_all_and_errors_for_no_reason(
    episode: Episode,
) -> None:
    assert episode.broken


def test_the_table_goes_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_between(page, BEGIN, END, as_markdown([GOOD]))
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n| what happens")
    assert (
        "| a node is killed | 2 | 3 × `503 unavailable` | none | 150 / 199 / 200 ms | 4 s |" in text
    )
    assert text.endswith(f"{END}\nafter\n")


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text")
    with pytest.raises(ValueError, match="no place for the figures"):
        write_between(page, BEGIN, END, "table")
