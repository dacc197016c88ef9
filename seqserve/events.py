"""Server-sent events, read as the WHATWG HTML standard says (section 9.2.6).

Bytes come in pieces that end anywhere, also inside a character or between CR and LF.
"""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class EventReader:
    """Takes bytes in, gives the data of whole events out.

    Comments, fields other than `data`, and events without data are passed over, and so is an event
    that the end of the stream cuts off.
    """

    def __init__(self) -> None:
        self._rest = b""  # of a line that has not ended
        self._data: list[str] = []
        self._after_cr = False
        self._first = True

    def push(self, piece: bytes) -> list[str]:
        """The data of the events that end with this piece."""
        if not piece:
            return []
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]  # the CR has already ended its line
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        self._after_cr = piece.endswith(b"\r")
        events = []
        for line in lines:
            if self._first:
                line, self._first = line.removeprefix(_BOM), False
            if line:
                self._take(line)
            elif self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events

    def _take(self, line: bytes) -> None:
        name, _, value = line.decode("utf-8", "replace").partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
