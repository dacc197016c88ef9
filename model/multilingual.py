"""Tokenizers of the multilingual models that come from fairseq: mBART, M2M100, NLLB.

Their texts are framed by a language's token, which is another one for every request, so that what
`tokenizer.json` says of the frame is of no use: which layout it is, `tokenizer_config.json` says by
the name of a class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers as backends

from model.checkpoint import ModelError
from model.languages import Languages, codes_among
from model.loader import read_object
from model.tokenizer import EOS, UNK, JsonTokenizer


@dataclass(frozen=True)
class Convention:
    """How a class of the reference writes its languages.

    Attributes:
        pattern: of a language's token; its group, if it has one, is the code.
        default_src: what the class takes for the language of sources where nobody names one.
        before: whether a source's language stands before it; None where the file's frame tells.
        names_target: whether a source names the target's language instead, and a target none.
    """

    pattern: re.Pattern[str]
    default_src: str
    before: bool | None = None
    names_target: bool = False


NLLB = Convention(re.compile(r"[a-z]{3}_[A-Z][a-z]{3}"), "eng_Latn")
MBART = Convention(re.compile(r"[a-z]{2}_[A-Z]{2}"), "en_XX")
M2M100 = Convention(re.compile(r"__([a-z]{2,3})__"), "en", before=True)

CLASSES = {
    "NllbTokenizer": replace(NLLB, before=True),
    "MBartTokenizer": replace(MBART, before=False),
    "MBart50Tokenizer": replace(MBART, before=True),
    "M2M100Tokenizer": M2M100,
    "SMALL100Tokenizer": replace(M2M100, names_target=True),
}


def read_settings(directory: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, or nothing."""
    path = directory / "tokenizer_config.json"
    return read_object(path) if path.is_file() else {}


def convention_of(settings: Mapping[str, Any]) -> Convention | None:
    """What the tokenizer's class says; None where it is none of these."""
    name = str(settings.get("tokenizer_class")).removesuffix("Fast")
    found = CLASSES.get(name)
    if found and name == "NllbTokenizer" and settings.get("legacy_behaviour"):
        return replace(found, before=False)  # as before 2023
    return found


def speak(
    convention: Convention, ids: Mapping[str, int], eos_id: int, settings: Mapping[str, Any]
) -> Languages:
    """The languages of a tokenizer that follows a convention."""

    def known(name: str, default: str | None = None) -> str | None:
        stated = settings.get(name)
        choices = (code for code in (aliases.get(str(stated), stated), default) if code in ids)
        return next(choices, None)

    # A token's own name may be given for its code, as in `__en__`.
    aliases = {f"__{code}__": code for code in ids} if convention.pattern.groups else {}
    return Languages(
        ids=ids,
        eos_id=eos_id,
        before=bool(convention.before),
        source_names="tgt_lang" if convention.names_target else "src_lang",
        target="none" if convention.names_target else "first",
        default_src=known("src_lang", convention.default_src),
        default_tgt=known("tgt_lang"),
        aliases=aliases,
    )


def json_tokenizer(path: Path) -> JsonTokenizer:
    """A `tokenizer.json`, with the languages that it has.

    Raises:
        ValueError: the file holds no tokenizer.
    """
    plain = JsonTokenizer.load(path)
    backend = plain.backend
    eos_id = backend.token_to_id(EOS)
    settings = read_settings(path.parent)
    stated = convention_of(settings)
    for convention in (stated,) if stated else (NLLB, MBART, M2M100):
        ids = _codes(backend, convention.pattern)
        if not ids or eos_id is None:
            continue
        if convention.before is None:
            [frame] = plain.encode([""])
            convention = replace(convention, before=frame[:1] != [eos_id])
        return JsonTokenizer(backend, speak(convention, ids, eos_id, settings))
    return plain


def _codes(backend: backends.Tokenizer, pattern: re.Pattern[str]) -> dict[str, int]:
    added = backend.get_added_tokens_decoder().items()
    ids = codes_among(((token.content, id) for id, token in added if token.special), pattern)
    return ids or codes_among(backend.get_vocab().items(), pattern)


class PieceTokenizer:
    """SentencePiece cuts a text, a separate vocabulary gives the pieces their ids.

    Codes of languages have ids of their own; what the vocabulary does not hold is `<unk>`.

    Args:
        cutter: SentencePiece model.
        serialized: its file.
        vocabulary: piece -> id.
        special: ids that add no text, languages aside.
        languages: of the tokens that are no pieces.
    """

    suffix = ".spm"

    def __init__(
        self,
        path: Path,
        vocabulary: Mapping[str, int],
        special: Sequence[int],
        languages: Languages,
        names: Mapping[str, int],
    ) -> None:
        self._serialized = path.read_bytes()
        if not self._serialized:  # the library takes this for a model to be loaded later
            raise ValueError(f"{path}: not a SentencePiece model: the file is empty")
        try:
            self._cutter = sentencepiece.SentencePieceProcessor(model_proto=self._serialized)
        except RuntimeError as error:
            raise ValueError(f"{path}: not a SentencePiece model: {error}") from error
        self.languages: Languages | None = languages
        self.unk_id = vocabulary[UNK]
        self._vocabulary = vocabulary
        self._special = frozenset(special)
        self._unsaid = self._special | frozenset(names.values())
        self._pieces = {id: piece for piece, id in [*names.items(), *vocabulary.items()]}
        self._eos = languages.eos_id

    @property
    def vocab_size(self) -> int:
        return max(self._pieces) + 1

    def encode(self, texts: Sequence[str], *, framed: bool = True) -> list[list[int]]:
        end = [self._eos] if framed else []
        return [[*self._ids(text), *end] for text in texts]

    def _ids(self, text: str) -> list[int]:
        pieces: list[str] = self._cutter.encode(text, out_type=str)
        ids = [self._vocabulary.get(piece, self.unk_id) for piece in pieces]
        # A caller's "</s>" is text: only the tokenizer itself may place special tokens.
        return [self.unk_id if id in self._special else id for id in ids]

    def decode(self, ids: Sequence[int]) -> str:
        pieces = [self._pieces[id] for id in ids if id not in self._unsaid and id in self._pieces]
        text: str = self._cutter.decode_pieces(pieces)
        return text.strip()

    def token(self, id: int) -> str:
        if id in self._pieces:
            return self._pieces[id]
        if 0 <= id < self.vocab_size:
            return f"<{id}>"  # a gap between pieces and languages
        raise KeyError(f"id {id} is not in the vocabulary of {self.vocab_size}")

    def save(self, path: Path) -> None:
        path.write_bytes(self._serialized)


def need_ids(path: Path, vocabulary: Mapping[str, int], *tokens: str) -> None:
    """Refuse a vocabulary that lacks a token.

    Raises:
        ModelError: names it.
    """
    if missing := [token for token in tokens if token not in vocabulary]:
        raise ModelError(f"{path}: {' and '.join(missing)} must be in the vocabulary")
