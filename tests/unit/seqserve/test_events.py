"""Server-sent events, cut anywhere."""

from __future__ import annotations

import random

import pytest

from seqserve.events import EventReader


def read(*pieces: bytes) -> list[str]:
    reader = EventReader()
    return [data for piece in pieces for data in reader.push(piece)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", ["a"]),
        (b"data:a\n\ndata:  b\n\n", ["a", " b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        (b"data: a\r\rdata: b\r\r", ["a", "b"]),
        (b"data: a\ndata: b\ndata\ndata:\n\n", ["a\nb\n\n"]),
        (b": a comment\n\n:\n\ndata: a\n: inside\n\n", ["a"]),
        (b"event: token\nid: 7\nretry: 5\ndata: a\n\nevent: ping\n\n", ["a"]),
        (b"database: x\n\n", []),
        (b"\xef\xbb\xbfdata: a\n\n", ["a"]),
        (b"\n\n\ndata: a\n\n\n\n", ["a"]),
        (b"data: a\n\ndata: cut off\n", ["a"]),
        (b"data: a\n\ndata: cut o", ["a"]),
        (b"data: a: b\n\n", ["a: b"]),
        ("data: é\u2028\x85\x0b\x0c\x1c😀\n\n".encode(), ["é\u2028\x85\x0b\x0c\x1c😀"]),
        (b"", []),
    ],
    ids=repr,
)
def test_events_are_read_as_the_standard_says(stream: bytes, events: list[str]) -> None:
    assert read(stream) == events
    assert read(*(stream[i : i + 1] for i in range(len(stream)))) == events


def test_events_come_as_soon_as_they_end() -> None:
    reader = EventReader()
    assert reader.push(b"data: a\r") == []
    assert reader.push(b"\n\r") == ["a"]
    assert reader.push(b"\ndata: b\n") == []
    assert reader.push(b"\n") == ["b"]
    assert reader.push(b"") == []


def test_pieces_may_end_anywhere() -> None:
    draw = random.Random(0)
    expected = [f"event {n} é😀" for n in range(20)]
    for end in ("\n", "\r\n", "\r"):
        stream = "".join(f": keep-alive{end}data: {e}{end}{end}" for e in expected).encode()
        for _ in range(50):
            cuts = sorted(draw.sample(range(len(stream)), 40))
            pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
            assert read(*pieces) == expected
