"""LibreTranslate's API: languages, sentences, forms, keys and errors of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from model.loader import LoadedModel, load_model
from seqserve.schemas import GenerateRequest
from service.app import create_app
from service.generation import Generator
from service.settings import Settings
from tests.builders import make_m2m_model, make_marian_model

from .conftest import serving

pytestmark = pytest.mark.anyio

FORM = {"content-type": "application/x-www-form-urlencoded"}
EN_FR = {"source": "en", "target": "fr"}


@pytest.fixture(scope="module")
def m2m(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """One that says letters, rather than its hundred languages."""
    directory = make_m2m_model(tmp_path_factory.mktemp("m2m"), seed=1)
    silent = [0, 1, 3, *range(8, 116)]
    defaults = {"bad_words_ids": [[id] for id in silent], "min_new_tokens": 4, "max_new_tokens": 8}
    (directory / "generation_config.json").write_text(json.dumps(defaults))
    return load_model(directory, "cpu")


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """One that knows a target's language by `>>fra<<`."""
    directory = make_marian_model(tmp_path_factory.mktemp("marian"))
    vocabulary = directory / "vocab.json"
    vocabulary.write_text(vocabulary.read_text().replace(">>xyz<<", ">>fra<<"))
    return load_model(directory, "cpu")


@pytest.fixture
async def speaking(m2m: LoadedModel) -> AsyncIterator[httpx.AsyncClient]:
    settings = Settings(max_beams=4, max_inputs=5)
    async with serving(create_app(settings, {"m2m": m2m})) as client:
        yield client


