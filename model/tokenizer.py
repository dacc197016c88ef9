"""Texts to ids and back, one tokenizer per side of a model.

Two formats exist: `tokenizers`' own JSON and SentencePiece models. Both stand behind `Tokenizer`.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol, Self

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from model.languages import Languages

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL_TOKENS = (PAD, BOS, EOS, UNK)

Granularity = Literal["char", "whitespace", "sentencepiece"]
"""What a token is: a character, a word between white space, or a learned piece."""


class Tokenizer(Protocol):
    """One side's vocabulary."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def unk_id(self) -> int | None:
        """What unknown pieces become; None where there are none."""
        ...

    @property
    def languages(self) -> Languages | None:
        """What it has of languages; their tokens add no text."""
        ...

    def encode(self, texts: Sequence[str], *, framed: bool = True) -> list[list[int]]:
        """Ids of each text; unknown pieces become `<unk>`.

        Args:
            framed: with what belongs before and behind every text, usually a final `</s>`.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens and ids that it does not know."""
        ...

    def token(self, id: int) -> str:
        """The vocabulary's own name of an id.

        Raises:
            KeyError: no such id.
        """
        ...

    suffix: str

    def save(self, path: Path) -> None: ...


class JsonTokenizer:
    """A tokenizer in the format of the `tokenizers` library."""

    suffix = ".json"

    def __init__(self, backend: tokenizers.Tokenizer, languages: Languages | None = None) -> None:
        self.backend = backend
        self.languages = languages
        # A caller's "</s>" is text: only the tokenizer itself may place special tokens.
        self.backend.encode_special_tokens = True
        # Files may ask for both; here nothing is cut without a word, and batches are padded later.
        self.backend.no_truncation()
        self.backend.no_padding()
        added = backend.get_added_tokens_decoder()
        special = {id for id, token in added.items() if token.special}
        # Files of mBART-50 hold its codes among the pieces, not among the special tokens.
        self._codes = frozenset(languages.ids.values() if languages else ()) - special
        self._special = frozenset(special | self._codes)
        self.unk_id = backend.token_to_id(UNK)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ValueError where the file holds no tokenizer."""
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except BaseException as error:  # the library raises nothing narrower, and may panic
            if isinstance(error, KeyboardInterrupt):
                raise
            raise ValueError(f"{path}: not a tokenizer: {error}") from error

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, texts: Sequence[str], *, framed: bool = True) -> list[list[int]]:
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=framed)
        return [self._ids(encoding) for encoding in encodings]

    def _ids(self, encoding: tokenizers.Encoding) -> list[int]:
        ids: list[int] = encoding.ids
        if self.unk_id is None:
            return ids
        # A vocabulary of words holds "</s>" under its own name; as a caller's word it is unknown.
        return [
            id if placed or id not in self._special else self.unk_id
            for id, placed in zip(ids, encoding.special_tokens_mask, strict=True)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        text = [id for id in ids if id not in self._codes]
        return self.backend.decode(text, skip_special_tokens=True)

    def token(self, id: int) -> str:
        token = self.backend.id_to_token(id)
        if token is None:
            raise KeyError(f"id {id} is not in the vocabulary of {self.vocab_size}")
        return token

    def save(self, path: Path) -> None:
        self.backend.save(str(path))


@dataclass(frozen=True)
class AddedTokens:
    """Tokens that were added to a vocabulary later, found in texts before these are cut.

    Attributes:
        ids: of those that texts may have.
        special: of those that only the tokenizer itself may place; they add no text.
    """

    ids: Mapping[str, int] = field(default_factory=dict)
    special: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def encode(self, text: str, cut: Callable[[str], list[int]]) -> list[int]:
        """The ids of a text.

        Args:
            cut: gives those of what lies between added tokens.
        """
        if not self.ids:
            return cut(text)
        ids: list[int] = []
        for part in filter(None, self._pattern.split(text)):
            ids += [self.ids[part]] if part in self.ids else cut(part)
        return ids

    @property
    def names(self) -> dict[int, str]:
        """All of them, by id."""
        return {id: token for token, id in [*self.ids.items(), *self.special.items()]}


class SentencePieceTokenizer:
    """A SentencePiece model; its own `</s>` ends a text."""

    suffix = ".spm"
    languages: Languages | None = None

    def __init__(self, serialized: bytes) -> None:
        self._serialized = serialized
        self.backend = sentencepiece.SentencePieceProcessor(model_proto=serialized)

    @classmethod
    def load(cls, path: Path) -> SentencePieceTokenizer:
        """Raises ValueError where the file holds no SentencePiece model."""
        serialized = path.read_bytes()
        if not serialized:  # the library takes this for a model to be loaded later
            raise ValueError(f"{path}: not a SentencePiece model: the file is empty")
        try:
            return cls(serialized)
        except RuntimeError as error:
            raise ValueError(f"{path}: not a SentencePiece model: {error}") from error

    @property
    def vocab_size(self) -> int:
        size: int = self.backend.get_piece_size()
        return size

    @property
    def unk_id(self) -> int:
        id: int = self.backend.unk_id()
        return id

    def encode(self, texts: Sequence[str], *, framed: bool = True) -> list[list[int]]:
        encoded: list[list[int]] = self.backend.encode(list(texts), add_eos=framed)
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        size = self.vocab_size
        known = [id for id in ids if id < size and not self.backend.is_control(id)]
        text: str = self.backend.decode(known)
        return text

    def token(self, id: int) -> str:
        if not 0 <= id < self.vocab_size:
            raise KeyError(f"id {id} is not in the vocabulary of {self.vocab_size}")
        piece: str = self.backend.id_to_piece(id)
        return piece

    def save(self, path: Path) -> None:
        path.write_bytes(self._serialized)


def load_tokenizer(directory: Path, side: str) -> Tokenizer | None:
    """The tokenizer file of a side, such as `source_tokenizer.json`, or None."""
    for kind in (JsonTokenizer, SentencePieceTokenizer):
        path = directory / f"{side}_tokenizer{kind.suffix}"
        if path.exists():
            return kind.load(path)
    return None


class IncrementalDetokenizer:
    """Text of a growing target, piece by piece.

    What a token adds to the text can depend on its neighbours (spaces between words, characters
    spread over several byte tokens), so each piece is the difference between two decodings of the
    last few tokens, held back while it ends in an incomplete character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # ids before it no longer influence what follows
        self._shown = 0  # ids before it have been handed out as text

    def push(self, id: int) -> str:
        """The text that `id` completes; empty while a character is incomplete."""
        self._ids.append(id)
        piece, complete = self._pending()
        if not piece or not complete:  # a window without text would lose the space after it
            return ""
        if not piece.isspace():  # nor may a window begin with spaces, which decoding takes off
            self._start = self._shown
        self._shown = len(self._ids)
        return piece

    def finish(self) -> str:
        """What is still held back, incomplete characters as U+FFFD."""
        piece, _ = self._pending()
        self._start = self._shown = len(self._ids)
        return piece

    def _pending(self) -> tuple[str, bool]:
        before = self._tokenizer.decode(self._ids[self._start : self._shown])
        text = self._tokenizer.decode(self._ids[self._start :])
        return text[len(before) :], not text.endswith("\ufffd")


