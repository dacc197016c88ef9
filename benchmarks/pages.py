"""Figures in pages: programs that measure write their tables between two marks."""

from __future__ import annotations

from pathlib import Path


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two marks, each of which is there once.

    Raises:
        ValueError: the page does not have them so.
    """
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, also, after = rest.partition(end)
    if not found or not also or begin in after or end in after:
        raise ValueError(f"{page} has no place for the figures: {begin} ... {end}, once")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
