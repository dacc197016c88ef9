"""From tokens to the text they add, one by one, with stop strings cut off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from model.sequence import TokenEvent
from model.tokenizer import IncrementalDetokenizer
from service.vocabulary import Vocabulary

BYTES_OF_A_CHARACTER = 4
"""At most: a tokenizer that falls back to bytes spends a token on each."""

MARGIN = 16
"""Tokens that a stretch of text begins with, as its first ones may be spelt differently there."""


@dataclass
class Spelled:
    """A token and its text.

    Attributes:
        text: what it adds, or a special token's name; None without a tokenizer.
        special: whether it adds no text.
    """

    event: TokenEvent
    text: str | None
    special: bool


@dataclass(frozen=True)
class StopStrings:
    """Whether what was generated behind a prefix contains one of some texts; for the engine.

    It is asked after every token, so a stop string can only be new at the end: the whole text is
    looked at where a stretch at its end, long enough to hold any of them, has one.
    """

    target: Vocabulary
    prefix: Sequence[int]
    stops: Sequence[str]

    def __call__(self, tokens: Sequence[int]) -> bool:
        spelt = [id for id in tokens if id not in self.target.special_ids]
        stretch = BYTES_OF_A_CHARACTER * max(map(len, self.stops)) + MARGIN
        if len(spelt) > stretch and not self._occurs(self._decode(spelt[-stretch:])):
            return False
        # What the prefix leaves incomplete is part of the first generated character.
        before = self._decode(self.prefix).rstrip("\ufffd")
        return self._occurs(self._decode([*self.prefix, *tokens])[len(before) :])

    def _occurs(self, text: str) -> bool:
        return any(stop in text for stop in self.stops)

    def _decode(self, ids: Sequence[int]) -> str:
        assert self.target.tokenizer
        return self.target.tokenizer.decode(ids)


@dataclass
class Speller:
    """The text of one growing sequence.

    What is handed out is never taken back: a token waits while a character of its text is
    incomplete, or while the text so far might yet turn out to begin a stop string.

    Attributes:
        before: the text of the prefix.
        text: all that was handed out.
    """

    target: Vocabulary
    prefix: Sequence[int]
    stops: Sequence[str] = ()
    text: str = ""
    _waiting: list[Spelled] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = ""
        self._detokenizer: IncrementalDetokenizer | None = None
        if self.target.tokenizer:
            self._detokenizer = IncrementalDetokenizer(self.target.tokenizer)
            pieces = [self._piece(id) for id in self.prefix if id not in self.target.special_ids]
            self.before = "".join(pieces)

    def push(self, event: TokenEvent) -> list[Spelled]:
        """Take a token in; the tokens whose text is now certain."""
        if self._detokenizer is None:
            return [Spelled(event, None, self._is_special(event.token))]
        self._waiting.append(self._spell(event))
        if event.finish_reason:
            return self._finish(event)
        return self._release(self._certain())

    def _spell(self, event: TokenEvent) -> Spelled:
        if self._is_special(event.token):
            return Spelled(event, self.target.name(event.token), True)
        return Spelled(event, self._piece(event.token), False)

    def _piece(self, id: int) -> str:
        assert self._detokenizer
        return self._detokenizer.push(id)

    def _is_special(self, id: int) -> bool:
        return id in self.target.special_ids

    def _certain(self) -> int:
        """How many waiting tokens may go."""
        certain = len(self._waiting)
        for place in range(len(self._waiting) - 1, -1, -1):
            if self._waiting[place].special:
                continue
            if self._waiting[place].text:
                break
            certain = place  # its character may still be incomplete
        safe = self._safe_length()
        length = 0
        for place, spelled in enumerate(self._waiting[:certain]):
            length += 0 if spelled.special else len(spelled.text or "")
            if length > safe:
                return place
        return certain

    def _safe_length(self) -> int:
        """How much of the waiting text cannot be part of a stop string."""
        text = self._waiting_text()
        longest = max((len(stop) for stop in self.stops), default=0)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self.stops):
                return start
        return len(text)

    def _finish(self, event: TokenEvent) -> list[Spelled]:
        assert self._detokenizer
        held_back = self._detokenizer.finish()
        shown = [spelled for spelled in self._waiting if not spelled.special]
        if shown and held_back:
            shown[-1].text = (shown[-1].text or "") + held_back
        if event.finish_reason == "stop_sequence":
            self._cut()
        return self._release(len(self._waiting))

    def _cut(self) -> None:
        """Take the first stop string, and all behind it, off the waiting text."""
        text = self._waiting_text()
        starts = [start for stop in self.stops if (start := text.find(stop)) >= 0]
        room = min(starts, default=len(text))
        for spelled in self._waiting:
            if not spelled.special:
                spelled.text = (spelled.text or "")[:room]
                room -= len(spelled.text)

    def _waiting_text(self) -> str:
        return "".join(s.text or "" for s in self._waiting if not s.special)

    def _release(self, count: int) -> list[Spelled]:
        released, self._waiting = self._waiting[:count], self._waiting[count:]
        self.text += "".join(s.text or "" for s in released if not s.special)
        return released