def build_tokenizer(
    texts: Iterable[str], granularity: Granularity, fold: bool = False, vocab_size: int = 8000
) -> Tokenizer:
    """Make a tokenizer whose vocabulary is what occurs in `texts`.

    Args:
        granularity: what a token is.
        fold: lower-case, strip accents and write typographic apostrophes and hyphens plainly;
            characters lose hyphens and spaces too where `texts` have none.
        vocab_size: upper bound, for SentencePiece only.
    """
    if granularity == "sentencepiece":
        return _train_sentencepiece(texts, fold, vocab_size)
    return _build_word_level(texts, granularity, fold)


def _folding() -> normalizers.Normalizer:
    plain = [normalizers.Replace(a, b) for a, b in (("’", "'"), ("‘", "'"), ("‐", "-"), ("‑", "-"))]
    return normalizers.Sequence(
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(), *plain]
    )


def _build_word_level(texts: Iterable[str], granularity: Granularity, fold: bool) -> JsonTokenizer:
    by_character = granularity == "char"
    splitter: pre_tokenizers.PreTokenizer = (
        pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        if by_character
        else pre_tokenizers.WhitespaceSplit()
    )
    normalizer: normalizers.Normalizer = _folding() if fold else normalizers.NFC()
    counts: Counter[str] = Counter()
    for text in texts:
        pieces = splitter.pre_tokenize_str(normalizer.normalize_str(text))
        counts.update(piece for piece, _ in pieces)
    if fold and by_character:
        # Learned from single words: a compound or several words are read as one long word, where
        # an `<unk>` that no training text had would spoil all.
        joiners = [normalizers.Replace(joiner, "") for joiner in "- " if joiner not in counts]
        normalizer = normalizers.Sequence([normalizer, *joiners])
    tokens = [*SPECIAL_TOKENS, *sorted(counts.keys() - set(SPECIAL_TOKENS))]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.normalizer = normalizer
    backend.pre_tokenizer = splitter
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, vocabulary[EOS])]
    )
    if by_character:
        backend.decoder = decoders.Fuse()  # without a decoder, tokens are joined by spaces
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return JsonTokenizer(backend)


def _train_sentencepiece(
    texts: Iterable[str], fold: bool, vocab_size: int
) -> SentencePieceTokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_lines(texts),
        model_writer=model,
        vocab_size=vocab_size,
        hard_vocab_limit=False,  # a small corpus may not have so many pieces
        character_coverage=1.0,
        byte_fallback=True,
        normalization_rule_name="nmt_nfkc_cf" if fold else "nmt_nfkc",
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    return SentencePieceTokenizer(model.getvalue())


def _lines(texts: Iterable[str]) -> Iterator[str]:
    return (text for text in texts if text.strip())
