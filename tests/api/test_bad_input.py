"""Bad input of every kind gets a clear refusal, and the next request works."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from model.loader import LoadedModel
from seqserve.parameters import FOREIGN_NO_OPS, GenerationParameters
from seqserve.schemas import (
    DetokenizeRequest,
    GenerateRequest,
    LogitsRequest,
    NextRequest,
    TokenizeRequest,
)
from service.app import create_app
from service.settings import Settings

from .conftest import Api, serving

pytestmark = pytest.mark.anyio

GENERATE: list[tuple[dict[str, Any], str | None, str]] = [
    # body, param, what the message says
    ({}, "inputs", "inputs (text) or input_ids (token ids) must be given"),
    ({"inputs": "a", "input_ids": [5]}, "inputs", "exclude each other"),
    ({"inputs": None}, "inputs", "must be given"),
    ({"inputs": 5}, "inputs", "inputs must be a string, or a list of them, got 5"),
    ({"inputs": {"a": 1}}, "inputs", 'got {"a":1}'),
    ({"inputs": []}, "inputs", "inputs must be a list of at least one element, got []"),
    ({"inputs": ["a", 7]}, "inputs[1]", "inputs[1] must be a string, got 7"),
    ({"inputs": ["a", None]}, "inputs[1]", "got null"),
    ({"inputs": [["a"]]}, "inputs[0]", "must be a string"),
    ({"input_ids": []}, "input_ids", "at least one element"),
    ({"input_ids": "5"}, "input_ids", "input_ids must be a list"),
    ({"input_ids": [1.5]}, "input_ids[0]", "input_ids[0] must be an integer, got 1.5"),
    ({"input_ids": [True]}, "input_ids[0]", "must be an integer, got true"),
    ({"input_ids": [5, [6]]}, "input_ids[1]", "must be an integer"),
    ({"input_ids": [[5], 6]}, "input_ids[1]", "must be a list"),
    ({"input_ids": [[5], [6, 999]]}, "input_ids[1][1]", "must be an id in [0, 31), got 999"),
    ({"input_ids": [-1]}, "input_ids[0]", "got -1"),
    ({"input_ids": [2**70]}, "input_ids[0]", "must be an integer"),
    ({"inputs": "a", "input": "b"}, "input", "input is not a known field; did you mean inputs?"),
    ({"inputs": ["a"], "stream": True}, "stream", "stream needs one input, got a list of 1"),
    ({"inputs": "a", "stream": "false"}, "stream", 'got "false"'),
    ({"inputs": "a", "model": 3}, "model", "model must be a string, got 3"),
    ({"inputs": "a", "foo": None}, "foo", "foo is not a known field"),
    ({"inputs": "a", "": 1}, "", '"" is not a known field'),
    ({"inputs": "a", "<one>": 1}, "<one>", '"<one>" is not a known field'),
    ({"inputs": "a", "timeout": 0}, "timeout", "timeout must be in (0, 86400], got 0"),
    ({"inputs": "a", "timeout": "1"}, "timeout", "timeout must be a number"),
    ({"inputs": "a", "parameters": 5}, "parameters", "parameters must be an object"),
    ({"inputs": "a", "parameters": []}, "parameters", "at least one element"),
    ({"inputs": "a", "parameters": [{}, {}]}, "parameters", "has 2 entries, but there are 1"),
    ({"inputs": ["a", "b"], "parameters": [{}]}, "parameters", "has 1 entries, but there are 2"),
]

PARAMETERS: list[tuple[dict[str, Any], str, str]] = [
    ({"top_p": 1.5}, "top_p", "parameters.top_p must be in (0, 1], got 1.5"),
    ({"top_p": 0}, "top_p", "must be in (0, 1], got 0"),
    ({"top_p": "0.5"}, "top_p", "must be a number"),
    ({"top_p": True}, "top_p", "must be a number, got true"),
    ({"temperature": -1}, "temperature", "must be in (0, 100], got -1"),
    ({"top_k": -1}, "top_k", "must be at least 0, got -1"),
    ({"top_k": 1.5}, "top_k", "must be an integer"),
    ({"seed": 2**53}, "seed", "must be in [0, 9007199254740991], got 9007199254740992"),
    ({"max_new_tokens": -1}, "max_new_tokens", "must be at least 0"),
    ({"max_new_tokens": 10**30}, "max_new_tokens", "must be an integer"),
    ({"truncate": 0}, "truncate", "must be at least 1"),
    ({"details": 1}, "details", "must be true or false, got 1"),
    ({"top_n_tokens": 101}, "top_n_tokens", "must be in [0, 100]"),
    ({"max_tokens": 5}, "max_tokens", "not a known field"),
    ({"temprature": 1.0}, "temprature", "did you mean temperature?"),
    ({"num_beams": 0}, "num_beams", "must be at least 1, got 0"),
    ({"num_beams": 4, "top_k": 3}, "num_beams", "num_beams 4 cannot be combined with sampling"),
    ({"num_return_sequences": 2}, "num_return_sequences", "at most num_beams, 1, without sampling"),
    ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences", "at most num_beams, 2"),
    (
        {"num_return_sequences": 65, "seed": 1},
        "num_return_sequences",
        "at most 64 (max_return_sequences), got 65",
    ),
    ({"length_penalty": 0.5}, "length_penalty", "needs num_beams above 1, got 0.5"),
    ({"beam_steps": True}, "beam_steps", "needs num_beams above 1, got True"),
    ({"early_stopping": "never"}, "early_stopping", "needs num_beams above 1, got never"),
    ({"early_stopping": "often", "num_beams": 2}, "early_stopping", 'got "often"'),
    ({"repetition_penalty": 0}, "repetition_penalty", "must be in (0, 100], got 0"),
    ({"frequency_penalty": 3}, "frequency_penalty", "must be in [-2, 2], got 3"),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size", "must be at least 0, got -1"),
    ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens", "at most max_new_tokens, 3"),
    ({"min_new_tokens": 9, "max_new_tokens": 0}, "min_new_tokens", "at most max_new_tokens, 0"),
    ({"min_new_tokens": 2**63}, "min_new_tokens", "at most max_new_tokens, 48 here"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "must have ids in [0, 31) as keys, got 'x'"),
    ({"logit_bias": {"99": 1}}, "logit_bias", "must have ids in [0, 31) as keys, got '99'"),
    ({"logit_bias": {"0" * 20 + "99": 1}}, "logit_bias", "must have ids in [0, 31) as keys"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "must be less than or equal to 100, got 101"),
    ({"bad_words": ["QQ"]}, "bad_words[0]", "must be made of the vocabulary's tokens, got 'QQ'"),
    ({"bad_words": [[99]]}, "bad_words[0][0]", "must be an id in [0, 31), got 99"),
    ({"bad_words": [[]]}, "bad_words[0]", "must be made of the vocabulary's tokens, got []"),
    ({"forced_bos_token_id": 99}, "forced_bos_token_id", "must be an id in [0, 31), got 99"),
    ({"num_beams": 65}, "num_beams", "must be at most 64 (max_beams), got 65"),
    ({"bad_words": [3]}, "bad_words[0]", "got 3"),
    ({"bad_words": [["a"]]}, "bad_words[0][0]", 'must be an integer, got "a"'),
    ({"temprature": None}, "temprature", "did you mean temperature?"),
    ({"foo": None}, "foo", "foo is not a known field"),
    ({"<many>": 1}, "<many>", '"<many>" is not a known field'),
    ({"target_prefix_ids": [5] * 60}, "target_prefix_ids", "have 61 tokens"),
    ({"target_prefix": "HH " * 60}, "target_prefix", "have 61 tokens"),
    ({"watermark": True}, "watermark", "must be false or left out"),
    ({"stop": [""]}, "stop[0]", "at least"),
    ({"stop": "x"}, "stop", 'got "x"'),
    ({"stop": ["x"] * 17}, "stop", "must have at most 16 entries, got 17"),
    ({"stop": ["x" * 1001]}, "stop[0]", "must have at most 1000 characters, got 1001"),
    ({"bad_words": [[5] * 1001]}, "bad_words[0]", "must have at most 1000 entries, got 1001"),
    ({"bad_words": [[5]] * 1001}, "bad_words", "must have at most 1000 entries, got 1001"),
    ({"logit_bias": {str(i): 1.0 for i in range(1001)}}, "logit_bias", "at most 1000 entries"),
    ({"do_sample": False, "top_k": 3}, "do_sample", "do_sample is false, but top_k would sample"),
    (
        {"target_prefix": "HH", "target_prefix_ids": [5]},
        "target_prefix",
        "exclude each other",
    ),
    ({"target_prefix_ids": [5, 400]}, "target_prefix_ids[1]", "got 400"),
    ({"target_prefix_ids": ["x"]}, "target_prefix_ids[0]", "must be an integer"),
]

RAW: list[tuple[bytes, int, str]] = [
    (b"", 400, "the body is empty"),
    (b"{", 400, "not valid JSON"),
    (b'{"inputs": "a"} x', 400, "not valid JSON"),
    (b'{"inputs": NaN}', 400, "not valid JSON"),
    (b'{"inputs": "a", "timeout": Infinity}', 400, "not valid JSON"),
    (b'{"inputs": "a", "timeout": 1e999}', 400, "infinity"),
    (b'{"inputs": "\\ud800"}', 400, "surrogate"),
    (b'{"inputs": "\xff"}', 400, "UTF-8"),
    (b"[" * 5000, 400, "depth"),
    (b"[]", 422, "the body must be an object, got []"),
    (b"[" * 1000 + b"]" * 1000, 422, "the body must be an object, got"),
    (b"null", 422, "the body must be an object"),
    (b'"hello"', 422, 'the body must be an object, got "hello"'),
]


@pytest.fixture(autouse=True)
async def next_request_works(client: httpx.AsyncClient) -> AsyncIterator[None]:
    yield
    response = await client.post("/generate", json={"inputs": "hello"})
    assert response.status_code == 200


@pytest.mark.parametrize(("body", "param", "message"), GENERATE, ids=lambda v: str(v)[:40])
async def test_a_bad_body_is_refused_by_name(
    api: Api, body: dict[str, Any], param: str | None, message: str
) -> None:
    envelope = await api.refused("/generate", **body)
    assert envelope["error_type"] == "validation"
    assert message in envelope["error"]
    assert envelope["param"] == param


@pytest.mark.parametrize(("parameters", "name", "message"), PARAMETERS, ids=lambda v: str(v)[:40])
async def test_a_bad_parameter_is_refused_by_name(
    api: Api, parameters: dict[str, Any], name: str, message: str
) -> None:
    envelope = await api.refused("/generate", inputs="a", parameters=parameters)
    assert message in envelope["error"]
    assert envelope["param"] == f"parameters.{name}"
    envelope = await api.refused("/generate", inputs=["a", "b"], parameters=[{}, parameters])
    assert envelope["param"] == f"parameters[1].{name}"
    # Also where nothing would run.
    assert (await api.refused("/generate", inputs="", parameters=parameters))["error"]


@pytest.mark.parametrize(("body", "status", "message"), RAW, ids=lambda v: str(v)[:40])
@pytest.mark.parametrize(
    "path",
    ["/generate", "/logits", "/next", "/score", "/attention", "/tokenize", "/detokenize"],
)
async def test_what_is_no_request_is_refused(
    client: httpx.AsyncClient, path: str, body: bytes, status: int, message: str
) -> None:
    response = await client.post(path, content=body)
    assert response.status_code == status
    assert message in response.json()["error"]


async def test_a_long_value_is_cut_in_the_message(api: Api) -> None:
    envelope = await api.refused("/generate", inputs="a", model=["x" * 10_000])
    assert len(envelope["error"]) < 300
    assert "characters)" in envelope["error"]


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": "a", "x" * 1_000_000: 1},
        {"inputs": "a", "parameters": {"x" * 1_000_000: 1}},
        {"inputs": "a", "parameters": {"x y" * 300_000: 1}},
        {"inputs": "a", "model": "x" * 1_000_000},
    ],
    ids=["field", "parameter", "strange parameter", "model"],
)
async def test_a_long_name_is_cut_in_the_message(
    client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    response = await client.post("/generate", json=body)
    assert response.status_code in (404, 422)
    assert len(response.content) < 500


@pytest.mark.parametrize("place", ["body", "parameters"])
async def test_many_unknown_fields_make_one_error(place: str) -> None:
    unknown = {f"k{i}": 1 for i in range(10_000)}
    body = {"inputs": "a"} | (unknown if place == "body" else {"parameters": unknown})
    with pytest.raises(ValidationError) as caught:
        GenerateRequest.model_validate(body)
    assert caught.value.error_count() == 1


async def test_null_is_the_same_as_leaving_a_field_out(api: Api) -> None:
    for path, cls, required in (
        ("/generate", GenerateRequest, {"inputs": "a"}),
        ("/logits", LogitsRequest, {"inputs": "a"}),
        ("/next", NextRequest, {"inputs": "a"}),
        ("/tokenize", TokenizeRequest, {"inputs": "a"}),
        ("/detokenize", DetokenizeRequest, {"input_ids": [5]}),
    ):
        nulls: dict[str, Any] = dict.fromkeys(cls.model_fields.keys() - required.keys())
        assert await api.post(path, **required, **nulls) == await api.post(path, **required)
    known = dict.fromkeys([*GenerationParameters.model_fields, *FOREIGN_NO_OPS])
    plain = await api.post("/generate", inputs="a")
    assert await api.post("/generate", inputs="a", parameters=known) == plain


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/logits", {"inputs": ["a"], "targets": ["HH " * 60]}, "targets[0]"),
        ("/logits", {"inputs": "a", "targets": "HH " * 60}, "targets"),
        ("/logits", {"inputs": ["a"], "target_ids": [[5] * 60]}, "target_ids[0]"),
        ("/logits", {"inputs": "a", "target_ids": [5] * 60}, "target_ids"),
        ("/logits", {"inputs": "a", "target_ids": [[5]] * 1025}, "target_ids"),
        ("/next", {"inputs": "a", "target_prefix_ids": [5] * 60}, "target_prefix_ids"),
        ("/next", {"inputs": "a", "target_prefix": "HH " * 60}, "target_prefix"),
        (
            "/next",
            {"inputs": ["a", "b"], "target_prefix_ids": [[5], [5] * 60]},
            "target_prefix_ids[1]",
        ),
    ],
    ids=lambda v: str(v)[:40],
)
async def test_what_is_too_long_is_called_by_its_name(
    api: Api, path: str, body: dict[str, Any], param: str
) -> None:
    envelope = await api.refused(path, **body)
    assert envelope["param"] == param
    assert envelope["error"].startswith(f"{param} has ")


async def test_more_top_tokens_than_an_answer_may_hold_are_refused(api: Api) -> None:
    parameters = {"top_n_tokens": 100, "max_new_tokens": 48}
    envelope = await api.refused("/generate", inputs=["a"] * 1024, parameters=parameters)
    assert f"{2 * 1024 * 48 * 31} numbers, at most 1000000" in envelope["error"]
    assert "top_n_tokens" in envelope["error"]


async def test_more_beams_of_steps_than_an_answer_may_hold_are_refused(api: Api) -> None:
    parameters = {"num_beams": 8, "beam_steps": True, "max_new_tokens": 48}
    envelope = await api.refused("/generate", inputs=["a"] * 1024, parameters=parameters)
    assert f"{2 * 1024 * 48 * 2 * 8} numbers, at most 1000000" in envelope["error"]
    assert "beam_steps" in envelope["error"]


@pytest.mark.parametrize("name", ["input_ids", "target_ids"])
async def test_a_million_mistakes_are_refused_for_the_first(api: Api, name: str) -> None:
    for wrong in ([1.5] * 500_000, [[1.5] * 500_000], [["x"]] * 1000):
        body = {"input_ids": [5], name: wrong}
        envelope = await asyncio.wait_for(api.refused("/logits", **body), 5)
        assert envelope["error"].startswith(f"{name}[0]")


async def test_one_bad_input_refuses_the_whole_list(api: Api) -> None:
    envelope = await api.refused("/generate", input_ids=[[5], [6], [7, 99]])
    assert envelope["param"] == "input_ids[2][1]"


async def test_too_many_inputs_are_refused(api: Api) -> None:
    envelope = await api.refused("/generate", inputs=["a"] * 1025)
    assert "has 1025 entries, at most 1024 are allowed (max_inputs)" in envelope["error"]


async def test_any_content_type_is_read_as_json(client: httpx.AsyncClient) -> None:
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json; charset=x"):
        response = await client.post(
            "/generate", content=b'{"inputs": "hello"}', headers={"content-type": kind}
        )
        assert response.status_code == 200


async def test_a_body_over_the_limit_is_refused(client: httpx.AsyncClient) -> None:
    response = await client.post("/generate", content=b"x" * (4 * 1024 * 1024 + 1))
    assert response.status_code == 413
    assert response.json()["error_type"] == "too_large"
    assert "4194304 bytes" in response.json()["error"]


@pytest.mark.one_process
async def test_a_chunked_body_over_the_limit_is_not_read_to_its_end(
    client: httpx.AsyncClient,
) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 100:
            sent += 1
            yield b"x" * 1024 * 1024

    response = await client.post("/generate", content=endless())
    assert response.status_code == 413
    assert sent < 10


async def test_a_server_may_take_less_than_its_model(native: LoadedModel) -> None:
    settings = Settings(
        max_source_tokens=4, max_target_tokens=6, max_beams=2, max_return_sequences=2
    )
    async with serving(create_app(settings, {"native": native})) as client:
        api = Api(client)
        refused: list[tuple[str, dict[str, Any], str]] = [
            ("/generate", {"inputs": "abcd"}, "5 tokens, the model takes at most 4 (max_source"),
            (
                "/generate",
                {"inputs": "a", "parameters": {"max_new_tokens": 7}},
                "max_new_tokens must be at most 6 here",
            ),
            (
                "/generate",
                {"inputs": "a", "parameters": {"target_prefix_ids": [5] * 6}},
                "have 7 tokens, the model takes at most 6 (max_target_tokens)",
            ),
            (
                "/generate",
                {"inputs": "a", "parameters": {"num_beams": 3}},
                "num_beams must be at most 2 (max_beams), got 3",
            ),
            ("/logits", {"inputs": "a", "target_ids": [5] * 6}, "at most 6 (max_target_tokens)"),
            ("/score", {"inputs": "a", "target_ids": [5] * 7}, "at most 6 (max_target_tokens)"),
        ]
        for path, body, message in refused:
            assert message in (await api.refused(path, **body))["error"]
        parameters = {"details": True, "min_new_tokens": 6}
        answer = await api.post("/generate", inputs="abc", parameters=parameters)
        assert answer["details"]["generated_tokens"] == 6
        model = (await client.get("/info")).json()["models"][0]
        assert (model["max_source_tokens"], model["max_target_tokens"]) == (4, 6)
        assert model["default_max_new_tokens"] == 6


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"input_ids": [[]] * 600_000}, "input_ids has 600000 entries"),
        ({"inputs": ["a"], "parameters": [{}] * 600_000}, "parameters has 600000 entries"),
        ({"inputs": "ab " * 1_000_000}, "inputs has 3000000 characters"),
        ({"inputs": ["a" * 100_000] * 40}, "inputs[0] has 100001 tokens"),
        ({"inputs": "a", "parameters": {"bad_words": ["a" * 1001]}}, "bad_words[0] must have"),
    ],
    ids=lambda v: str(v)[:40],
)
async def test_what_is_far_too_much_is_refused_at_little_cost(
    client: httpx.AsyncClient, body: dict[str, Any], place: str
) -> None:
    content = json.dumps(body, separators=(",", ":")).encode()
    await client.post("/generate", json={"inputs": ""})
    began = time.process_time()
    response = await client.post("/generate", content=content)
    assert response.status_code == 422
    assert place in response.json()["error"]
    # A guard against work for every entry, not a benchmark: that took over ten times as long.
    assert time.process_time() - began < 5.0
