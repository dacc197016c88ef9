"""Tokenizers of the multilingual models that come from fairseq: mBART, M2M100, NLLB.

Their texts are framed by a language's token, which is another one for every request, so that what
`tokenizer.json` says of the frame is of no use: which layout it is, `tokenizer_config.json` says by
the name of a class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers as backends

from model.checkpoint import ModelError
from model.languages import Languages, codes_among
from model.loader import read_object
from model.tokenizer import (
    BOS,
    EOS,
    PAD,
    UNK,
    AddedTokens,
    JsonTokenizer,
    SentencePieceTokenizer,
)


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
NLLB_CODES = (
    "ace_Arab ace_Latn acm_Arab acq_Arab aeb_Arab afr_Latn ajp_Arab aka_Latn amh_Ethi apc_Arab "
    "arb_Arab ars_Arab ary_Arab arz_Arab asm_Beng ast_Latn awa_Deva ayr_Latn azb_Arab azj_Latn "
    "bak_Cyrl bam_Latn ban_Latn bel_Cyrl bem_Latn ben_Beng bho_Deva bjn_Arab bjn_Latn bod_Tibt "
    "bos_Latn bug_Latn bul_Cyrl cat_Latn ceb_Latn ces_Latn cjk_Latn ckb_Arab crh_Latn cym_Latn "
    "dan_Latn deu_Latn dik_Latn dyu_Latn dzo_Tibt ell_Grek eng_Latn epo_Latn est_Latn eus_Latn "
    "ewe_Latn fao_Latn pes_Arab fij_Latn fin_Latn fon_Latn fra_Latn fur_Latn fuv_Latn gla_Latn "
    "gle_Latn glg_Latn grn_Latn guj_Gujr hat_Latn hau_Latn heb_Hebr hin_Deva hne_Deva hrv_Latn "
    "hun_Latn hye_Armn ibo_Latn ilo_Latn ind_Latn isl_Latn ita_Latn jav_Latn jpn_Jpan kab_Latn "
    "kac_Latn kam_Latn kan_Knda kas_Arab kas_Deva kat_Geor knc_Arab knc_Latn kaz_Cyrl kbp_Latn "
    "kea_Latn khm_Khmr kik_Latn kin_Latn kir_Cyrl kmb_Latn kon_Latn kor_Hang kmr_Latn lao_Laoo "
    "lvs_Latn lij_Latn lim_Latn lin_Latn lit_Latn lmo_Latn ltg_Latn ltz_Latn lua_Latn lug_Latn "
    "luo_Latn lus_Latn mag_Deva mai_Deva mal_Mlym mar_Deva min_Latn mkd_Cyrl plt_Latn mlt_Latn "
    "mni_Beng khk_Cyrl mos_Latn mri_Latn zsm_Latn mya_Mymr nld_Latn nno_Latn nob_Latn npi_Deva "
    "nso_Latn nus_Latn nya_Latn oci_Latn gaz_Latn ory_Orya pag_Latn pan_Guru pap_Latn pol_Latn "
    "por_Latn prs_Arab pbt_Arab quy_Latn ron_Latn run_Latn rus_Cyrl sag_Latn san_Deva sat_Beng "
    "scn_Latn shn_Mymr sin_Sinh slk_Latn slv_Latn smo_Latn sna_Latn snd_Arab som_Latn sot_Latn "
    "spa_Latn als_Latn srd_Latn srp_Cyrl ssw_Latn sun_Latn swe_Latn swh_Latn szl_Latn tam_Taml "
    "tat_Cyrl tel_Telu tgk_Cyrl tgl_Latn tha_Thai tir_Ethi taq_Latn taq_Tfng tpi_Latn tsn_Latn "
    "tso_Latn tuk_Latn tum_Latn tur_Latn twi_Latn tzm_Tfng uig_Arab ukr_Cyrl umb_Latn urd_Arab "
    "uzn_Latn vec_Latn vie_Latn war_Latn wol_Latn xho_Latn ydd_Hebr yor_Latn yue_Hant zho_Hans "
    "zho_Hant zul_Latn"
)
"""Languages in the order of their ids, which SentencePiece models do not hold."""


def read_settings(directory: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, with the class that `config.json` names where it names none."""
    settings = _object_or_nothing(directory / "tokenizer_config.json")
    if (directory / SMALL100_CODE).is_file():
        return settings | {"tokenizer_class": "SMALL100Tokenizer"}
    named = _object_or_nothing(directory / "config.json").get("tokenizer_class")
    return {"tokenizer_class": named} | {k: v for k, v in settings.items() if v is not None}


SMALL100_CODE = "tokenization_small100.py"
"""Comes with SMaLL-100, whose other files may name M2M100's class."""