async def translated(client: httpx.AsyncClient, q: Any, **fields: Any) -> Any:
    response = await client.post("/translate", json={"q": q, **EN_FR, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def refused(client: httpx.AsyncClient, status: int = 400, **fields: Any) -> str:
    response = await client.post("/translate", json={"q": "a", **EN_FR, **fields})
    assert response.status_code == status, response.text
    [(name, message)] = response.json().items()
    assert name == "error"
    return str(message)


async def generated(client: httpx.AsyncClient, text: str, **parameters: Any) -> Any:
    languages = {"src_lang": "en", "tgt_lang": "fr"}
    body = {"inputs": text, "parameters": {**languages, **parameters}}
    return (await client.post("/generate", json=body)).json()


# --- translations --------------------------------------------------------------------------------


async def test_a_text_is_what_generate_says_in_that_language(speaking: httpx.AsyncClient) -> None:
    expected = (await generated(speaking, "Ba b!"))["generated_text"]
    assert await translated(speaking, "Ba b!") == {"translatedText": expected}
    other = await generated(speaking, "Ba b!", tgt_lang="de")
    assert other["generated_text"] != expected  # or the language would not matter
    response = await speaking.post("/translate", json={"q": "Ba b!", **EN_FR, "target": "deu_Latn"})
    assert response.json() == {"translatedText": other["generated_text"]}
    assert int(response.headers["x-generated-tokens"]) > 0


async def test_sentences_are_translated_apart_and_white_space_is_kept(
    speaking: httpx.AsyncClient,
) -> None:
    first, second = [(await generated(speaking, s))["generated_text"] for s in ("ab.", "Ba b!")]
    told = await translated(speaking, " ab.\r\n\r\n\tBa b! \n")
    assert told == {"translatedText": f" {first}\r\n\r\n\t{second} \n"}
    told = await translated(speaking, ["ab. Ba b!", "", " \n", "Ba b!"])
    assert told == {"translatedText": [f"{first} {second}", "", " \n", second]}


async def test_an_identity_gives_the_text_back_byte_for_byte(
    speaking: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[GenerateRequest] = []
    plan, answer = Generator.plan, Generator.answer

    def watch(self: Generator, request: GenerateRequest) -> Any:
        planned.append(request)
        return plan(self, request)

    def echo(self: Generator, plan: Any, events: Any) -> Any:
        [request] = planned
        text = (request.texts or [])[int(plan.source.place.strip("inputs[]"))]
        return answer(self, plan, events).model_copy(update={"generated_text": text})

    monkeypatch.setattr(Generator, "plan", watch)
    monkeypatch.setattr(Generator, "answer", echo)
    text = "\ufeff Ab a.\u00a0\u00a0B!\r\n\n\n  «A b.» ba\u2028b\u200b \t"
    assert (await translated(speaking, text))["translatedText"].encode() == text.encode()
    assert len(planned) == 1  # one batch


async def test_a_sentence_over_the_model_s_length_is_cut_or_refused(
    speaking: httpx.AsyncClient,
) -> None:
    long = "ab " * 39 + "ab"
    assert "takes at most 40" in (await generated(speaking, long))["error"]
    told = (await translated(speaking, long))["translatedText"]
    assert told.count(" ") >= 1
    message = await refused(speaking, q=["a", "ab" * 40])
    assert message.startswith("q[1] has a sentence of ")
    assert "takes at most 40 (max_source_tokens)" in message


async def test_alternatives_are_a_search_s_next_best(speaking: httpx.AsyncClient) -> None:
    beams = {"num_beams": 3, "num_return_sequences": 3}
    told = [s["generated_text"] for s in (await generated(speaking, "Ba b!", **beams))["sequences"]]
    answer = await translated(speaking, "Ba b!", alternatives=2)
    assert answer["translatedText"] == told[0]
    assert answer["alternatives"] == [t for t in dict.fromkeys(told) if t not in ("", told[0])]
    assert answer["alternatives"]
    several = await translated(speaking, ["Ba b!", " "], alternatives=2)
    assert several["alternatives"] == [answer["alternatives"], []]
    message = await refused(speaking, alternatives=4)
    assert message == "alternatives must be at most 3 (max_beams), got 4"


async def test_sentences_of_one_request_are_limited_as_inputs_are(
    speaking: httpx.AsyncClient,
) -> None:
    assert "q comes to 6 sentences, at most 5" in await refused(speaking, q="Ab. " * 6)
    assert "q has 6 entries, at most 5" in await refused(speaking, q=["a"] * 6)


# --- languages -----------------------------------------------------------------------------------


async def test_languages_are_listed_with_names_and_targets(speaking: httpx.AsyncClient) -> None:
    listed = (await speaking.get("/languages")).json()
    assert len(listed) == 100
    assert (listed[0]["code"], listed[0]["name"]) == ("en", "English")
    assert [entry["name"] for entry in listed[1:]] == sorted(e["name"] for e in listed[1:])
    assert len(listed[0]["targets"]) == 99
    assert "en" not in listed[0]["targets"]
    settings = (await speaking.get("/frontend/settings")).json()
    assert settings["charLimit"] == 100_000
    assert settings["language"]["source"] == {"code": "en", "name": "English"}
    assert not settings["keyRequired"]


async def test_pairs_of_several_models_make_a_translator(
    m2m: LoadedModel, marian: LoadedModel, native: LoadedModel
) -> None:
    models = {"spell": native, "marian": marian, "m2m": m2m}
    pairs = ("en-de=spell", "en-fr=marian", "de-mul=m2m")
    async with serving(create_app(Settings(pairs=pairs), models)) as client:
        listed = {e["code"]: e["targets"] for e in (await client.get("/languages")).json()}
        assert list(listed) == ["en", "de"]
        assert listed["en"] == ["de", "fr"]
        assert len(listed["de"]) == 99
        spelled = (await client.post("/generate", json={"inputs": "cat"})).json()["generated_text"]
        told = await translated(client, "cat", target="de")
        assert told == {"translatedText": spelled}
        named = {"model": "marian", "inputs": "ab", "parameters": {"tgt_lang": "fra"}}
        expected = (await client.post("/generate", json=named)).json()["generated_text"]
        assert await translated(client, "ab") == {"translatedText": expected}
        message = await refused(client, source="en", target="it")
        assert message.startswith('target must be a language that "en" is translated to')


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("en-de=other", "names no model"),
        ("en-qq=native", "qq is no language of ISO 639"),
        ("mul-de=native", "mul needs a model that names its languages"),
        ("en-tlh=m2m", "tlh is no language of this model"),
        ("en-de=tutorial", "no tokenizer"),
    ],
)
async def test_a_pair_that_cannot_be_is_refused_at_the_start(
    pair: str, message: str, m2m: LoadedModel, models: dict[str, LoadedModel]
) -> None:
    failures: list[str] = []
    try:
        app = create_app(Settings(pairs=(pair,)), {**models, "m2m": m2m}, failures.append)
    except ValueError as error:
        failures.append(str(error))
    else:
        async with serving(app):
            pass
    assert [message in failure for failure in failures] == [True]


async def test_nothing_translates_where_no_model_knows_languages(client: httpx.AsyncClient) -> None:
    assert (await client.get("/languages")).json() == []
    assert (await client.get("/frontend/settings")).json()["language"] is None
    assert "no model of this server translates" in await refused(client)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "auto"}, "does not detect languages"),
        ({"source": "tlh"}, "source must be a language of this server (/languages lists them), "),
        ({"target": "xx"}, "target must be a language of this server (/languages lists them), "),
        ({"target": "en"}, 'target must be a language that "en" is translated to'),
        ({"format": "html"}, 'format must be "text", got "html"'),
        ({"alternatives": -1}, "alternatives must be at least 0, got -1"),
        ({"q": 5}, "q must be a string, or a list of them, got 5"),
        ({"glossary": "x"}, "glossary is not a known field"),
        ({"q": None}, "q is missing"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    speaking: httpx.AsyncClient, fields: dict[str, Any], message: str
) -> None:
    assert message in await refused(speaking, **fields)


