"""Codes of languages, whatever a model calls them."""

from __future__ import annotations

import pytest

from model.multilingual import MBART50_CODES, NLLB_CODES
from service.language_codes import (
    codes_of,
    has_spaces,
    known_code,
    language_code,
    language_name,
)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("en", "en"),
        ("EN", "en"),
        ("eng_Latn", "en"),
        ("en_XX", "en"),
        ("en-US", "en"),
        ("deu", "de"),
        ("de_DE", "de"),
        ("arb_Arab", "ar"),
        ("kor_Hang", "ko"),
        ("srp_Cyrl", "sr"),
        ("zho_Hant", "zh-Hant"),
        ("zh", "zh-Hans"),
        ("zh_CN", "zh-Hans"),
        ("zh-TW", "zh-Hant"),
        ("zt", "zh-Hant"),
        ("pb", "pt"),
        ("iw", "he"),
        ("no", "nb"),
        ("tgl_Latn", "tl"),
        ("pbt_Arab", "ps"),
        ("ace_Arab", "ace-Arab"),
        ("auto", None),
        ("English", None),
        ("qq", None),
        ("", None),
        ("en_", None),
        ("e\u0301n", None),
    ],
)
def test_one_language_has_one_code(name: str, code: str | None) -> None:
    assert language_code(name) == code


def test_every_language_of_a_model_has_a_code_of_its_own() -> None:
    nllb = codes_of(NLLB_CODES.split())
    # ISO 639 took South Levantine Arabic into North Levantine.
    assert set(NLLB_CODES.split()) - set(nllb.values()) == {"ajp_Arab"}
    assert (nllb["fa"], nllb["prs"]) == ("pes_Arab", "prs_Arab")
    assert (nllb["zh-Hans"], nllb["zh-Hant"]) == ("zho_Hans", "zho_Hant")
    assert len(codes_of(MBART50_CODES.split())) == 52


def test_the_plainer_of_two_names_is_taken() -> None:
    assert codes_of(["pt_br", "pt", "fr_FR", "fra"]) == {"pt": "pt", "fr": "fra"}


def test_a_caller_may_leave_the_script_out() -> None:
    nllb = codes_of(NLLB_CODES.split())
    assert known_code("zh", nllb) == "zh-Hans"
    assert known_code("zh-TW", nllb) == "zh-Hant"
    assert known_code("crh", ["crh-Latn"]) == "crh-Latn"
    assert known_code("zh-Hant", ["zh-Hans"]) is None
    assert known_code("auto", nllb) is None


def test_languages_have_english_names() -> None:
    codes = ("de", "zh-Hant", "sw", "el", "tzm-Tfng", "sat-Olck")
    assert [language_name(code) for code in codes] == [
        "German",
        "Chinese (traditional)",
        "Swahili",
        "Greek",
        "Central Atlas Tamazight (Tifinagh)",
        "Santali (Olck)",
    ]


def test_some_languages_have_no_spaces_between_sentences() -> None:
    assert [code for code in ("en", "ja", "zh-Hans", "th", "ko", "ar") if not has_spaces(code)] == [
        "ja",
        "zh-Hans",
        "th",
    ]
