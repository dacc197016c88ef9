"""From what a caller sends to ids that the model takes, and from ids back to text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from model.config import ModelSpec
from model.tokenizer import SPECIAL_TOKENS, Tokenizer
from seqserve.errors import InvalidRequestError
from service.languages import Frame

Side = Literal["source", "target"]


@dataclass(frozen=True)
class Vocabulary:
    """One side's ids.

    Attributes:
        side: the encoder's or the decoder's.
        size: ids are below it.
        tokenizer: None where the model came without one.
    """

    side: Side
    size: int
    tokenizer: Tokenizer | None

    def need_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer.

        Raises:
            InvalidRequestError: the model has none.
        """
        if self.tokenizer is None:
            raise InvalidRequestError(
                f"{param} needs a tokenizer, which this model's {self.side} side does not have: "
                "send token ids instead",
                param,
            )
        return self.tokenizer

    @cached_property
    def frame(self) -> list[int]:
        """What the tokenizer makes of an empty text: usually `</s>`, sometimes `<s> </s>`."""
        return self.tokenizer.encode([""])[0] if self.tokenizer else []

    @cached_property
    def tail(self) -> list[int]:
        """The part of the frame that is put behind every text."""
        if self.tokenizer is None:
            return []
        [framed], [bare] = (self.tokenizer.encode(["a"], framed=framed) for framed in (True, False))
        heads = range(len(self.frame) + 1)
        fits = (n for n in heads if [*self.frame[:n], *bare, *self.frame[n:]] == framed)
        return self.frame[next(fits, 0) :]

    @property
    def around(self) -> Frame:
        """The frame, before a text and behind it."""
        return Frame(self.frame[: len(self.frame) - len(self.tail)], self.tail)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that add no text."""
        if self.tokenizer is None:
            return frozenset()
        names = {id: self.tokenizer.token(id) for id in range(self.tokenizer.vocab_size)}
        reserved = {id for id, name in names.items() if name in SPECIAL_TOKENS}
        if self.tokenizer.languages:
            reserved |= set(self.tokenizer.languages.ids.values())
        return frozenset(id for id in reserved if not self.tokenizer.decode([id]))

    def encode_open(self, texts: Sequence[str], param: str) -> list[list[int]]:
        """Ids of each text without what would end it, nor a language's token before it."""
        tokenizer = self.need_tokenizer(param)
        if tokenizer.languages:
            return tokenizer.encode(texts, framed=False)
        encoded = tokenizer.encode(texts)
        return [ids[: len(ids) - len(self.tail)] for ids in encoded]

    def encode_ended(self, texts: Sequence[str], param: str) -> list[list[int]]:
        """Ids of each text with what ends it, but without a language's token before it."""
        tokenizer = self.need_tokenizer(param)
        if tokenizer.languages is None:
            return tokenizer.encode(texts)
        end = tokenizer.languages.eos_id
        return [[*ids, end] for ids in tokenizer.encode(texts, framed=False)]

    def encode_bare(self, texts: Sequence[str], param: str) -> list[list[int]]:
        """Ids of each text and nothing else."""
        return self.need_tokenizer(param).encode(texts, framed=False)

    def check(self, ids: Sequence[int], place: str) -> None:
        """Refuse ids that are not in the vocabulary.

        Raises:
            InvalidRequestError: names the first one.
        """
        for position, id in enumerate(ids):
            if not 0 <= id < self.size:
                raise InvalidRequestError(
                    f"{place}[{position}] must be an id in [0, {self.size}), got {id}",
                    f"{place}[{position}]",
                )

    def name(self, id: int) -> str | None:
        """The vocabulary's own name of an id; None without one."""
        if self.tokenizer is None or id >= self.tokenizer.vocab_size:
            return None
        return self.tokenizer.token(id)


