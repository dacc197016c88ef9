"""Which model translates what, and what it is told."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from model.checkpoint import ModelError
from model.config import Task
from model.languages import Languages
from model.loader import LoadedModel, load_model
from seqserve.errors import InvalidRequestError
from service.settings import Pair
from service.translation import Direction, Directions, Translator, directions_of
from tests.builders import make_native_model


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model with tokenizers and without languages."""
    return load_model(make_native_model(tmp_path_factory.mktemp("native")), "cpu")


def speaking(plain: LoadedModel, **languages: Any) -> LoadedModel:
    """The same with two languages."""
    ids = {"eng_Latn": 7, "deu_Latn": 8}
    return replace(plain, languages=Languages(ids=ids, eos_id=1, before=True, **languages))


NAMED = {"en": "eng_Latn", "de": "deu_Latn"}
UNTOLD = {"en": None, "de": None}
EN_DE = Pair("en", "de", "m")


def test_a_model_that_is_told_both_languages_needs_no_pair(plain: LoadedModel) -> None:
    assert directions_of("m", plain, []) == []
    assert directions_of("m", speaking(plain), []) == [Directions("m", NAMED, NAMED)]
    small100 = speaking(plain, source_names="tgt_lang", target="none")
    assert directions_of("m", small100, []) == [Directions("m", UNTOLD, NAMED)]


def test_a_model_that_does_not_say_what_it_reads_needs_pairs(plain: LoadedModel) -> None:
    one_direction = speaking(plain, target="start")
    assert directions_of("m", one_direction, []) == []
    [told] = directions_of("m", one_direction, [EN_DE])
    assert told == Directions("m", {"en": "eng_Latn"}, {"de": "deu_Latn"})
    marian = speaking(
        plain, source_names="tgt_lang", target="none", written=re.compile(">>(.*?)<<")
    )
    assert directions_of("m", marian, []) == []
    [told] = directions_of("m", marian, [Pair("fr", "mul", "m")])
    assert told == Directions("m", {"fr": None}, NAMED)


def test_pairs_narrow_what_a_model_translates(plain: LoadedModel) -> None:
    pairs = [Pair("eng", "mul", "m"), Pair("mul", "en", "m")]
    assert directions_of("m", speaking(plain), pairs) == [
        Directions("m", {"en": "eng_Latn"}, NAMED),
        Directions("m", NAMED, {"en": "eng_Latn"}),
    ]


def test_a_pair_asks_for_the_task_of_its_name(plain: LoadedModel) -> None:
    tasks = {"translation_en_to_de": Task(), "translation_en_to_fr": Task(fault="not here")}
    t5 = replace(plain, spec=replace(plain.spec, tasks=tasks))
    told = directions_of("m", t5, [EN_DE, Pair("en", "fr", "m")])
    assert [each.task for each in told] == ["translation_en_to_de", None]


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (Pair("mul", "de", "m"), "mul needs a model that names its languages"),
        (Pair("en", "qq", "m"), "qq is no language of ISO 639"),
    ],
)
def test_a_pair_of_no_languages_is_refused(plain: LoadedModel, pair: Pair, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        directions_of("m", plain, [pair])


def test_the_first_model_of_a_pair_has_it() -> None:
    translator = Translator(
        [Directions("pair", {"en": None}, {"de": None}), Directions("all", NAMED, NAMED)]
    )
    assert translator.find("en", "de") == Direction("en", "de", "pair", None, None, None)
    assert translator.find("deu_Latn", "en-GB") == Direction(
        "de", "en", "all", None, "deu_Latn", "eng_Latn"
    )
    assert translator.languages == {"en": ["de"], "de": ["en"]}


@pytest.mark.parametrize(
    ("source", "target", "param"),
    [("fr", "de", "source"), ("en", "fr", "target"), ("en", "en", "target")],
)
def test_a_refusal_names_the_language_at_fault(source: str, target: str, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Translator([Directions("all", NAMED, NAMED)]).find(source, target)
    assert caught.value.param == param