def _object_or_nothing(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def added_tokens(directory: Path, known: Mapping[str, int]) -> AddedTokens:
    """Tokens that a vocabulary got later.

    `tokenizer_config.json` describes them as `added_tokens_decoder`. Where it does not, they are in
    `added_tokens.json`, and special if one of the files gives them a part.

    Args:
        known: tokens that have an id already.

    Raises:
        ModelError: a file holds something else.
    """
    settings = _object_or_nothing(directory / "tokenizer_config.json")
    path = directory / "added_tokens.json"
    described = settings.get("added_tokens_decoder")
    if described is not None:
        found = _described(directory / "tokenizer_config.json", described)
    else:
        parts = _object_or_nothing(directory / "special_tokens_map.json") | settings
        special = set(_parts(parts))
        listed = _object_or_nothing(path)
        if not all(isinstance(id, int) and id >= 0 for id in listed.values()):
            raise ModelError(f"{path}: expected tokens with their ids")
        found = {token: (id, token in special) for token, id in listed.items()}
    new = {token: entry for token, entry in found.items() if token not in known}
    return AddedTokens(
        ids={token: id for token, (id, special) in new.items() if not special},
        special={token: id for token, (id, special) in new.items() if special},
    )


def _described(path: Path, described: Any) -> dict[str, tuple[int, bool]]:
    try:
        return {
            str(token["content"]): (int(id), bool(token.get("special")))
            for id, token in described.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: added_tokens_decoder must describe tokens by id") from error


def _parts(settings: Mapping[str, Any]) -> Iterator[str]:
    """Tokens that have a part of their own, as `pad_token` or as one of several others."""
    for key, value in settings.items():
        if key.endswith(("_token", "_special_tokens")):
            for token in value if isinstance(value, list) else [value]:
                yield str(token["content"] if isinstance(token, dict) else token)


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


def fairseq_tokenizer(path: Path, otherwise: str) -> PieceTokenizer:
    """A SentencePiece model with fairseq's ids: four special tokens, pieces, languages, `<mask>`.

    The first three of SentencePiece's own ids are fairseq's special tokens in another order and
    with `<pad>` among them, so that a piece's id is one more than SentencePiece says.

    Args:
        otherwise: the class where no file names one of `CLASSES`.

    Raises:
        ValueError: the file holds no SentencePiece model.
        ModelError: a file that names languages holds something else.
    """
    settings = read_settings(path.parent)
    convention = convention_of(settings) or CLASSES[otherwise]
    pieces = SentencePieceTokenizer.load(path)
    size = pieces.vocab_size
    vocabulary = {token: id for id, token in enumerate((BOS, PAD, EOS, UNK))}
    vocabulary |= {pieces.token(id): id + 1 for id in range(3, size)}
    codes = _stated_codes(path.parent, convention, settings)
    ids = {code: size + 1 + i for i, code in enumerate(codes)}
    names = {**ids, "<mask>": size + 1 + len(ids)}
    added = added_tokens(path.parent, vocabulary)
    # Files that say the ids of languages and of <mask> know better, as after a later addition.
    names = {token: id for token, id in names.items() if id not in added.names}
    names |= dict(added.special)
    ids = codes_among(names.items(), convention.pattern)
    languages = speak(convention, ids, vocabulary[EOS], settings)
    return PieceTokenizer(path, vocabulary, range(4), languages, names, added)


def _stated_codes(
    directory: Path, convention: Convention, settings: Mapping[str, Any]
) -> Sequence[str]:
    if convention.pattern is MBART.pattern:
        return (MBART50_CODES if convention.before else MBART_CODES).split()
    others = _object_or_nothing(directory / "special_tokens_map.json")
    for stated in (settings, others):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            tokens = stated.get(key) or []
            found = [str(t) for t in tokens if convention.pattern.fullmatch(str(t))]
            if found:
                return found
    return NLLB_CODES.split()


class PieceTokenizer:
    """SentencePiece cuts a text, a separate vocabulary gives the pieces their ids.

    Codes of languages have ids of their own; what the vocabulary does not hold is `<unk>`.

    Args:
        path: SentencePiece model.
        vocabulary: piece -> id.
        special: ids of it that add no text.
        languages: what it has of them, if it has any.
        names: token -> id of those, and of others that are no pieces and add no text.
        added: to the vocabulary, later.
    """

    suffix = ".spm"

    def __init__(
        self,
        path: Path,
        vocabulary: Mapping[str, int],
        special: Sequence[int],
        languages: Languages | None,
        names: Mapping[str, int],
        added: AddedTokens,
    ) -> None:
        self._file = SentencePieceTokenizer.load(path)
        self._cutter = self._file.backend
        self.languages = languages
        self.unk_id = vocabulary[UNK]
        self._vocabulary = vocabulary
        self._special = frozenset(special)
        self._added = added
        self._unsaid = self._special | {*names.values(), *added.special.values()}
        known = {id: piece for piece, id in [*names.items(), *vocabulary.items()]}
        self._pieces = known | added.names
        self._eos = vocabulary[EOS]

    @property
    def vocab_size(self) -> int:
        return max(self._pieces) + 1

    def encode(self, texts: Sequence[str], *, framed: bool = True) -> list[list[int]]:
        end = [self._eos] if framed else []
        return [[*self._added.encode(text, self._cut), *end] for text in texts]

    def _cut(self, text: str) -> list[int]:
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
