"""Texts cut into sentences, and put together again with their white space as it was.

Models translate sentences: of a text with several they skip or repeat some, and a page is longer
than any of them takes. The rule is written out here, for any language, and is cautious: two
sentences that stay together are still translated, one that is cut in its middle is not.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

ABBREVIATIONS = (
    "adj adm approx art aufl bd bzw ca capt cf cfr col dept dr ed eg etc evtl fig figs fr gen gov "
    "hr hrsg ie inc inkl jr lt ltd max mbh min mlle mm mme mr mrs ms mt nr núm op pag par pp prof "
    "pt resp rev sen sgt sig sr sra srta st str ten tel u usw vgl vol vs z zb"
)
"""Words behind which a full stop seldom ends a sentence, without their stops, in small letters."""

ABBREVIATED = frozenset(ABBREVIATIONS.split())

SPACE = re.compile(r"(?<!\s)\s++")

BREAKS = frozenset("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")
"""White space with one of these in it ends a sentence: a heading or a line of a list has no other
end."""

CLOSING = re.escape("\"'”’»›)]}」』）】〉》")
OPENING = re.escape("\"'“‘„‚«‹([{¿¡「『（【〈《-–—")

SPACED = r".!?…؟۔։।॥។៕"
SPACED_END = re.compile(
    rf"(?<![{SPACED}])[{SPACED}]++[{CLOSING}]*+\s++(?=[{OPENING}\s]*+(?P<next>\S))"
)
"""What may end a sentence in scripts that put a space behind it. (Patterns begin where no run of
the same marks goes on, and never look back, so that a text of marks takes no longer than another.)
"""

SOLID = "。！？｡"
SOLID_END = re.compile(rf"(?<![{SOLID}])[{SOLID}]++[{CLOSING}]*+\s*+(?=\S)")
"""What ends one in scripts that put none."""

CLAUSE, SOLID_CLAUSE = ";:,،؛—–", "、，；："
CLAUSE_END = re.compile(
    rf"(?:(?<![{CLAUSE}])[{CLAUSE}]++\s++"
    rf"|(?<![{SOLID_CLAUSE}])[{SOLID_CLAUSE}]++\s*+)(?=\S)"
)
"""Where a sentence that is too long is cut first."""

LONGEST_WORD = 40
"""Characters before a stop that are looked at."""

LONGEST_ORDINAL = 2
"""Digits: `3. Mai`, and the numbers of a list."""


@dataclass(frozen=True)
class SplitText:
    """A text as sentences and what stands between them.

    Attributes:
        sentences: neither empty nor with white space at either end.
        gaps: what stands before each sentence and behind the last: one more than sentences, each of
            them white space or nothing.
    """

    sentences: tuple[str, ...]
    gaps: tuple[str, ...]

    def join(self, sentences: Sequence[str], between: str = "") -> str:
        """The text of other sentences in the same places.

        Args:
            sentences: as many as there were.
            between: stands between two that had nothing between them: a space where they come from
                a script without spaces and go to one with.
        """
        if not self.sentences:
            return self.gaps[0]
        first, *inner, last = self.gaps
        gaps = [first, *(gap or between for gap in inner)]
        return "".join(chain.from_iterable(zip(gaps, sentences, strict=True))) + last

    def shortened(self, too_long: Callable[[Sequence[str]], Sequence[bool]]) -> SplitText:
        """The same text with the sentences that are too long cut further.

        They are cut in two where a clause ends, or else between two words, behind the middle if
        there is such a place, until they fit. One that has none stays as it is.

        Args:
            too_long: asked of many sentences at once.
        """
        split = self
        pending = list(range(len(split.sentences)))
        while pending:
            answers = too_long([split.sentences[i] for i in pending])
            wrong = {i for i, is_long in zip(pending, answers, strict=True) if is_long}
            parts = [
                halves(sentence) if i in wrong else whole(sentence)
                for i, sentence in enumerate(split.sentences)
            ]
            split, pending = split._with(parts)
        return split

    def _with(self, parts: Sequence[SplitText]) -> tuple[SplitText, list[int]]:
        """This text with each sentence in parts; which of its sentences are new."""
        sentences: list[str] = []
        gaps: list[str] = [self.gaps[0]]
        new: list[int] = []
        for part, gap in zip(parts, self.gaps[1:], strict=True):
            if len(part.sentences) > 1:
                new += range(len(sentences), len(sentences) + len(part.sentences))
            sentences += part.sentences
            gaps += [*part.gaps[1:-1], gap]
        return SplitText(tuple(sentences), tuple(gaps)), new


def split(text: str) -> SplitText:
    """The sentences of a text. Joined again they are the text, character by character.

    A sentence ends at a line break; behind `。！？`; and behind `.!?…` and their like of other
    scripts where white space follows and the next word does not begin with a small letter. A full
    stop does not count behind an abbreviation, an initial or a number of one or two digits, nor
    before a number.
    """
    return _cut(text, _ends(text))


def whole(sentence: str) -> SplitText:
    """A sentence as it is."""
    return SplitText((sentence,), ("", ""))


def halves(sentence: str) -> SplitText:
    """A sentence in two, as `SplitText.shortened` cuts it; in one where there is no place to."""
    for pattern in (CLAUSE_END, SPACE):
        place = pattern.search(sentence, len(sentence) // 2) or _last(pattern, sentence)
        if place:
            return _cut(sentence, [_gap(place)])
    return whole(sentence)


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def _ends(text: str) -> list[tuple[int, int]]:
    """Begin and end of what stands between two sentences, in order."""
    found = {match.span() for match in SPACE.finditer(text) if not BREAKS.isdisjoint(match[0])}
    found |= {_gap(match) for match in SOLID_END.finditer(text)}
    found |= {_gap(match) for match in SPACED_END.finditer(text) if _ends_a_sentence(text, match)}
    return sorted(found)


def _ends_a_sentence(text: str, match: re.Match[str]) -> bool:
    stop, following = match.start(), match["next"]
    if following.islower():
        return False
    if text[stop] != "." or text[stop + 1] == ".":
        return True  # another mark, or an ellipsis
    if following.isdecimal():  # p. 3
        return False
    [*_, word] = re.split(r"\s", text[max(0, stop - LONGEST_WORD) : stop])
    return not _takes_a_stop(word.strip("\"'“‘„‚«‹([{¿¡"))


def _takes_a_stop(word: str) -> bool:
    """Whether a word is written with a stop behind it, wherever it stands."""
    if word.isdecimal():
        return len(word) <= LONGEST_ORDINAL
    letters = word.split(".")
    if len(letters) > 1:  # e.g, U.S
        return all(len(letter) == 1 for letter in letters)
    initial = len(word) == 1 and word.isupper()
    return initial or word.lower() in ABBREVIATED


def _gap(match: re.Match[str]) -> tuple[int, int]:
    """Begin and end of the white space at the end of what was found, which may be none."""
    return match.start() + len(match[0].rstrip()), match.end()


def _cut(text: str, gaps: Sequence[tuple[int, int]]) -> SplitText:
    """A text cut at some places, and without the white space at its ends."""
    begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
    if begin >= end:
        return SplitText((), (text,))
    inside = [(b, e) for b, e in _apart(gaps) if begin < b and e < end]
    edges = [(0, begin), *inside, (end, len(text))]
    return SplitText(
        tuple(text[before[1] : after[0]] for before, after in pairwise(edges)),
        tuple(text[b:e] for b, e in edges),
    )


def _apart(gaps: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Gaps in order without those that begin where another one lies, or that touch it."""
    last = -1
    for begin, end in gaps:
        if begin > last:
            yield begin, end
            last = end
