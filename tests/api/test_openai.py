"""OpenAI's API in process: what its fields become, and how refusals look there.

tests/e2e/test_clients.py has the client itself, over a socket.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from model.loader import LoadedModel
from seqserve.errors import DeadlineError, NotFoundError, OverloadedError, UnauthorizedError
from service.app import create_app
from service.routes.openai import DIALECT
from service.settings import Settings

from .conftest import Api, serving
from .test_faults import with_fake_engine

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"


async def complete(api: Api, **body: Any) -> Any:
    return await api.post(PATH, **body)


async def refused(api: Api, status: int = 400, **body: Any) -> dict[str, Any]:
    """The error of a body that must be refused."""
    response = await api.client.post(PATH, json=body)
    assert response.status_code == status, response.text[:500]
    assert response.json().keys() == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


async def chunks(api: Api, **body: Any) -> list[Any]:
    """The chunks of a stream."""
    response = await api.client.post(PATH, json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def generated(api: Api, **parameters: Any) -> Any:
    return await api.post("/generate", inputs="hello", parameters=parameters)


async def test_a_completion_is_what_generate_answers(api: Api) -> None:
    ours = await generated(api, details=True)
    answer = await complete(api, prompt="hello")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "native"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "text": ours["generated_text"],
            "logprobs": None,
            "finish_reason": {"eos_token": "stop", "length": "length"}[
                ours["details"]["finish_reason"]
            ],
        }
    ]
    prompt, completion = ours["details"]["input_tokens"], ours["details"]["generated_tokens"]
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        ({"max_tokens": 3}, {"max_new_tokens": 3}),
        ({"temperature": 0}, {}),
        ({"temperature": 0, "top_p": 0.5, "seed": 4}, {}),
        ({"temperature": 1.5, "seed": 4}, {"temperature": 1.5, "seed": 4}),
        ({"temperature": 1, "top_p": 1, "seed": 4}, {"temperature": 1, "seed": 4}),
        ({"top_p": 0.9, "seed": 4}, {"top_p": 0.9, "seed": 4}),
        ({"seed": 4}, {}),
        ({"top_p": 1, "n": 1, "best_of": 1}, {}),
        ({"stop": " W"}, {"stop": [" W"]}),
        ({"stop": ["x", " W"]}, {"stop": ["x", " W"]}),
        ({"stop": []}, {}),
        ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
        ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
        ({"logit_bias": {"5": 100}}, {"logit_bias": {"5": 100}}),
        ({"user": "somebody", "echo": False, "suffix": None, "logprobs": None}, {}),
        ({"truncate": 3}, {"truncate": 3}),
        ({"model": "native"}, {}),
    ],
)
async def test_each_field_is_the_parameter_it_stands_for(
    api: Api, fields: dict[str, Any], parameters: dict[str, Any]
) -> None:
    [choice] = (await complete(api, prompt="hello", **fields))["choices"]
    assert choice["text"] == (await generated(api, **parameters))["generated_text"]
    told = await chunks(api, prompt="hello", **fields)
    assert "".join(chunk["choices"][0]["text"] for chunk in told) == choice["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in told][:-1] == [None] * (len(told) - 1)
    assert told[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        (["hello", "world"], {"inputs": ["hello", "world"]}),
        ([5, 6, 2], {"input_ids": [[5, 6, 2]]}),
        ([[5, 6, 2], [7, 2]], {"input_ids": [[5, 6, 2], [7, 2]]}),
        ("", {"inputs": [""]}),
    ],
)
async def test_prompts_are_texts_or_ids_one_or_many(
    api: Api, prompt: Any, inputs: dict[str, Any]
) -> None:
    ours = [answer["generated_text"] for answer in await api.post("/generate", **inputs)]
    choices = (await complete(api, prompt=prompt))["choices"]
    assert [choice["text"] for choice in choices] == ours
    assert [choice["index"] for choice in choices] == list(range(len(ours)))
    texts = [""] * len(ours)
    for chunk in await chunks(api, prompt=prompt):
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ours


async def test_n_choices_for_each_prompt(api: Api) -> None:
    fields = {"prompt": ["hello", "cat"], "n": 2, "temperature": 1, "seed": 3}
    answer = await complete(api, **fields)
    ours = await api.post(
        "/generate",
        inputs=["hello", "cat"],
        parameters={"temperature": 1, "seed": 3, "num_return_sequences": 2},
    )
    texts = [draw["generated_text"] for reply in ours for draw in reply["sequences"]]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    streamed = [""] * 4
    for chunk in await chunks(api, **fields):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts


async def test_best_of_returns_the_likeliest_per_token(api: Api) -> None:
    fields = {"prompt": "hello", "temperature": 1.5, "seed": 3, "logprobs": 0, "max_tokens": 5}
    all_four = (await complete(api, n=4, **fields))["choices"]

    def mean(choice: dict[str, Any]) -> float:
        logprobs: list[float] = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    best = sorted(all_four, key=mean, reverse=True)[:2]
    assert best != all_four[:2]  # otherwise nothing is shown
    answer = await complete(api, n=2, best_of=4, **fields)
    assert [choice["text"] for choice in answer["choices"]] == [c["text"] for c in best]
    assert answer["usage"]["completion_tokens"] == 20


async def test_logprobs_tell_tokens_with_their_places_in_the_text(api: Api) -> None:
    ours = (await generated(api, top_n_tokens=3))["details"]
    [choice] = (await complete(api, prompt="hello", logprobs=3))["choices"]
    told = choice["logprobs"]
    shown = [token for token in ours["tokens"] if not token["special"]]
    assert told["tokens"] == [token["text"] for token in shown]
    assert told["token_logprobs"] == [token["logprob"] for token in shown]
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    for top, token, candidates in zip(
        told["top_logprobs"], shown, ours["top_tokens"][: len(shown)], strict=True
    ):
        assert list(top.values()) == [candidate["logprob"] for candidate in candidates]
        assert top[token["text"]] == token["logprob"]


async def test_a_token_that_was_taken_is_among_the_likeliest_in_any_case(api: Api) -> None:
    [choice] = (
        await complete(api, prompt="hello", logprobs=1, temperature=2, seed=1, max_tokens=8)
    )["choices"]
    told = choice["logprobs"]
    sizes = [len(top) for top in told["top_logprobs"]]
    assert set(sizes) == {1, 2}
    for top, token, logprob in zip(
        told["top_logprobs"], told["tokens"], told["token_logprobs"], strict=True
    ):
        assert top[token] == logprob


async def test_a_stream_tells_the_same_logprobs(api: Api) -> None:
    [choice] = (await complete(api, prompt="hello", logprobs=2))["choices"]
    told = await chunks(api, prompt="hello", logprobs=2)
    for name, values in choice["logprobs"].items():
        pieces = [chunk["choices"][0]["logprobs"][name] for chunk in told]
        assert [value for piece in pieces for value in piece] == values


async def test_a_stream_counts_where_it_is_asked_to(api: Api) -> None:
    body = {"prompt": ["hello", "cat"], "max_tokens": 4}
    usage = (await complete(api, **body))["usage"]
    *told, last = await chunks(api, **body, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in told)
    assert last["choices"] == []
    assert last["usage"] == usage
    assert not any("usage" in chunk for chunk in await chunks(api, **body))


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # body, param, what the message says
    ({}, "prompt", "prompt is missing"),
    ({"prompt": None}, "prompt", "prompt is missing"),
    ({"prompt": 5}, "prompt", "prompt must be a string, or a list of them, got 5"),
    ({"prompt": []}, "prompt", "at least one element"),
    ({"prompt": ["a", 5]}, "prompt[1]", "prompt[1] must be a string, got 5"),
    ({"prompt": [5, 999]}, "prompt[1]", "prompt[1] must be an id in [0, 31), got 999"),
    ({"prompt": [[5], [999]]}, "prompt[1][0]", "got 999"),
    ({"prompt": "a" * 60}, "prompt", "61 tokens, the model takes at most 48"),
    ({"prompt": "a", "echo": True}, "echo", "echo must be false: a prompt is a source"),
    (
        {"prompt": "a", "suffix": "b"},
        "suffix",
        'suffix must be null: nothing is inserted here, got "b"',
    ),
    ({"prompt": "a", "max_tokens": 99}, "max_tokens", "max_tokens must be at most 48 here"),
    ({"prompt": "a", "temperature": 3}, "temperature", "in [0, 2], got 3"),
    ({"prompt": "a", "temperature": "0"}, "temperature", "must be a number"),
    ({"prompt": "a", "top_p": 0}, "top_p", "in (0, 1], got 0"),
    ({"prompt": "a", "logprobs": 6}, "logprobs", "in [0, 5], got 6"),
    ({"prompt": "a", "seed": -1}, "seed", "got -1"),
    ({"prompt": "a", "n": 0}, "n", "at least 1, got 0"),
    ({"prompt": "a", "n": 2}, "n", "n must be at most 1 unless temperature is set, got 2"),
    ({"prompt": "a", "n": 2, "temperature": 0}, "n", "n must be 1 with temperature 0, got 2"),
    ({"prompt": "a", "n": 65, "temperature": 1}, "n", "at most 64 (max_return_sequences), got 65"),
    ({"prompt": "a", "n": 3, "best_of": 2, "temperature": 1}, "best_of", "at least n, 3, got 2"),
    ({"prompt": "a", "best_of": 2}, "best_of", "best_of must be at most 1 unless temperature"),
    (
        {"prompt": "a", "best_of": 2, "temperature": 1, "stream": True},
        "best_of",
        "best_of must be n, 1, in a stream, got 2",
    ),
    ({"prompt": "a", "stop": list("abcde")}, "stop", "at most 4 entries, got 5"),
    ({"prompt": "a", "stop": ""}, "stop", "at least"),
    ({"prompt": "a", "logit_bias": {"99": 1}}, "logit_bias", "ids in [0, 31) as keys, got '99'"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias.5", "got 101"),
    ({"prompt": "a", "presence_penalty": 3}, "presence_penalty", "in [-2, 2], got 3"),
    ({"prompt": "a", "stream_options": {}}, "stream_options", "need stream to be true"),
    (
        {"prompt": "a", "stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "must be false or null, got true",
    ),
    ({"prompt": "a", "top_k": 5}, "top_k", "top_k is not a known field"),
    ({"prompt": "a", "temprature": 1}, "temprature", "did you mean temperature?"),
    ({"prompt": "a", "tgt_lang": "fr"}, "tgt_lang", "tgt_lang needs a model with languages"),
    ({"prompt": "a", "task": "x"}, "task", "task needs a model with tasks"),
    ({"prompt": [5], "model": "tutorial"}, "model", "has no tokenizer"),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED)
async def test_what_is_wrong_is_named_by_its_own_name(
    api: Api, body: dict[str, Any], param: str, message: str
) -> None:
    error = await refused(api, **body)
    assert error["param"] == param
    assert message in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "validation")


async def test_values_that_look_like_our_names_are_shown_as_they_came(api: Api) -> None:
    error = await refused(api, prompt="a", stop=["parameters.inputs"] * 5)
    assert error["param"] == "stop"
    error = await refused(api, prompt="a", tgt_lang="parameters.max_new_tokens")
    assert error["message"].endswith('got "parameters.max_new_tokens"')


async def test_limits_of_the_server_are_told_by_the_prompt(models: dict[str, LoadedModel]) -> None:
    async with serving(create_app(Settings(max_inputs=2, max_characters=5), models)) as client:
        api = Api(client)
        assert (await refused(api, prompt=["a"] * 3))["message"].startswith("prompt has 3 entries")
        assert "6 characters" in (await refused(api, prompt=["a", "a" * 6]))["message"]
        assert (await complete(api, prompt=[5] * 9))["choices"]


async def test_no_such_model_or_path_or_method(api: Api, client: httpx.AsyncClient) -> None:
    error = await refused(api, 404, prompt="a", model="other")
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert error["message"] == 'there is no model "other"; there are: native, tutorial'
    response = await client.get("/v1/other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    response = await client.get(PATH)
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
    response = await client.post(PATH, content=b"{")
    assert response.status_code == 400
    assert "not valid JSON" in response.json()["error"]["message"]


async def test_models_are_listed_in_the_servers_order(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["native", "tutorial"]
    assert (await client.get("/v1/models/tutorial")).json() == listed["data"][1]
    assert listed["data"][1].keys() == {"id", "object", "created", "owned_by"}
    missing = await client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (OverloadedError("full", retry_after=2), 429, "rate_limit_error", "rate_limit_exceeded"),
        (UnauthorizedError("no key"), 401, "invalid_request_error", "invalid_api_key"),
        (NotFoundError("none", "model"), 404, "invalid_request_error", "model_not_found"),
        (DeadlineError("late"), 504, "server_error", "deadline"),
    ],
)
def test_every_kind_of_error_has_a_place(error: Any, status: int, kind: str, code: str) -> None:
    told = DIALECT.body(error, None)["error"]
    assert (DIALECT.status(error), told["type"], told["code"]) == (status, kind, code)


async def test_a_timeout_is_not_to_be_tried_again(api: Api) -> None:
    response = await api.client.post(
        PATH, json={"prompt": "hello"}, headers={"x-request-timeout": "1e-9"}
    )
    assert response.status_code == 504
    assert response.headers["x-should-retry"] == "false"


@pytest.fixture
async def guarded(models: dict[str, LoadedModel]) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(create_app(Settings(api_keys="sesame"), models)) as client:
        yield client


async def test_a_key_is_asked_for(guarded: httpx.AsyncClient) -> None:
    for response in (
        await guarded.get("/v1/models"),
        await guarded.post(PATH, json={"prompt": "a"}),
    ):
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    headers = {"authorization": "Bearer sesame"}
    assert (await guarded.get("/v1/models", headers=headers)).status_code == 200


async def test_an_error_in_a_stream_is_an_event_of_the_same_shape(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_fake_engine(native, monkeypatch) as (_, client, engine):
        engine.fail_after = 2
        response = await client.post(PATH, json={"prompt": "hello", "stream": True})
    *_, last = [line for line in response.text.split("\n\n") if line]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "generation")