async def test_languages_are_not_detected(speaking: httpx.AsyncClient) -> None:
    response = await speaking.post("/detect", json={"q": "bonjour"})
    assert response.status_code == 400
    assert "does not detect languages" in response.json()["error"]


# --- bodies --------------------------------------------------------------------------------------


async def test_forms_are_read_as_json_is(speaking: httpx.AsyncClient) -> None:
    expected = await translated(speaking, ["ab.\nBa b!", "é"], alternatives=1)
    form = {"q": ["ab.\nBa b!", "é"], **EN_FR, "alternatives": "1", "format": "", "api_key": ""}
    assert (await speaking.post("/translate", data=form)).json() == expected
    one = await speaking.post("/translate", data={"q": "ab", **EN_FR})
    assert one.json() == await translated(speaking, "ab")
    curl = b' {"q": "ab", "source": "en", "target": "fr"}'  # which says that it is a form
    assert (await speaking.post("/translate", content=curl, headers=FORM)).json() == one.json()
    assert (await speaking.post("/translate", content=curl)).json() == one.json()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"q=%ff&source=en&target=fr", 400, "not valid UTF-8"),
        (b"q=a&source=en&source=de&target=fr", 400, '"source" stands more than once'),
        (b"q=a&source=en&target=fr&alternatives=two", 400, "alternatives must be an integer"),
        (b"q=a&source=en&target=fr&x=1", 400, "x is not a known field"),
        (b"a=&" * 30, 400, "more than 21 fields"),
        (b"", 400, "the body is empty"),
        (b"{", 400, "not valid JSON"),
    ],
)
async def test_a_form_that_is_none_is_refused(
    speaking: httpx.AsyncClient, body: bytes, status: int, message: str
) -> None:
    response = await speaking.post("/translate", content=body, headers=FORM)
    assert response.status_code == status
    assert response.json().keys() == {"error"}
    assert message in response.json()["error"]


async def test_other_bodies_and_methods_are_refused_in_this_api_s_words(
    speaking: httpx.AsyncClient,
) -> None:
    response = await speaking.post("/translate", files={"q": b"a"})
    assert (response.status_code, response.json().keys()) == (415, {"error"})
    response = await speaking.get("/translate")
    assert (response.status_code, response.json().keys()) == (405, {"error"})
    response = await speaking.post("/translate", content=b" " * 5_000_000)
    assert (response.status_code, response.json().keys()) == (413, {"error"})


# --- keys ----------------------------------------------------------------------------------------

Send = Callable[[str], dict[str, Any]]


@pytest.mark.parametrize(
    "send",
    [
        lambda key: {"json": {"q": "a", **EN_FR, "api_key": key}},
        lambda key: {"data": {"q": "a", **EN_FR, "api_key": key}},
        lambda key: {"json": {"q": "a", **EN_FR}, "headers": {"authorization": f"Bearer {key}"}},
        lambda key: {"json": {"q": "a", **EN_FR}, "headers": {"x-api-key": key}},
    ],
)
async def test_a_key_may_be_in_the_body(
    m2m: LoadedModel, monkeypatch: pytest.MonkeyPatch, send: Send
) -> None:
    monkeypatch.setenv("SEQSERVE_API_KEYS", "sk-one")
    async with serving(create_app(Settings(), {"m2m": m2m})) as client:
        assert (await client.post("/translate", **send("sk-one"))).status_code == 200
        for key in ("sk-wrong", ""):
            for path in ("/translate", "/detect"):
                response = await client.post(path, **send(key))
                assert response.status_code == 403
                assert response.json().keys() == {"error"}
                assert "sk-wrong" not in response.text
        assert (await client.get("/languages")).status_code == 200
        assert (await client.get("/frontend/settings")).json()["keyRequired"]
        body = {"inputs": "a", "api_key": "sk-one"}  # nowhere else
        assert (await client.post("/generate", json=body)).status_code == 401


async def test_a_request_is_in_the_metrics(speaking: httpx.AsyncClient) -> None:
    await translated(speaking, "ab. Ba b!")
    metrics = (await speaking.get("/metrics")).text
    [line] = [
        line
        for line in metrics.splitlines()
        if 'route="/translate"' in line and "requests_total" in line
    ]
    assert 'model_name="m2m"' in line or 'model="m2m"' in line


async def test_a_deadline_holds(m2m: LoadedModel) -> None:
    async with serving(create_app(Settings(timeout=1e-6), {"m2m": m2m})) as client:
        assert "timeout" in await refused(client, status=504)
