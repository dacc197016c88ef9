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