@dataclass(frozen=True)
class Source:
    """One input, ready for the encoder.

    Attributes:
        ids: what the encoder gets.
        place: how an error message calls the input.
        blank: there is nothing in it, so that nothing is generated.
        truncated: it was cut.
        unknown: how many ids are `<unk>`.
    """

    ids: list[int]
    place: str
    blank: bool
    truncated: bool
    unknown: int


def read_sources(
    vocabulary: Vocabulary,
    spec: ModelSpec,
    texts: Sequence[str] | None,
    id_lists: Sequence[list[int]],
    places: Sequence[str],
    truncate: Sequence[int | None] | None = None,
    frames: Sequence[Frame | None] | None = None,
) -> list[Source]:
    """Check and encode the inputs of a request.

    Args:
        texts: the inputs as texts, or None: `id_lists` are taken as given.
        places: how an error message calls each input.
        truncate: tokens to cut each source to; None where the endpoint does not cut.
        frames: what a language puts around each text; None where the tokenizer puts it.

    Raises:
        InvalidRequestError: text without a tokenizer, ids outside the vocabulary, or a source
            longer than the model takes.
    """
    if texts is None:
        encoded, around = iter(id_lists), [NOTHING] * len(id_lists)
        for ids, place in zip(id_lists, places, strict=True):
            vocabulary.check(ids, place)
    else:
        encoded = _encoded_in_turn(vocabulary, texts, frames or [None] * len(texts))
        around = [frame or vocabulary.around for frame in frames or [None] * len(texts)]
    sources = []
    lengths = truncate or [None] * len(places)
    for ids, frame, length, place in zip(encoded, around, lengths, places, strict=True):
        cut = cut_source(ids, frame.tail, length)
        source = Source(
            cut,
            place,
            blank=ids == [*frame.head, *frame.tail],
            truncated=len(cut) < len(ids),
            unknown=_unknown(cut, spec),
        )
        _check_length(source, spec, "; parameters.truncate cuts it" if truncate else "")
        sources.append(source)
    return sources


ENCODED_AT_ONCE = 64 * 1024
"""Characters."""


def _encoded_in_turn(
    vocabulary: Vocabulary, texts: Sequence[str], frames: Sequence[Frame | None]
) -> Iterator[list[int]]:
    """Ids of each text, a few texts at a time: those behind one that is refused cost nothing."""
    begin = size = 0
    for end, text in enumerate(texts, start=1):
        size += len(text)
        if size >= ENCODED_AT_ONCE or end == len(texts):
            yield from encode_sources(vocabulary, texts[begin:end], frames[begin:end])
            begin, size = end, 0


NOTHING = Frame([], [])


def encode_sources(
    vocabulary: Vocabulary, texts: Sequence[str], frames: Sequence[Frame | None] | None
) -> list[list[int]]:
    """The ids of source texts, with what a language, or else the tokenizer, puts around them."""
    tokenizer = vocabulary.need_tokenizer("inputs")
    given = [frame for frame in frames or () if frame is not None]
    if not given:
        return tokenizer.encode(texts)
    encoded = tokenizer.encode(texts, framed=False)
    return [[*frame.head, *ids, *frame.tail] for ids, frame in zip(encoded, given, strict=True)]


def _check_length(source: Source, spec: ModelSpec, hint: str) -> None:
    if len(source.ids) > spec.max_src:
        raise InvalidRequestError(
            f"{source.place} has {len(source.ids)} tokens, the model takes at most "
            f"{spec.max_src} (max_source_tokens){hint}",
            source.place,
        )


def _unknown(ids: list[int], spec: ModelSpec) -> int:
    return 0 if spec.unk_id is None else ids.count(spec.unk_id)


def cut_source(ids: list[int], tail: list[int], length: int | None) -> list[int]:
    """The first tokens of a source, with the tail that the tokenizer put.

    >>> cut_source([5, 6, 7, 2], [2], 3)
    [5, 6, 2]
    """
    if length is None or len(ids) <= length:
        return ids
    end = tail[-length:]
    return ids[: length - len(end)] + end
