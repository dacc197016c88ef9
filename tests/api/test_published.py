"""Models as others publish them, through HTTP: texts, and what the model asks for by default."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from model.loader import load_model
from service.app import create_app
from service.cli import app
from service.settings import Settings
from tests.builders import make_byt5_model, make_marian_model

from .conftest import Api, serving

pytestmark = pytest.mark.anyio

PAD = 7


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_marian_model(
        tmp_path_factory.mktemp("marian"),
        num_beams=4,
        length_penalty=0.6,
        max_length=12,
        forced_eos_token_id=0,
        renormalize_logits=True,
    )


@pytest.fixture
async def api(directory: Path) -> AsyncIterator[Api]:
    model = load_model(directory, "cpu")
    async with serving(create_app(Settings(), {"marian": model})) as client:
        yield Api(client)


async def details(api: Api, **parameters: Any) -> dict[str, Any]:
    parameters["details"] = True
    answer = await api.post("/generate", inputs="ab ba", parameters=parameters)
    found: dict[str, Any] = answer["details"]
    return found


async def test_texts_go_in_and_come_out(api: Api) -> None:
    answer = await api.post("/generate", inputs=["ab ba", ">>xyz<< b", ""])
    assert [set(a) for a in answer] == [{"generated_text"}] * 3
    assert answer[2]["generated_text"] == ""
    tokenized = await api.post("/tokenize", inputs=">>xyz<< ab")
    assert tokenized["tokens"][0] == ">>xyz<<"
    assert tokenized["tokens"][-1] == "</s>"


async def ids_of(api: Api, text: str, **fields: Any) -> list[int]:
    found: list[int] = (await api.post("/tokenize", inputs=text, **fields))["ids"]
    return found


async def test_a_target_language_may_be_named_or_written(api: Api) -> None:
    [facts] = (await api.client.get("/info")).json()["models"]
    assert facts["languages"] == ["xyz"]
    assert (facts["default_src_lang"], facts["default_tgt_lang"]) == (None, None)
    written = await ids_of(api, ">>xyz<< ab ba")
    for code in ("xyz", ">>xyz<<"):
        assert await ids_of(api, "ab ba", tgt_lang=code) == written
        named = {"tgt_lang": code, "details": True}
        assert await api.post("/generate", inputs="ab ba", parameters=named) == await api.post(
            "/generate", inputs=">>xyz<< ab ba", parameters={"details": True}
        )
    inputs = ["ab ba", "ab ba"]
    several = await api.post("/logits", inputs=inputs, tgt_lang=["xyz", "xyz"], top_k=2)
    plain = await api.post("/logits", inputs="ab ba", top_k=2)
    assert several[0] == several[1] != plain
    assert (await ids_of(api, "ab ba")) == written[1:]
    empty = await api.post("/generate", inputs="", parameters={"tgt_lang": "xyz"})
    assert empty["generated_text"] == ""


@pytest.mark.parametrize(
    ("inputs", "parameters", "param", "message"),
    [
        ("ab", {"tgt_lang": "fr"}, "tgt_lang", 'got "fr"; there are xyz'),
        ("ab", {"tgt_lang": "xy"}, "tgt_lang", 'got "xy"; did you mean xyz?'),
        ("ab", {"src_lang": "xyz"}, "src_lang", "has no effect: this model is told the target's"),
        (">>xyz<< ab", {"tgt_lang": "xyz"}, "tgt_lang", 'exclude each other, got "xyz" and ">>xyz'),
    ],
)
async def test_languages_that_cannot_be_are_refused(
    inputs: str, parameters: dict[str, Any], param: str, message: str, api: Api
) -> None:
    refused = await api.refused("/generate", inputs=inputs, parameters=parameters)
    assert refused["param"] == f"parameters.{param}"
    assert message in refused["error"]


async def test_a_request_without_parameters_searches_with_the_models_beams(api: Api) -> None:
    default = await details(api)
    asked = await details(api, num_beams=4, length_penalty=0.6)
    assert default == asked
    assert default["score"] is not None
    assert default["generated_tokens"] <= 11


async def test_a_request_may_leave_the_search(api: Api) -> None:
    greedy = await details(api, num_beams=1)
    drawn = await details(api, seed=4)
    assert (greedy["score"], drawn["score"]) == (None, None)
    assert (greedy["seed"], drawn["seed"]) == (None, 4)
    several = await api.post("/generate", inputs="ab", parameters={"num_return_sequences": 3})
    assert len(several["sequences"]) == 3


async def test_pad_is_never_said(api: Api) -> None:
    for parameters in ({"num_beams": 1}, {"seed": 3}, {"bad_words": [[4]]}, {}):
        tokens = (await details(api, **parameters))["tokens"]
        assert PAD not in [token["id"] for token in tokens]


DEFAULTS = {
    "num_beams": 4,
    "length_penalty": 0.6,
    "forced_eos_token_id": 0,
    "bad_words": [[PAD]],
    "renormalize_logits": True,
}


async def test_info_tells_the_defaults(api: Api, directory: Path) -> None:
    response: httpx.Response = await api.client.get("/info")
    [model] = response.json()["models"]
    assert model["family"] == "marian"
    assert model["generation_defaults"] == DEFAULTS
    assert model["default_max_new_tokens"] == 11
    assert model["default_decoding"] == "beam_search"
    result = CliRunner().invoke(app, ["info", str(directory), "--json"])
    facts = json.loads(result.stdout)
    assert facts["generation_defaults"] == DEFAULTS
    assert facts["bytes"] > 1000
    assert facts.items() >= {k: model[k] for k in facts if k in model}.items()


async def test_default_beams_that_are_more_than_the_rows_are_refused_at_the_start(
    directory: Path,
) -> None:
    failures: list[str] = []
    for rows in (3, 4):
        settings = Settings(models=(f"mt={directory}",), max_rows=rows, device="cpu")
        models = create_app(settings, on_failure=failures.append).state.models
        await models.load()
        assert [model.name for model in models.served] == ["mt"] * (rows == 4)
        await models.stop()
    [failure] = failures
    assert failure.startswith("model mt: num_beams of its generation_config.json")
    assert "is 4, but max_rows is 3" in failure


TASKS = {
    "summarization": {
        "early_stopping": True,
        "length_penalty": 2.0,
        "max_length": 9,
        "min_length": 3,
        "no_repeat_ngram_size": 3,
        "num_beams": 4,
        "prefix": "summarize: ",
    },
    "translation_en_to_fr": {"max_length": 7, "prefix": "to French: "},
    "dialogue": {"num_beam_groups": 2},
    "broken": "some params",
}


@pytest.fixture
async def tasked(tmp_path: Path) -> AsyncIterator[Api]:
    make_byt5_model(tmp_path, max_length=30, num_beams=2)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task_specific_params": TASKS}))
    async with serving(create_app(Settings(), {"t5": load_model(tmp_path, "cpu")})) as client:
        yield Api(client)


async def test_a_task_is_a_prefix_and_defaults_under_the_request(tasked: Api) -> None:
    [facts] = (await tasked.client.get("/info")).json()["models"]
    assert facts["tasks"] == {
        "summarization": {
            **{k: v for k, v in TASKS["summarization"].items() if "_length" not in k},
            "max_new_tokens": 8,
            "min_new_tokens": 2,
        },
        "translation_en_to_fr": {"max_new_tokens": 6, "prefix": "to French: "},
    }
    spelled = {
        **{k: v for k, v in facts["tasks"]["summarization"].items() if k != "prefix"},
        "details": True,
    }
    for own in ({}, {"num_beams": 3}, {"max_new_tokens": 4, "length_penalty": 0.5}):
        named = {"task": "summarization", "details": True, **own}
        assert await tasked.post("/generate", inputs="ab", parameters=named) == await tasked.post(
            "/generate", inputs="summarize: ab", parameters=spelled | own
        )
    plain = {"max_new_tokens": 6, "num_beams": 2}
    answers = await tasked.post(
        "/generate",
        inputs=["ab", "ab", ""],
        parameters=[{"task": "translation_en_to_fr"}, plain, {"task": "summarization"}],
    )
    assert answers[0] == await tasked.post("/generate", inputs="to French: ab", parameters=plain)
    assert answers[0] != answers[1]
    assert answers[2]["generated_text"] == ""
    ids = [100, 101, 1]
    by_ids = {"task": "translation_en_to_fr", "details": True}
    bare = await tasked.post("/generate", input_ids=ids, parameters=by_ids)
    assert bare["details"]["input_tokens"] == 3
    assert bare["details"]["generated_tokens"] <= 6


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            "translation",
            "must be one of summarization, translation_en_to_fr, dialogue, broken, got "
            '"translation"',
        ),
        ("dialogue", "dialogue cannot be served: task_specific_params.dialogue: num_beam_groups"),
        ("broken", "task_specific_params.broken must be an object, got 'some params'"),
    ],
)
async def test_a_task_that_cannot_be_is_refused(task: str, message: str, tasked: Api) -> None:
    parameters = [{}, {"task": task}]
    refused = await tasked.refused("/generate", inputs=["a", "b"], parameters=parameters)
    assert refused["param"] == "parameters[1].task"
    assert message in refused["error"]


async def test_a_model_without_tasks_refuses_them(api: Api) -> None:
    [facts] = (await api.client.get("/info")).json()["models"]
    assert facts["tasks"] == {}
    refused = await api.refused("/generate", inputs="a", parameters={"task": "summarization"})
    assert "parameters.task needs a model with tasks" in refused["error"]


async def test_byt5_takes_and_gives_bytes(tmp_path: Path) -> None:
    model = load_model(make_byt5_model(tmp_path, max_length=30), "cpu")
    async with serving(create_app(Settings(), {"byt5": model})) as client:
        api = Api(client)
        tokenized = await api.post("/tokenize", inputs="é <extra_id_1>")
        assert tokenized["ids"] == [0xC3 + 3, 0xA9 + 3, 0x20 + 3, 260, 1]
        assert tokenized["tokens"][-2:] == ["<extra_id_1>", "</s>"]
        answers = await api.post(
            "/generate", inputs=["ab", "Über", ""], parameters={"details": True}
        )
        assert answers[2]["generated_text"] == ""
        assert all(answer["details"]["generated_tokens"] <= 29 for answer in answers)
        maps = await api.post("/attention", inputs="ab", targets="c")
        assert sum(maps["decoder"][0][0][-1]) == pytest.approx(1.0)
