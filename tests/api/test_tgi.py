"""POST / in process: text-generation-inference's rules, and how refusals look there.

tests/e2e/test_clients.py has the clients themselves, over a socket.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from model.loader import LoadedModel
from service.app import create_app
from service.settings import Settings

from .conftest import Api, serving
from .test_faults import with_fake_engine

pytestmark = pytest.mark.anyio


async def ask(api: Api, inputs: Any = "hello", **parameters: Any) -> Any:
    return await api.post("/", inputs=inputs, parameters=parameters)


async def text_of(api: Api, **parameters: Any) -> Any:
    answer = await api.post("/generate", inputs="hello", parameters=parameters)
    return answer["generated_text"]


async def refused(api: Api, status: int = 422, **body: Any) -> dict[str, Any]:
    """The envelope of a body that must be refused."""
    response = await api.client.post("/", json=body)
    assert response.status_code == status, response.text[:500]
    assert response.json().keys() == {"error", "error_type"}
    return dict(response.json())


async def test_one_reply_serves_generation_translation_and_summaries(api: Api) -> None:
    text = await text_of(api)
    reply = {"generated_text": text, "translation_text": text, "summary_text": text}
    assert await ask(api) == [reply]
    assert await ask(api, ["hello", ""]) == [reply, dict.fromkeys(reply, "")]


async def test_the_headers_are_there(api: Api) -> None:
    response = await api.client.post("/", json={"inputs": "hello"})
    names = ("total", "validation", "queue", "inference")
    total, *parts = (float(response.headers[f"x-{name}-time"]) for name in names)
    assert total >= sum(parts) > 0
    assert float(response.headers["x-time-per-token"]) > 0
    assert response.headers["x-prompt-tokens"] == "6"


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        ({"do_sample": False, "temperature": 1.5, "seed": 3}, {"temperature": 1.5, "seed": 3}),
        ({"do_sample": False, "top_k": 5, "seed": 3}, {"top_k": 5, "seed": 3}),
        ({"do_sample": True, "seed": 3}, {"do_sample": True, "seed": 3}),
        ({"do_sample": False, "seed": 3}, {}),
        ({"seed": 3}, {}),
        ({"watermark": False, "grammar": None, "adapter_id": None, "best_of": None}, {}),
        ({"best_of": 1, "decoder_input_details": False, "truncation": None}, {}),
        ({"num_beams": 2, "max_new_tokens": 5}, {"num_beams": 2, "max_new_tokens": 5}),
        ({"generate_parameters": {"max_length": 6}}, {"max_new_tokens": 5}),
        (
            {"generate_parameters": {"min_length": 49, "num_beams": 2}, "max_new_tokens": 48},
            {"min_new_tokens": 48, "num_beams": 2, "max_new_tokens": 48},
        ),
        ({"truncate": 3, "truncation": "only_first"}, {"truncate": 3}),
        ({"clean_up_tokenization_spaces": False}, {}),
    ],
)
async def test_each_field_is_the_parameter_it_stands_for(
    api: Api, fields: dict[str, Any], parameters: dict[str, Any]
) -> None:
    [reply] = await ask(api, **fields)
    assert reply["generated_text"] == await text_of(api, **parameters)


async def test_a_long_source_is_cut_where_that_is_wanted(api: Api) -> None:
    for strategy in ("longest_first", "only_first"):
        [reply] = await ask(api, "a" * 99, truncation=strategy, details=True)
        assert reply["details"]["truncated"]
        assert reply["details"]["input_tokens"] == 48
    error = await refused(api, inputs="a" * 99, parameters={"truncation": "do_not_truncate"})
    assert "100 tokens, the model takes at most 48" in error["error"]


async def test_full_text_begins_with_the_source(api: Api) -> None:
    [reply] = await ask(api, return_full_text=True)
    assert reply["generated_text"] == "hello" + reply["translation_text"]
    assert reply["translation_text"] == await text_of(api)


async def test_details_have_the_decoder_start_and_the_further_draws(api: Api) -> None:
    parameters = {"temperature": 1.5, "seed": 3, "max_new_tokens": 4}
    [reply] = await ask(api, best_of=3, decoder_input_details=True, **parameters)
    ours = await api.post(
        "/generate",
        inputs="hello",
        parameters={**parameters, "num_return_sequences": 3, "details": True},
    )
    details = reply["details"]
    draws = {
        draw["generated_text"]: sum(token["logprob"] for token in draw["details"]["tokens"])
        for draw in ours["sequences"]
    }
    assert reply["generated_text"] == max(draws, key=draws.__getitem__)
    told = [reply, *details["best_of_sequences"]]
    assert {draw["generated_text"] for draw in told} == draws.keys()
    assert details["prefill"] == [{"id": 1, "text": "<s>", "logprob": None}]


async def test_a_stream_counts_from_one_and_ends_with_the_text(api: Api) -> None:
    parameters = {"max_new_tokens": 4, "top_n_tokens": 2, "details": True}
    response = await api.client.post(
        "/", json={"inputs": "hello", "parameters": parameters, "stream": True}
    )
    events = [
        json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-1]
    ]
    assert [event["index"] for event in events] == [1, 2, 3, 4]
    assert [len(event["top_tokens"]) for event in events] == [2] * 4
    *inner, last = events
    assert all(event["generated_text"] is event["details"] is None for event in inner)
    assert last["generated_text"] == await text_of(api, max_new_tokens=4)
    assert last["details"] == {
        "finish_reason": "length",
        "generated_tokens": 4,
        "input_length": 6,
        "seed": None,
    }


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"watermark": True}, "parameters.watermark must be false or left out"),
    ({"grammar": {"type": "json"}}, "parameters.grammar must be null or left out"),
    ({"adapter_id": "x"}, "parameters.adapter_id must be null or left out"),
    ({"best_of": 2}, "parameters.best_of must be 1 without sampling, got 2"),
    ({"best_of": 65, "top_k": 5}, "parameters.best_of must be at most 64 (max_return_sequences)"),
    ({"num_return_sequences": 2, "num_beams": 2}, "parameters.num_return_sequences must be 1 here"),
    ({"truncation": "only_second"}, 'parameters.truncation must be "do_not_truncate" or'),
    ({"clean_up_tokenization_spaces": True}, "must be false or null, got true"),
    ({"max_new_tokens": 99}, "parameters.max_new_tokens must be at most 48 here"),
    ({"foo": 1}, "parameters.foo is not a known field"),
    ({"generate_parameters": {"foo": 1}}, "parameters.generate_parameters.foo is not a known"),
    ({"generate_parameters": {"top_p": 2}}, "parameters.generate_parameters.top_p must be in"),
    (
        {"generate_parameters": {"num_beams": 65}},
        "parameters.generate_parameters.num_beams must be at most 64 (max_beams), got 65",
    ),
    (
        {"generate_parameters": {"max_length": 50}},
        "parameters.generate_parameters.max_length must be at most 49 here",
    ),
    (
        {"generate_parameters": {"max_length": 9, "max_new_tokens": 9}},
        "parameters.generate_parameters.max_length and max_new_tokens exclude each other",
    ),
    (
        {"num_beams": 2, "generate_parameters": {"num_beams": 2}},
        "parameters.generate_parameters.num_beams and parameters.num_beams exclude each other",
    ),
]


@pytest.mark.parametrize(("parameters", "message"), REFUSED)
async def test_what_is_wrong_is_named(api: Api, parameters: dict[str, Any], message: str) -> None:
    error = await refused(api, inputs="hello", parameters=parameters)
    assert error["error_type"] == "validation"
    assert message in error["error"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "inputs is missing"),
        ({"inputs": 5}, "inputs must be a string"),
        ({"inputs": ["a"], "stream": True}, "stream needs one input"),
        ({"inputs": "", "stream": True}, "inputs must have something to continue"),
        ({"inputs": "a", "stream": True, "parameters": {"best_of": 2}}, "best_of must be 1 in a"),
        (
            {"inputs": "a", "stream": True, "parameters": {"decoder_input_details": True}},
            "decoder_input_details must be false in a stream",
        ),
        ({"inputs": "a", "model": "tutorial"}, "has no tokenizer"),
        ({"inputs": "a", "options": {}}, "options is not a known field"),
    ],
)
async def test_bodies_that_cannot_be_meant_are_refused(
    api: Api, body: dict[str, Any], message: str
) -> None:
    assert message in (await refused(api, **body))["error"]


async def test_no_such_model(api: Api) -> None:
    assert (await refused(api, 404, inputs="a", model="other"))["error_type"] == "not_found"


async def test_a_failed_generation_is_424_and_in_a_stream_an_event(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_fake_engine(native, monkeypatch) as (_, client, engine):
        engine.fail_after = 2
        error = await refused(Api(client), 424, inputs="hello")
        response = await client.post("/", json={"inputs": "hello", "stream": True})
    *_, last = [line for line in response.text.split("\n\n") if line]
    assert error["error_type"] == "generation"
    assert json.loads(last.removeprefix("data: ")) == error


async def test_the_page_is_open_but_asking_takes_a_key(models: dict[str, LoadedModel]) -> None:
    async with serving(create_app(Settings(api_keys="sesame"), models)) as client:
        assert (await client.get("/")).status_code in (200, 307)
        error = await refused(Api(client), 401, inputs="hello")
        assert error["error_type"] == "unauthorized"
        headers = {"authorization": "Bearer sesame"}
        answer = await client.post("/", json={"inputs": "hello"}, headers=headers)
        assert answer.status_code == 200


async def test_a_prefix_in_further_parameters_has_the_same_limit(
    models: dict[str, LoadedModel],
) -> None:
    async with serving(create_app(Settings(max_characters=5), models)) as client:
        parameters = {"generate_parameters": {"target_prefix": "HH HH "}}
        error = await refused(Api(client), inputs="a", parameters=parameters)
    assert error["error"].startswith(
        "parameters.generate_parameters.target_prefix has 6 characters"
    )


async def test_info_has_what_clients_of_that_server_read(client: httpx.AsyncClient) -> None:
    info = (await client.get("/info")).json()
    assert info["model_id"] == info["models"][0]["name"] == "native"
    assert (info["model_dtype"], info["model_device_type"]) == ("torch.float32", "cpu")
    assert (info["max_input_tokens"], info["max_total_tokens"]) == (48, 96)
    assert info["max_client_batch_size"] == info["limits"]["max_inputs"]


async def test_ping_is_ready(client: httpx.AsyncClient) -> None:
    for method in ("GET", "HEAD"):
        assert (await client.request(method, "/ping")).status_code == 200
