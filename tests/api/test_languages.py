"""`src_lang` and `tgt_lang` through HTTP, with a small model in M2M100's format."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from model.loader import load_model
from service.app import create_app
from service.cli import app
from service.settings import Settings
from tests.builders import make_m2m_model

from .conftest import Api, serving

pytestmark = pytest.mark.anyio

CODES = 8
"""The first language's id."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_m2m_model(tmp_path_factory.mktemp("m2m"))


@pytest.fixture
async def speaking(directory: Path) -> AsyncIterator[Api]:
    async with serving(create_app(Settings(), {"m2m": load_model(directory, "cpu")})) as client:
        yield Api(client)


async def id_of(api: Api, code: str) -> int:
    info = (await api.client.get("/info")).json()
    return CODES + int(info["models"][0]["languages"].index(code))


async def test_info_lists_languages_and_defaults(speaking: Api, directory: Path) -> None:
    [model] = (await speaking.client.get("/info")).json()["models"]
    result = CliRunner().invoke(app, ["info", str(directory), "--json"])
    for facts in (model, json.loads(result.stdout)):
        assert len(facts["languages"]) == 100
        assert facts["languages"][:2] == ["af", "am"]
        assert (facts["default_src_lang"], facts["default_tgt_lang"]) == ("en", None)


async def test_a_model_without_languages_lists_none_and_refuses_them(api: Api) -> None:
    info = (await api.client.get("/info")).json()
    assert [model["languages"] for model in info["models"]] == [[], []]
    for field in ("src_lang", "tgt_lang"):
        refused = await api.refused("/generate", inputs="cat", parameters={field: "en"})
        assert refused["param"] == f"parameters.{field}"
        assert "needs a model with languages" in refused["error"]
        for path, more in (
            ("/logits", {}),
            ("/next", {}),
            ("/score", {"targets": "a"}),
            ("/attention", {}),
            ("/tokenize", {"side": "source" if field == "src_lang" else "target"}),
        ):
            refused = await api.refused(path, inputs="a", **{field: "en"}, **more)
            assert refused["param"] == field


async def test_each_input_of_a_list_has_its_own_languages(speaking: Api) -> None:
    parameters = [
        {"src_lang": "de", "tgt_lang": "ja", "details": True, "max_new_tokens": 5},
        {"src_lang": "ja", "tgt_lang": "de", "details": True, "max_new_tokens": 5},
    ]
    answers = await speaking.post("/generate", inputs=["ab", "ab"], parameters=parameters)
    for answer, asked in zip(answers, parameters, strict=True):
        first = answer["details"]["tokens"][0]
        assert first["id"] == await id_of(speaking, str(asked["tgt_lang"]))
        assert (first["text"], first["special"]) == (f"__{asked['tgt_lang']}__", True)
        alone = await speaking.post("/generate", inputs="ab", parameters=asked)
        for one, other in zip(alone["details"]["tokens"], answer["details"]["tokens"], strict=True):
            assert one["id"] == other["id"]
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)


async def test_generated_text_holds_no_language(speaking: Api) -> None:
    answer = await speaking.post(
        "/generate", inputs="ab", parameters={"tgt_lang": "fr", "max_new_tokens": 1}
    )
    assert answer == {"generated_text": ""}


async def test_a_target_prefix_stands_behind_the_language(speaking: Api) -> None:
    french = await id_of(speaking, "fr")
    common = {"max_new_tokens": 4, "details": True}
    told = await speaking.post(
        "/generate",
        inputs="ab",
        parameters={
            "tgt_lang": "fr",
            "target_prefix": "a",
            "return_full_text": True,
            **common,
        },
    )
    same = await speaking.post(
        "/generate", inputs="ab", parameters={"target_prefix_ids": [french, 4, 6], **common}
    )
    assert told["details"]["tokens"] == same["details"]["tokens"]
    assert told["generated_text"].startswith("a")


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("deu", "; did you mean de"),
        ("EN", "; did you mean en"),
        ("1", "; there are af, am, ar"),
    ],
)
async def test_an_unknown_language_is_refused_with_what_may_be_meant(
    speaking: Api, code: str, hint: str
) -> None:
    for field in ("src_lang", "tgt_lang"):
        body = {"tgt_lang": "en", field: code}
        refused = await speaking.refused("/generate", inputs="ab", parameters=body)
        assert refused["param"] == f"parameters.{field}"
        assert f"must be a language of this model, got {json.dumps(code)}" in refused["error"]
        assert hint in refused["error"]


async def test_a_text_needs_a_target_language_where_the_model_has_no_default(
    speaking: Api,
) -> None:
    refused = await speaking.refused("/generate", inputs="ab")
    assert refused["param"] == "parameters.tgt_lang"
    assert "must be given: one of af, am, ar" in refused["error"]
    assert "and 40 more, which /info lists" in refused["error"]
    refused = await speaking.refused("/score", inputs="ab", targets=["a"])
    assert refused["param"] == "tgt_lang"
    # Who forces the first token, or gives ids, has said it.
    for parameters in ({"forced_bos_token_id": 9}, {"target_prefix_ids": [9]}):
        await speaking.post("/generate", inputs="ab", parameters=parameters)
    await speaking.post("/generate", input_ids=[9, 4, 2])


