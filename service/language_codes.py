"""Codes under which callers know languages, whatever a model calls them.

Translation services speak ISO 639-1, with a script where a language has several: `en`, `zh-Hans`.
NLLB says `eng_Latn`, mBART `en_XX`, M2M100 `en`, Marian `eng`. Unicode's tables, which `langcodes`
holds, say which of them are one; names in English are those of ISO 639, from `iso639`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cache

from iso639 import Lang
from iso639.exceptions import DeprecatedLanguageValue, InvalidLanguageValue
from langcodes import Language, standardize_tag

USUAL = {
    "fil": "tl",
    "no": "nb",
    "ns": "nso",
    "pb": "pt",
    "pbt": "ps",
    "quy": "qu",
    "zt": "zh-Hant",
}
"""Codes that callers or models use for what is listed under another. `pb` and `zt` are Brazilian
Portuguese and traditional Chinese to older clients of LibreTranslate, `ns` is M2M100's, `pbt` and
`quy` are the Pashto and the Quechua of NLLB."""

ALWAYS_WITH_SCRIPT = frozenset({"zh"})
"""Languages whose usual script is told too."""

SAME_SCRIPT = {"Hang": "Kore"}
"""Scripts that are part of another one, which is the usual name of both."""

NAMES = {
    "el": "Greek",
    "ky": "Kyrgyz",
    "nso": "Northern Sotho",
    "or": "Odia",
    "pa": "Punjabi",
    "ps": "Pashto",
    "ug": "Uyghur",
    "yue": "Cantonese",
}
"""Names more usual than those of ISO 639."""

SCRIPTS = {
    "Arab": "Arabic",
    "Beng": "Bengali",
    "Cyrl": "Cyrillic",
    "Deva": "Devanagari",
    "Hans": "simplified",
    "Hant": "traditional",
    "Latn": "Latin",
    "Tfng": "Tifinagh",
}
"""Script -> what follows a language's name; others go by their codes."""

UNSPACED = frozenset({"Bopo", "Hans", "Hant", "Jpan", "Khmr", "Laoo", "Mymr", "Thai", "Tibt"})
"""Scripts without spaces between sentences."""


NAME = re.compile(
    r"(?P<language>[a-z]{2,3})([-_](?P<script>[a-z]{4}))?([-_](?P<region>[a-z]{2}|[0-9]{3}))?",
    re.IGNORECASE | re.ASCII,
)
"""A language, its script, a region. (A caller's name has this shape before `langcodes` sees any of
it, which remembers whatever it is asked.)"""

TRADITIONAL = frozenset({"HK", "MO", "TW"})
"""Regions in which Chinese is written in traditional characters."""


def language_code(name: str) -> str | None:
    """The code of a language that goes by any of its names; None where it is no language.

    Regions are dropped, as models do not tell them apart.

    >>> [language_code(name) for name in ("eng_Latn", "de_DE", "arb_Arab", "zh-TW", "zh")]
    ['en', 'de', 'ar', 'zh-Hant', 'zh-Hans']
    """
    match = NAME.fullmatch(USUAL.get(name, name))
    base = _base(match["language"].lower()) if match else None
    if match is None or base is None:
        return None
    language, usual = base
    script = (match["script"] or "").title() or usual
    if language == "zh" and not match["script"] and (match["region"] or "").upper() in TRADITIONAL:
        script = "Hant"
    script = SAME_SCRIPT.get(script, script)
    told = script != usual or language in ALWAYS_WITH_SCRIPT
    return f"{language}-{script}" if told else language


def codes_of(names: Iterable[str]) -> dict[str, str]:
    """Code -> how a model calls the language, for all that it has.

    Where two have one code (Persian and Dari, `pes_Arab` and `prs_Arab`), the first one gets it,
    and the other its own. Shorter names come first, so that `pt` is `pt` rather
    than `pt_br`. What is no language of ISO 639 is left out.
    """
    found: dict[str, str] = {}
    for name in sorted(names, key=len):
        code = language_code(name)
        if code in found:
            code = name.partition("_")[0]
        if code:
            found.setdefault(code, name)
    return found


def known_code(code: str, codes: Collection[str]) -> str | None:
    """Which of some codes a caller means; None if none of them.

    A code without a script is any of that language, if the usual one is not there.

    >>> known_code("zh-TW", ["en", "zh-Hans", "zh-Hant"])
    'zh-Hant'
    """
    if code in codes:
        return code
    meant = language_code(code)
    if meant is None or meant in codes:
        return meant
    return next((each for each in codes if each.partition("-")[0] == meant), None)


def language_name(code: str) -> str:
    """The English name of a language: `German`, `Chinese (simplified)`."""
    language, _, script = code.partition("-")
    entry = _entry(language)
    name = entry.name.partition(" (")[0] if entry else language  # Swahili (macrolanguage)
    name = NAMES.get(language, name)
    return f"{name} ({SCRIPTS.get(script, script)})" if script else name


def has_spaces(code: str) -> bool:
    """Whether a space stands between two sentences of a language."""
    language, _, script = code.partition("-")
    base = _base(language)
    return (script or (base and base[1])) not in UNSPACED


@cache
def _base(language: str) -> tuple[str, str] | None:
    """The usual code of a language, and what it is usually written in; None if it is none.

    Args:
        language: two or three letters.
    """
    tag = Language.get(standardize_tag(USUAL.get(language, language), macro=True))
    code = USUAL.get(tag.language or "", tag.language)
    if code is None or _entry(code) is None:
        return None
    return code, tag.maximize().script or "Latn"


@cache
def _entry(language: str) -> Lang | None:
    """What ISO 639 says of a code of two or three letters."""
    try:
        return Lang(language)
    except (InvalidLanguageValue, DeprecatedLanguageValue):
        return None
