"""The SDK against a scripted server and against the real application."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

import seqserve.client
from model.loader import load_model
from seqserve import AsyncClient, Client, GenerationParameters
from seqserve.client import Logits, read_safetensors
from seqserve.errors import (
    ERRORS,
    DeadlineError,
    GenerationFailedError,
    InvalidRequestError,
    NoConnectionError,
    NotFoundError,
    OverloadedError,
    SeqserveError,
    UnavailableError,
)
from service.app import create_app
from service.settings import Settings
from tests.builders import make_native_model

Handler = Callable[[httpx.Request], httpx.Response]


def scripted(handler: Handler, **options: Any) -> Client:
    http = httpx.Client(transport=httpx.MockTransport(handler), base_url="http://test")
    return Client(http=http, **options)


def answering(*answers: httpx.Response) -> tuple[Handler, list[Any]]:
    """A server that gives these answers in turn, and the bodies that it got."""
    bodies: list[Any] = []
    queue = list(answers)

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content) if request.content else None)
        return queue.pop(0) if len(queue) > 1 else queue[0]

    return handler, bodies


def envelope(status: int, kind: str, **headers: str) -> httpx.Response:
    body = {"error": "no", "error_type": kind, "param": "inputs[1]", "request_id": "r-1"}
    return httpx.Response(status, json=body, headers=headers)


TEXT = {"generated_text": "HH AH"}


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds slept; nobody sleeps."""
    slept: list[float] = []
    monkeypatch.setattr(seqserve.client.time, "sleep", slept.append)
    return slept


# --- what is sent --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "sent"),
    [
        ("hello", {"inputs": "hello"}),
        ([5, 6], {"input_ids": [5, 6]}),
        (["a", "b"], {"inputs": ["a", "b"]}),
        ([[5], []], {"input_ids": [[5], []]}),
        ([[]], {"input_ids": [[]]}),
    ],
)
def test_texts_and_ids_are_told_apart(inputs: Any, sent: Any) -> None:
    many = isinstance(inputs, list) and not isinstance(inputs[0], int)
    handler, bodies = answering(httpx.Response(200, json=[TEXT] * len(inputs) if many else TEXT))
    answer = scripted(handler).generate(inputs)
    assert bodies == [sent]
    assert isinstance(answer, list) == many


def test_only_what_was_said_is_sent() -> None:
    handler, bodies = answering(httpx.Response(200, json=TEXT))
    client = scripted(handler, model="g2p")
    client.generate("a", GenerationParameters(top_k=3), timeout=5.0)
    client.generate("a", {"max_new_tokens": 2}, model="other")
    assert bodies == [
        {"model": "g2p", "inputs": "a", "timeout": 5.0, "parameters": {"top_k": 3}},
        {"model": "other", "inputs": "a", "parameters": {"max_new_tokens": 2}},
    ]


@pytest.mark.parametrize("inputs", [("a", "b"), ([5], [6])])
def test_a_tuple_of_inputs_is_a_list_of_inputs(inputs: Any) -> None:
    handler, bodies = answering(httpx.Response(200, json=[TEXT, TEXT]))
    assert len(scripted(handler).generate(inputs)) == 2
    assert list(inputs) in bodies[0].values()


def test_each_input_can_have_its_own_prefix() -> None:
    handler, bodies = answering(httpx.Response(200, json=[{"tokens": []}, {"tokens": []}]))
    scripted(handler).next(["a", "b"], ["K", "D"])
    assert bodies[0] == {"inputs": ["a", "b"], "target_prefix": ["K", "D"]}


def test_parameters_can_be_given_for_each_input() -> None:
    handler, bodies = answering(httpx.Response(200, json=[TEXT, TEXT]))
    scripted(handler).generate(["a", "b"], [{"top_k": 1}, GenerationParameters()])
    assert bodies[0]["parameters"] == [{"top_k": 1}, {}]


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "error"),
    [
        (422, "validation", InvalidRequestError),
        (400, "validation", InvalidRequestError),
        (404, "not_found", NotFoundError),
        (500, "generation", GenerationFailedError),
        (504, "deadline", DeadlineError),
        (418, "teapot", SeqserveError),
    ],
)
def test_errors_have_their_class_and_say_everything(
    status: int, kind: str, error: type[SeqserveError]
) -> None:
    handler, bodies = answering(envelope(status, kind))
    with pytest.raises(error) as caught:
        scripted(handler).generate("a")
    assert type(caught.value) is error
    assert caught.value.status == status
    assert caught.value.param == "inputs[1]"
    assert caught.value.request_id == "r-1"
    assert len(bodies) == 1


def test_an_answer_of_a_proxy_is_an_error_too() -> None:
    handler, _ = answering(httpx.Response(502, text="<html>bad gateway</html>"))
    with pytest.raises(SeqserveError, match="status 502: <html>bad"):
        scripted(handler).info()


def test_no_server_is_an_error_of_its_own() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(NoConnectionError, match="refused"):
        scripted(handler).generate("a")
    assert not scripted(handler).ready()