async def test_languages_say_nothing_of_ids(speaking: Api) -> None:
    refused = await speaking.refused(
        "/generate", input_ids=[8, 4, 2], parameters={"src_lang": "en", "tgt_lang": "fr"}
    )
    assert refused["param"] == "parameters.src_lang"
    both = {"tgt_lang": "fr", "target_prefix_ids": [9]}
    assert "put 33 first" in (await speaking.refused("/generate", inputs="ab", parameters=both))[
        "error"
    ].replace(str(await id_of(speaking, "fr")), "33")
    refused = await speaking.refused("/score", inputs="a", target_ids=[4, 2], tgt_lang="fr")
    assert refused["param"] == "tgt_lang"
    both = {"tgt_lang": "fr", "forced_bos_token_id": 9}
    refused = await speaking.refused("/generate", inputs="ab", parameters=both)
    assert refused["param"] == "parameters.tgt_lang"


async def test_ids_go_with_a_target_language(speaking: Api) -> None:
    parameters = {"tgt_lang": "fr", "details": True, "max_new_tokens": 3}
    answer = await speaking.post("/generate", input_ids=[8, 4, 2], parameters=parameters)
    assert answer["details"]["tokens"][0]["id"] == await id_of(speaking, "fr")


async def test_a_score_begins_with_the_language(speaking: Api) -> None:
    french, german = await id_of(speaking, "fr"), await id_of(speaking, "de")
    told = await speaking.post(
        "/score", inputs="ab", targets=["a", "a"], src_lang="ja", tgt_lang=["fr", "de"]
    )
    assert [[t["id"] for t in answer["tokens"]] for answer in told] == [
        [french, 4, 6, 2],
        [german, 4, 6, 2],
    ]
    assert told[0]["tokens"][0]["special"]
    source = (await speaking.post("/tokenize", inputs="ab", src_lang="ja"))["ids"]
    same = await speaking.post("/score", input_ids=source, target_ids=[french, 4, 6, 2])
    assert told[0] == same


async def test_a_greedy_answer_scores_what_its_tokens_sum_to(speaking: Api) -> None:
    parameters = {"tgt_lang": "fr", "details": True, "max_new_tokens": 6}
    answer = await speaking.post("/generate", inputs="ab", parameters=parameters)
    tokens = answer["details"]["tokens"]
    scored = await speaking.post(
        "/score", inputs="ab", target_ids=[token["id"] for token in tokens]
    )
    assert scored["logprob_sum"] == pytest.approx(sum(t["logprob"] for t in tokens), abs=1e-4)


async def test_looking_inside_begins_targets_with_the_language(speaking: Api) -> None:
    french = await id_of(speaking, "fr")
    logits = await speaking.post("/logits", inputs="ab", targets=["a", "b"], tgt_lang="fr", top_k=3)
    assert [answer["target_ids"] for answer in logits] == [[2, french, 4, 6], [2, french, 5]]
    first = await speaking.post("/logits", inputs="ab", top_k=3)
    assert first["target_ids"] == [2]
    told = await speaking.post("/logits", inputs="ab", top_k=3, tgt_lang="fr")
    assert told["target_ids"] == [2, french]
    following = await speaking.post("/next", inputs="ab", tgt_lang="fr", top_k=3)
    assert [token["id"] for token in following["tokens"]] == told["ids"]
    maps = await speaking.post("/attention", inputs="ab", src_lang="de", tgt_lang="fr")
    assert maps["source_tokens"][0] == "__de__"
    assert maps["target_tokens"] == ["</s>", "__fr__"]


async def test_tokenize_shows_what_the_model_is_given(speaking: Api) -> None:
    async def tokens(**body: Any) -> list[str]:
        answer = await speaking.post("/tokenize", inputs="a", **body)
        found: list[str] = answer["tokens"]
        return found

    assert await tokens() == ["__en__", "▁", "a", "</s>"]
    assert await tokens(src_lang="__de__") == ["__de__", "▁", "a", "</s>"]
    assert await tokens(side="target", tgt_lang="fr") == ["__fr__", "▁", "a", "</s>"]
    for body in ({"tgt_lang": "fr"}, {"side": "target", "src_lang": "fr"}):
        refused = await speaking.refused("/tokenize", inputs="a", **body)
        assert refused["param"] in body


async def test_languages_pair_up_with_inputs_and_answers(speaking: Api) -> None:
    refused = await speaking.refused("/logits", inputs=["a", "b"], src_lang=["en"])
    assert refused["error"] == "src_lang has 1 entries, but there are 2 inputs"
    refused = await speaking.refused(
        "/score", inputs="a", targets=["a", "b"], tgt_lang=["en", "de", "fr"]
    )
    assert refused["error"] == "tgt_lang has 3 entries, but there are 2 answers"
    refused = await speaking.refused("/logits", inputs=["a", "b"], src_lang=["en", "xx"])
    assert refused["param"] == "src_lang[1]"


async def test_an_empty_text_is_empty_and_cutting_keeps_the_frame(speaking: Api) -> None:
    parameters = {"tgt_lang": "fr", "details": True}
    answer = await speaking.post("/generate", inputs="", parameters=parameters)
    assert answer["generated_text"] == ""
    assert answer["details"]["finish_reason"] == "eos_token"
    cut = await speaking.post("/generate", inputs="ab ab", parameters={"truncate": 3, **parameters})
    assert cut["details"]["input_tokens"] == 3
    assert cut["details"]["truncated"]
