"""Tables go between their marks, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pages import write_between

BEGIN, END = "<!-- begin -->", "<!-- end -->"


def test_tables_take_the_place_of_the_old_ones(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for text in ("new", "newer"):
        write_between(page, BEGIN, END, text)
    assert page.read_text() == f"before\n{BEGIN}\nnewer\n{END}\nafter\n"


@pytest.mark.parametrize("text", ["", BEGIN, END, END + BEGIN, f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_page_without_one_place_stays_as_it_is(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="no place for the figures"):
        write_between(page, BEGIN, END, "new")
    assert page.read_text() == text