def test_error_types_are_unique() -> None:
    assert len(ERRORS) == 12
    assert all(kind.error_type == name for name, kind in ERRORS.items())


# --- retries -------------------------------------------------------------------------------------


def test_a_full_server_is_asked_again_when_it_says(pauses: list[float]) -> None:
    busy = envelope(429, "overloaded", **{"retry-after": "3"})
    handler, bodies = answering(busy, envelope(503, "unavailable"), httpx.Response(200, json=TEXT))
    assert scripted(handler).generate("a").generated_text == "HH AH"
    assert pauses == [3.0, 1.0]
    assert len(bodies) == 3


def test_pauses_are_bounded_and_so_are_tries(pauses: list[float]) -> None:
    handler, bodies = answering(envelope(429, "overloaded", **{"retry-after": "9999"}))
    with pytest.raises(OverloadedError) as caught:
        scripted(handler, retries=1).generate("a")
    assert caught.value.retry_after == 9999
    assert pauses == [30.0]
    assert len(bodies) == 2
    handler, _ = answering(envelope(503, "unavailable", **{"retry-after": "Thu, 01 Jan 1970"}))
    with pytest.raises(UnavailableError):
        scripted(handler, retries=0).generate("a")


def test_ready_does_not_wait(pauses: list[float]) -> None:
    handler, _ = answering(envelope(503, "unavailable"))
    assert not scripted(handler).ready()
    assert pauses == []


# --- both clients --------------------------------------------------------------------------------


def test_both_clients_have_the_same_methods() -> None:
    def signatures(kind: type) -> dict[str, str]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {
            name.replace("__a", "__"): str(inspect.signature(method)).replace("Async", "")
            for name, method in methods
        }

    assert signatures(Client) == signatures(AsyncClient)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    loaded = load_model(make_native_model(tmp_path_factory.mktemp("native")), "cpu")
    app: FastAPI = create_app(Settings(), {"native": loaded})
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        AsyncClient(http=httpx.AsyncClient(transport=transport, base_url="http://t")) as client,
    ):
        yield client


@pytest.mark.anyio
async def test_generate(client: AsyncClient) -> None:
    one = await client.generate("hello", {"details": True})
    assert one.generated_text
    assert one.details
    assert one.details.tokens[0].text
    many = await client.generate(["hello", "fox"])
    assert many[0].generated_text == one.generated_text


@pytest.mark.anyio
async def test_logits_are_arrays_without_padding(client: AsyncClient) -> None:
    last = await client.logits("hello")
    assert last.logits.shape == (31,)
    assert last.target_ids == [1]
    pair = await client.logits(["hello", "a"], ["HH AH L", "W"], positions="all")
    assert [p.logits.shape for p in pair] == [(4, 31), (2, 31)]
    assert pair[1].target_ids == [1, 28]
    several = await client.logits("hello", ["HH", "W", ""], top_k=5)
    assert len(several) == 3
    assert several[0].ids.shape == several[0].values.shape == (5,)
    assert several[2].ids.tolist() == np.argsort(-last.logits)[:5].tolist()
    ids = await client.logits([5, 6, 2], [[13], [13, 6]], positions="all")
    assert [i.target_ids for i in ids] == [[1, 13], [1, 13, 6]]


@pytest.mark.anyio
async def test_logits_are_lists_where_numpy_is_not_installed(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = await client.logits("hello", ["HH", "W"], positions="all")
    monkeypatch.setattr(seqserve.client.importlib.util, "find_spec", lambda _: None)
    lists = await client.logits("hello", ["HH", "W"], positions="all")
    for array, plain in zip(arrays, lists, strict=True):
        assert isinstance(plain.logits, list)
        assert plain.target_ids == array.target_ids
        assert np.allclose(array.logits, plain.logits, atol=1e-6)


@pytest.mark.anyio
async def test_the_other_calls(client: AsyncClient) -> None:
    following = await client.next("hello", "HH", top_k=3)
    assert len(following.tokens) == 3
    assert len(await client.next(["a", "b"])) == 2
    tokens = await client.tokenize("fox")
    assert tokens.tokens == ["f", "o", "x", "</s>"]
    assert (await client.detokenize(tokens.ids, side="source")).text == "fox"
    assert [d.text for d in await client.detokenize([[13], [6]])] == ["HH", "AH"]
    assert (await client.info()).models[0].name == "native"
    assert await client.ready()
    with pytest.raises(InvalidRequestError, match="top_p must be in"):
        await client.generate("a", {"top_p": 2.0})


def test_safetensors_are_read_as_the_library_writes_them() -> None:
    from safetensors.numpy import save

    tensors = {
        "logits": np.arange(6, dtype=np.float32).reshape(1, 2, 3),
        "ids": np.array([[1, 2]], dtype=np.int64),
    }
    read = read_safetensors(save(tensors))
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        assert read[name].dtype == array.dtype
        assert np.array_equal(read[name], array)


def test_logits_default_to_nothing() -> None:
    assert Logits([1]) == Logits([1], None, None, None)
