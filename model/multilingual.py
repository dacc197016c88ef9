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

import tokenizers as backends

from model.checkpoint import ModelError
from model.languages import Languages, codes_among
from model.loader import read_object
from model.tokenizer import BOS, EOS, PAD, UNK, JsonTokenizer, SentencePieceTokenizer


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


MBART_CODES = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR "
    "lt_LT lv_LV my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
MBART50_CODES = (
    f"{MBART_CODES} "
    "af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL "
    "ps_AF pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)
"""Languages in the order of their ids, which SentencePiece models do not hold."""


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


def fairseq_tokenizer(path: Path) -> PieceTokenizer:
    """A SentencePiece model with fairseq's ids: four special tokens, pieces, languages, `<mask>`.

    The first three of SentencePiece's own ids are fairseq's special tokens in another order and
    with `<pad>` among them, so that a piece's id is one more than SentencePiece says.

    Raises:
        ValueError: the file holds no SentencePiece model.
        ModelError: no file names the languages.
    """
    settings = read_settings(path.parent)
    convention = convention_of(settings) or CLASSES["MBartTokenizer"]
    pieces = SentencePieceTokenizer.load(path)
    size = pieces.vocab_size
    vocabulary = {token: id for id, token in enumerate((BOS, PAD, EOS, UNK))}
    vocabulary |= {pieces.token(id): id + 1 for id in range(3, size)}
    codes = _stated_codes(path.parent, convention, settings)
    ids = {code: size + 1 + i for i, code in enumerate(codes)}
    languages = speak(convention, ids, vocabulary[EOS], settings)
    names = {**ids, "<mask>": size + 1 + len(ids)}
    return PieceTokenizer(path, vocabulary, range(4), languages, names)


def _stated_codes(
    directory: Path, convention: Convention, settings: Mapping[str, Any]
) -> Sequence[str]:
    if convention.pattern is MBART.pattern:
        return (MBART50_CODES if convention.before else MBART_CODES).split()
    path = directory / "special_tokens_map.json"
    others = read_object(path) if path.is_file() else {}
    for stated in (settings, others):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            tokens = stated.get(key) or []
            found = [str(t) for t in tokens if convention.pattern.fullmatch(str(t))]
            if found:
                return found
    raise ModelError(f"{path}: no additional_special_tokens that are languages")


class PieceTokenizer:
    """SentencePiece cuts a text, a separate vocabulary gives the pieces their ids.

    Codes of languages have ids of their own; what the vocabulary does not hold is `<unk>`.

    Args:
        path: SentencePiece model.
        vocabulary: piece -> id.
        special: ids of it that add no text.
        languages: what it has of them.
        names: token -> id of those, and of others that are no pieces and add no text.
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
        self._file = SentencePieceTokenizer.load(path)
        self._cutter = self._file.backend
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
        self._file.save(path)


def need_ids(path: Path, vocabulary: Mapping[str, int], *tokens: str) -> None:
    """Refuse a vocabulary that lacks a token.

    Raises:
        ModelError: names it.
    """
    if missing := [token for token in tokens if token not in vocabulary]:
        raise ModelError(f"{path}: {' and '.join(missing)} must be in the vocabulary")
