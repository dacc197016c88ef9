"""`src_lang` and `tgt_lang`: from codes to the tokens around a source and before a target."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from model.config import ModelSpec
from model.languages import Languages
from seqserve.errors import InvalidRequestError
from service.validation import shown

SHOWN_CODES = 60
"""A message names so many at most; `/info` has all of them."""


@dataclass(frozen=True)
class Wish:
    """The language that a request names.

    Attributes:
        code: None where it names none.
        place: how an error message calls the field.
    """

    code: str | None
    place: str


@dataclass(frozen=True)
class Frame:
    """What belongs around a source text."""

    head: list[int]
    tail: list[int]


@dataclass(frozen=True)
class Opening:
    """What a target begins with.

    Attributes:
        start: the decoder start.
        first: the language's token behind it, if there is one: a target text begins with it.
    """

    start: list[int]
    first: list[int]


@dataclass(frozen=True)
class Speech:
    """What a model makes of the languages that its requests name.

    Attributes:
        languages: None where the model has none; then naming one is refused.
    """

    spec: ModelSpec
    languages: Languages | None

    def frame(self, src: Wish, tgt: Wish, *, text: str | None) -> Frame | None:
        """What belongs around a source.

        Args:
            text: the source; None where it is ids, which are taken exactly as given.

        Returns:
            None where it is not for a language to say.

        Raises:
            InvalidRequestError: a language is unknown, or needed, or has no effect.
        """
        source = self._id(src)
        languages = self.languages
        if languages is None:
            return None
        of_target = languages.source_names == "tgt_lang"
        wish = tgt if of_target else src
        id = self._id(tgt) if of_target else source
        if text is None:
            if wish.code is not None:
                raise InvalidRequestError(
                    f"{wish.place} needs inputs as text: input_ids are taken exactly as given",
                    wish.place,
                )
            return None
        if languages.written:
            self._check_written(languages.written, src, tgt, text)
            return Frame(*languages.around(id))
        default = languages.default_tgt if of_target else languages.default_src
        return Frame(*languages.around(self._or_default(id, default, wish)))

    def opening(self, tgt: Wish, *, ids: bool = False, needed: bool = False) -> Opening:
        """What a target begins with.

        Args:
            ids: whether the target, or its beginning, is given as ids, exactly.
            needed: whether there has to be a language where the decoder is told one.

        Raises:
            InvalidRequestError: as for `frame`.
        """
        id = self._id(tgt)
        start = list(self.spec.decoder_start_ids)
        languages = self.languages
        if languages is None or languages.target == "none":
            return Opening(start, [])
        if languages.target == "start":
            return Opening(start if id is None else [id], [])
        if ids:
            if id is not None:
                raise InvalidRequestError(
                    f"{tgt.place} has no effect on a target given as ids, which are taken exactly "
                    f"as given: put {id} first",
                    tgt.place,
                )
            return Opening(start, [])
        if needed:
            id = self._or_default(id, languages.default_tgt, tgt)
        return Opening(start, [] if id is None else [id])

    def _check_written(self, written: re.Pattern[str], src: Wish, tgt: Wish, text: str) -> None:
        """Refuse what a text that may name its own language leaves no place for."""
        if src.code is not None:
            raise InvalidRequestError(
                f"{src.place} has no effect: this model is told the target's language only, "
                f"got {shown(src.code)}",
                src.place,
            )
        if tgt.code is not None and (found := written.match(text)):
            raise InvalidRequestError(
                f"{tgt.place} and a text that begins with a language exclude each other, "
                f"got {shown(tgt.code)} and {shown(found[0])}",
                tgt.place,
            )

    def target_tail(self) -> list[int]:
        """What ends a target text; empty without languages."""
        return [self.languages.eos_id] if self.languages else []

    def _id(self, wish: Wish) -> int | None:
        if wish.code is None:
            return None
        if self.languages is None:
            raise InvalidRequestError(
                f"{wish.place} needs a model with languages, which this one does not have, "
                f"got {shown(wish.code)}",
                wish.place,
            )
        id = self.languages.find(wish.code)
        if id is None:
            raise InvalidRequestError(
                f"{wish.place} must be a language of this model, got {shown(wish.code)}"
                f"{_hint(wish.code, list(self.languages.ids))}",
                wish.place,
            )
        return id

    def _or_default(self, id: int | None, default: str | None, wish: Wish) -> int:
        assert self.languages
        if id is None and default is not None:
            id = self.languages.find(default)
        if id is None:
            raise InvalidRequestError(
                f"{wish.place} must be given: one of {listed(list(self.languages.ids))}", wish.place
            )
        return id


def listed(codes: Sequence[str]) -> str:
    """Codes in one line, as many as fit in a message.

    >>> listed(["en", "ro"])
    'en, ro'
    """
    rest = len(codes) - SHOWN_CODES
    more = f" and {rest} more, which /info lists" if rest > 0 else ""
    return ", ".join(codes[:SHOWN_CODES]) + more


def _hint(code: str, codes: Sequence[str]) -> str:
    """Languages that may have been meant: alike, or with the same first letters."""
    lower = {known.lower(): known for known in codes}
    wanted = code.lower()[:40]
    alike = [lower[name] for name in difflib.get_close_matches(wanted, lower, n=3)]
    alike += [known for name, known in lower.items() if name[:2] == wanted[:2]]
    close = list(dict.fromkeys(alike))[:3]
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; there are {listed(codes)}"
