"""The SDK against a scripted server and against the real application."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_overloads

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI

import seqserve.arrays
import seqserve.client
import seqserve.retries
from model.loader import load_model
from seqserve import AsyncClient, Client, GenerationParameters
from seqserve.arrays import Attention
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
    VersionError,
)
from seqserve.streams import AsyncStream, Stream
from service.app import create_app
from service.settings import Settings
from tests.builders import make_m2m_model, make_native_model

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
    """Seconds slept, without jitter; nobody sleeps."""
    slept: list[float] = []
    monkeypatch.setattr(seqserve.client.time, "sleep", slept.append)
    monkeypatch.setattr(seqserve.retries.random, "random", lambda: 0.0)
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
    client.generate("a", GenerationParameters(top_k=3), model=None, timeout=5.0)
    client.generate("a", {"max_new_tokens": 2}, model="other")
    assert bodies == [
        {"model": "g2p", "inputs": "a", "parameters": {"top_k": 3}},
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


def test_what_is_no_answer_of_this_service_is_an_error_too() -> None:
    handler, _ = answering(httpx.Response(200, text="<html>", headers={"x-request-id": "r-2"}))
    with pytest.raises(SeqserveError, match="answer of /info cannot be read: b'<html>'") as caught:
        scripted(handler).info()
    assert caught.value.request_id == "r-2"
    with pytest.raises(SeqserveError, match="answer of /logits cannot be read"):
        scripted(handler).logits("a")


def test_no_server_is_an_error_of_its_own(pauses: list[float]) -> None:
    handler, sent = failing(httpx.ConnectError("refused"))
    with pytest.raises(NoConnectionError, match="refused") as caught:
        scripted(handler).generate("a")
    assert caught.value.status == 0
    assert caught.value.request_id == sent[0].headers["x-request-id"]
    assert not scripted(handler).ready()


def test_error_types_are_unique() -> None:
    assert len(ERRORS) == 13
    assert all(kind.error_type == name for name, kind in ERRORS.items())


# --- retries -------------------------------------------------------------------------------------


def failing(*errors: Exception) -> tuple[Handler, list[httpx.Request]]:
    """A server that fails so in turn, in the end always as the last time; and what it got."""
    requests: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        raise errors[min(len(requests), len(errors)) - 1]

    return handler, requests


def test_a_full_server_is_asked_again_when_it_says(pauses: list[float]) -> None:
    busy = envelope(429, "overloaded", **{"retry-after": "3"})
    handler, bodies = answering(busy, envelope(503, "unavailable"), httpx.Response(200, json=TEXT))
    assert scripted(handler).generate("a").generated_text == "HH AH"
    assert pauses == [3.0, 0.5]
    assert len(bodies) == 3


def test_tries_are_counted(pauses: list[float]) -> None:
    handler, bodies = answering(envelope(429, "overloaded", **{"retry-after": "2"}))
    with pytest.raises(OverloadedError) as caught:
        scripted(handler, retries=1).generate("a")
    assert caught.value.retry_after == 2
    assert pauses == [2.0]
    assert len(bodies) == 2
    handler, _ = answering(envelope(503, "unavailable"))
    with pytest.raises(UnavailableError):
        scripted(handler, retries=0).generate("a")
    assert pauses == [2.0]


def test_a_wait_that_the_call_has_no_time_for_is_not_begun(pauses: list[float]) -> None:
    handler, bodies = answering(envelope(429, "overloaded", **{"retry-after": "90"}))
    with pytest.raises(OverloadedError) as caught:
        scripted(handler).generate("a")  # the client's 60 seconds
    assert caught.value.retry_after == 90
    assert (pauses, len(bodies)) == ([], 1)
    for call in ({"timeout": 100.0}, {}):
        with pytest.raises(OverloadedError):
            scripted(handler, retries=1, timeout=None).generate("a", **call)
    assert (pauses, len(bodies)) == ([90.0, 90.0], 5)


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("unreachable"),
        httpx.PoolTimeout("all taken"),
        httpx.RemoteProtocolError("closed without an answer"),
        httpx.ReadError("reset"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_a_connection_that_failed_is_made_again(pauses: list[float], error: Exception) -> None:
    for call in (lambda c: c.generate("a"), lambda c: list(c.stream("a"))):
        pauses.clear()
        handler, sent = failing(error)
        with pytest.raises(NoConnectionError):
            call(scripted(handler))
        assert pauses == [0.5, 1.0]
        assert len({request.headers["x-request-id"] for request in sent}) == 1
        assert len(sent) == 3


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (httpx.ReadTimeout("silent"), DeadlineError),
        (httpx.WriteTimeout("stuck"), DeadlineError),
        (httpx.UnsupportedProtocol("no scheme"), NoConnectionError),
    ],
    ids=str,
)
def test_what_another_try_cannot_help_is_not_tried_again(
    pauses: list[float], error: Exception, kind: type[SeqserveError]
) -> None:
    handler, sent = failing(error)
    with pytest.raises(kind) as caught:
        scripted(handler).generate("a")
    assert caught.value.status == 0
    assert (pauses, len(sent)) == ([], 1)


def test_a_stream_that_has_begun_is_not_begun_again(pauses: list[float]) -> None:
    stream = Pieces(token_event(0, "a"), httpx.ReadError("reset"))
    handler, bodies = answering(httpx.Response(200, stream=stream))
    with pytest.raises(NoConnectionError, match="reset"):
        list(scripted(handler).stream("cat"))
    assert (pauses, len(bodies)) == ([], 1)


def test_ready_does_not_wait(pauses: list[float]) -> None:
    handler, _ = answering(envelope(503, "unavailable"))
    assert not scripted(handler).ready()
    assert pauses == []


# --- time ----------------------------------------------------------------------------------------


def recording(answer: httpx.Response) -> tuple[Handler, list[httpx.Request]]:
    requests: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return answer

    return handler, requests


def test_the_server_is_told_how_long_a_call_may_take() -> None:
    handler, sent = recording(httpx.Response(200, json=TEXT))
    client = scripted(handler, timeout=20.0)
    client.generate("a")
    client.generate("a", timeout=5.0)
    client.generate("a", timeout=None)
    told = [float(request.headers["x-request-timeout"]) for request in sent]
    assert told == pytest.approx([20.0, 5.0, 20.0], abs=0.5)
    waited = [request.extensions["timeout"] for request in sent]
    assert [w["read"] > t for w, t in zip(waited, told, strict=True)] == [True] * 3
    assert waited[0]["connect"] == 10.0
    assert waited[1]["connect"] == pytest.approx(5.0, abs=0.5)


def test_without_a_timeout_the_server_s_own_holds() -> None:
    handler, sent = recording(httpx.Response(200, json=TEXT))
    scripted(handler, timeout=None).generate("a")
    assert "x-request-timeout" not in sent[0].headers
    assert sent[0].extensions["timeout"]["read"] is None


def test_tries_share_the_time_of_their_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(seqserve.retries.time, "monotonic", lambda: clock[0])

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(seqserve.client.time, "sleep", sleep)
    monkeypatch.setattr(seqserve.retries.random, "random", lambda: 0.0)
    handler, sent = recording(envelope(429, "overloaded", **{"retry-after": "4"}))
    with pytest.raises(OverloadedError):
        scripted(handler, timeout=10.0, retries=9).generate("a")
    assert [request.headers["x-request-timeout"] for request in sent] == [
        "10.000",
        "6.000",
        "2.000",
    ]


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_timeout_without_time_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match=f"timeout must be above 0 seconds, got {timeout}"):
        Client(timeout=timeout)
    handler, _ = answering(httpx.Response(200, json=TEXT))
    with pytest.raises(ValueError, match="timeout"):
        scripted(handler).generate("a", timeout=timeout)
    with pytest.raises(ValueError, match="retries must be at least 0, got -1"):
        Client(retries=-1)


# --- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 404])
def test_a_server_of_another_major_version_is_a_clear_error(status: int) -> None:
    major = int(seqserve.__version__.partition(".")[0]) + 1
    version = f"{major}.4.2"
    headers = {"x-seqserve-version": version}
    handler, _ = answering(httpx.Response(status, json=TEXT, headers=headers))
    client = scripted(handler)
    for call in (lambda: client.generate("a"), lambda: list(client.stream("a")), client.ready):
        with pytest.raises(VersionError, match=f"the server is seqserve {version}"):
            call()


@pytest.mark.parametrize("version", [None, "{major}.999.0", "{major}.0.1+local"])
def test_any_server_of_the_same_major_version_will_do(version: str | None) -> None:
    major = seqserve.__version__.partition(".")[0]
    headers = {} if version is None else {"x-seqserve-version": version.format(major=major)}
    later = {**TEXT, "added": {"later": [1]}, "details": {**DETAILS, "also": None}}
    handler, _ = answering(httpx.Response(200, json=later, headers=headers))
    assert scripted(handler).generate("a").generated_text == "HH AH"


@pytest.mark.anyio
async def test_the_server_tells_its_version(client: AsyncClient) -> None:
    for path in ("/health", "/info", "/nowhere"):
        response = await client._http.get(path)
        assert response.headers["x-seqserve-version"] == seqserve.__version__


# --- both clients --------------------------------------------------------------------------------


def test_both_clients_have_the_same_methods() -> None:
    def plain(signature: inspect.Signature) -> str:
        text = str(signature).replace("Async", "").replace("None, None]", "None]")
        return re.sub(r"Awaitable\[(\w+)\]", r"\1", text)

    def signatures(kind: type) -> dict[str, list[str]]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {
            name.replace("__a", "__").replace("aclose", "close"): [
                plain(inspect.signature(each)) for each in (method, *get_overloads(method))
            ]
            for name, method in methods
        }

    assert signatures(Client) == signatures(AsyncClient)
    assert signatures(Stream) == signatures(AsyncStream)
    assert len(signatures(Client)["generate"]) == 3  # overloads are compared too


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    async with serving("native", make_native_model(tmp_path_factory.mktemp("native"))) as client:
        yield client


@pytest.fixture(scope="module")
async def multilingual(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    async with serving("m2m", make_m2m_model(tmp_path_factory.mktemp("m2m"))) as client:
        yield client


@asynccontextmanager
async def serving(name: str, directory: Path) -> AsyncIterator[AsyncClient]:
    """A client of the real application, which serves one model."""
    app: FastAPI = create_app(Settings(), {name: load_model(directory, "cpu")})
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
    monkeypatch.setattr(seqserve.arrays.importlib.util, "find_spec", lambda _: None)
    bare = AsyncClient(http=client._http)
    lists = await bare.logits("hello", ["HH", "W"], positions="all")
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
    assert [model.name for model in await client.models()] == ["native"]
    assert await client.ready()
    with pytest.raises(InvalidRequestError, match="top_p must be in"):
        await client.generate("a", {"top_p": 2.0})


@pytest.mark.anyio
async def test_arrays_are_tensors_where_they_are_asked_for(client: AsyncClient) -> None:
    with_torch = AsyncClient(http=client._http, arrays="torch")
    for positions in ("last", "all"):
        arrays = await client.logits("hello", ["HH", "W K"], positions=positions)
        tensors = await with_torch.logits("hello", ["HH", "W K"], positions=positions)
        for array, tensor in zip(arrays, tensors, strict=True):
            assert isinstance(tensor.logits, torch.Tensor)
            assert tensor.target_ids == array.target_ids
            np.testing.assert_allclose(tensor.logits.numpy(), array.logits, atol=1e-4)
    attention = await with_torch.attention("hello", "HH AH", dtype="float16")
    assert attention.cross.dtype == torch.float16
    assert attention.cross.shape == (2, 4, 3, 6)
    best = await with_torch.logits("hello", top_k=3)
    assert best.ids.dtype == torch.int64


@pytest.mark.anyio
async def test_score(client: AsyncClient) -> None:
    one = await client.score("hello", "HH AH")
    assert [token.text for token in one.tokens] == ["HH", " AH", "</s>"]
    assert one.logprob_sum
    assert one.logprob_sum < 0
    several = await client.score("hello", ["HH AH", "W"])
    assert several[0].logprob_sum == pytest.approx(one.logprob_sum, abs=1e-4)
    assert len(await client.score(["a", "b"], ["W", "K"])) == 2
    ids = await client.score([5, 6, 2], [[13], [13, 2]])
    assert [len(answer.tokens) for answer in ids] == [1, 2]
    with pytest.raises(InvalidRequestError, match="targets"):
        await client.score("hello")


@pytest.mark.anyio
async def test_languages_reach_every_call(multilingual: AsyncClient) -> None:
    spoken = {"src_lang": "ja", "tgt_lang": "fr"}
    answer = await multilingual.generate("ab", {**spoken, "details": True, "max_new_tokens": 3})
    assert answer.details
    french = answer.details.tokens[0].id
    assert answer.details.tokens[0].special
    source = await multilingual.tokenize("ab", src_lang="ja")
    assert source.tokens[0] == "__ja__"
    told = await multilingual.tokenize("ab", side="target", tgt_lang="fr")
    assert told.ids[0] == french
    fed = [2, french]
    assert (await multilingual.logits("ab", top_k=2, **spoken)).target_ids == fed
    assert (await multilingual.attention("ab", **spoken)).source_ids == source.ids
    scored = await multilingual.score("ab", "a", **spoken)
    assert scored.tokens[0].id == french
    following = await multilingual.next("ab", top_k=2, **spoken)
    plain = await multilingual.next(source.ids, target_prefix=[french], top_k=2)
    assert following == plain


@pytest.mark.anyio
async def test_languages_pair_up_with_inputs_and_answers(multilingual: AsyncClient) -> None:
    pair = await multilingual.logits(
        ["ab", "ab"], top_k=2, src_lang=["ja", "de"], tgt_lang=["fr", "de"]
    )
    alone = [
        await multilingual.logits("ab", top_k=2, src_lang=src, tgt_lang=tgt)
        for src, tgt in (("ja", "fr"), ("de", "de"))
    ]
    assert [a.target_ids for a in pair] == [a.target_ids for a in alone]
    assert pair[0].target_ids != pair[1].target_ids
    with pytest.raises(InvalidRequestError, match="tgt_lang must be a language of this model"):
        await multilingual.score("ab", "a", tgt_lang="xx")


@pytest.mark.anyio
async def test_attention_is_arrays_without_padding(client: AsyncClient) -> None:
    one = await client.attention("hello", "HH AH")
    assert one.source_tokens == ["h", "e", "l", "l", "o", "</s>"]
    assert one.target_tokens == ["<s>", "HH", "AH"]
    assert one.target_ids == [1, 13, 6]
    assert one.cross.dtype == np.float32
    np.testing.assert_allclose(one.cross.sum(-1), 1, atol=1e-5)
    pair = await client.attention(["hello", "a"], ["HH AH L", "W"], dtype="float16")
    assert [p.encoder.shape for p in pair] == [(2, 4, 6, 6), (2, 4, 2, 2)]
    assert [p.decoder.shape for p in pair] == [(2, 4, 4, 4), (2, 4, 2, 2)]
    assert [p.cross.shape for p in pair] == [(2, 4, 4, 6), (2, 4, 2, 2)]
    assert pair[1].source_ids[1:] == [2]
    assert pair[0].encoder.dtype == np.float16
    assert len(await client.attention("hello", ["HH", "W"])) == 2


@pytest.mark.anyio
async def test_attention_is_lists_where_numpy_is_not_installed(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = await client.attention("hello", ["HH", "W K"])
    monkeypatch.setattr(seqserve.arrays.importlib.util, "find_spec", lambda _: None)
    bare = AsyncClient(http=client._http)
    lists = await bare.attention("hello", ["HH", "W K"])
    for array, plain in zip(arrays, lists, strict=True):
        assert isinstance(plain, Attention)
        assert isinstance(plain.cross, list)
        assert (plain.target_ids, plain.source_tokens) == (array.target_ids, array.source_tokens)
        for name in ("encoder", "decoder", "cross"):
            np.testing.assert_allclose(getattr(plain, name), getattr(array, name), atol=1e-6)


@pytest.mark.anyio
async def test_prefixes_of_next_pair_up_or_are_several(client: AsyncClient) -> None:
    pairs = await client.next(["fox", "dog"], ["F", "D AO"], top_k=2)
    several = await client.next("fox", ["F", ""], top_k=2)
    alone = [await client.next("fox", "F", top_k=2), await client.next("fox", top_k=2)]
    for answers in ([pairs[0], several[1]], several):
        for found, expected in zip(answers, alone, strict=True):
            assert [t.id for t in found.tokens] == [t.id for t in expected.tokens]
    assert len(await client.next("fox", [[11], []])) == 2


# --- streams -------------------------------------------------------------------------------------


DETAILS = {
    "finish_reason": "eos_token",
    "input_tokens": 2,
    "unknown_tokens": 0,
    "truncated": False,
    "generated_tokens": 2,
    "seed": None,
    "score": None,
    "prefill": [],
    "tokens": [],
}


def token_event(index: int, text: str, sequence: int = 0, **more: Any) -> bytes:
    event = {
        "index": index,
        "sequence": sequence,
        "token": {"id": index + 5, "text": text, "logprob": -0.5, "special": False},
        "generated_text": None,
        "details": None,
        **more,
    }
    return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"


LAST = token_event(1, " b", generated_text="a b", details=DETAILS)
ERROR = (
    b'data: {"error": "too late", "error_type": "deadline", "param": null, "request_id": "r"}\n\n'
)


class Pieces(httpx.SyncByteStream):
    """A body that is sent piece by piece; an exception among the pieces is raised."""

    def __init__(self, *pieces: bytes | Exception) -> None:
        self.pieces = pieces
        self.sent = 0
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            self.sent += 1
            yield piece

    def close(self) -> None:
        self.closed = True


def streaming(*pieces: bytes | Exception) -> tuple[Client, Pieces, list[Any]]:
    stream = Pieces(*pieces)
    handler, bodies = answering(httpx.Response(200, stream=stream))
    return scripted(handler, model="g2p"), stream, bodies


def test_events_come_as_they_are_sent() -> None:
    client, stream, bodies = streaming(token_event(0, "\u2028é"), b": alive\r\n\r\n", LAST)
    events = client.stream("cat", {"details": True}, timeout=3.0)
    assert bodies == []  # nothing is asked before the first event is wanted
    first = next(events)
    assert first.token
    assert first.token.text == "\u2028é"
    assert stream.sent == 1
    [last] = events
    assert last.generated_text == "a b"
    assert last.details
    assert last.details.finish_reason == "eos_token"
    assert stream.closed
    parameters = {"details": True}
    sent = {"model": "g2p", "inputs": "cat", "parameters": parameters}
    assert bodies == [{**sent, "stream": True}]


def test_leaving_a_loop_over_a_stream_closes_the_connection() -> None:
    client, stream, _ = streaming(token_event(0, "a"), LAST)
    for _ in client.stream("cat"):
        break
    assert stream.closed
    assert stream.sent == 1


def test_leaving_a_stream_s_block_closes_the_connection() -> None:
    client, stream, _ = streaming(token_event(0, "a"), LAST)
    with client.stream("cat") as events:
        for _ in events:
            break
        assert not stream.closed  # it may be gone on with
    assert stream.closed
    assert stream.sent == 1
    assert list(events) == []


def test_an_error_in_the_middle_of_a_stream_is_raised() -> None:
    client, stream, _ = streaming(token_event(0, "a"), ERROR)
    events = client.stream("cat")
    next(events)
    with pytest.raises(DeadlineError, match="too late") as caught:
        next(events)
    assert caught.value.request_id == "r"
    assert caught.value.status == 504
    assert stream.closed


@pytest.mark.parametrize(
    ("piece", "error", "message"),
    [
        (b'data: {"error": "odd"}\n\n', SeqserveError, "odd"),
        (b'data: {"error": 5}\n\n', SeqserveError, "cannot be read"),
        (b"data: [1]\n\n", SeqserveError, "cannot be read: .1"),
        (b'data: {"index": 0}\n\n', SeqserveError, "cannot be read"),
        (b"data: no json\n\n", SeqserveError, "cannot be read: no json"),
        (b"data: cut o", NoConnectionError, "ended before its last event"),
        (httpx.RemoteProtocolError("peer closed"), NoConnectionError, "peer closed"),
        (httpx.ReadTimeout("slow"), DeadlineError, "slow"),
    ],
    ids=str,
)
def test_a_broken_stream_is_an_error(
    piece: bytes | Exception, error: type[SeqserveError], message: str
) -> None:
    client, stream, _ = streaming(token_event(0, "a"), piece)
    with pytest.raises(error, match=message):
        list(client.stream("cat"))
    assert stream.closed


def test_a_stream_without_any_event_is_an_error() -> None:
    client, _, _ = streaming(b": nothing\n\n")
    with pytest.raises(NoConnectionError, match="ended before its last event"):
        list(client.stream("cat"))


def test_every_sequence_of_a_stream_must_end() -> None:
    one = token_event(0, "x", sequence=1, generated_text="x", details=DETAILS)
    client, _, _ = streaming(token_event(0, "a"), one, LAST)
    assert [event.sequence for event in client.stream("cat")] == [0, 1, 0]
    client, _, _ = streaming(token_event(0, "a"), one)
    with pytest.raises(NoConnectionError):
        list(client.stream("cat"))


def test_a_refused_stream_is_asked_again_only_if_the_server_is_full(pauses: list[float]) -> None:
    busy = envelope(429, "overloaded", **{"retry-after": "3"})
    handler, bodies = answering(busy, httpx.Response(200, stream=Pieces(token_event(0, "a"), LAST)))
    assert len(list(scripted(handler).stream("cat"))) == 2
    assert pauses == [3.0]
    handler, bodies = answering(envelope(422, "validation"))
    with pytest.raises(InvalidRequestError) as caught:
        list(scripted(handler).stream("cat"))
    assert caught.value.param == "inputs[1]"
    assert len(bodies) == 1


@pytest.mark.anyio
async def test_a_stream_says_what_generate_says(client: AsyncClient) -> None:
    for word in ("hello", "fox"):
        whole = await client.generate(word, {"details": True})
        assert whole.details
        events = [event async for event in client.stream(word)]
        tokens = [event.token for event in events if event.token]
        assert [token.id for token in tokens] == [token.id for token in whole.details.tokens]
        shown = "".join(token.text or "" for token in tokens if not token.special)
        assert shown == events[-1].generated_text == whole.generated_text
        assert [event.details is None for event in events] == [True] * (len(events) - 1) + [False]
    [nothing] = [event async for event in client.stream("")]
    assert nothing.token is None
    assert nothing.generated_text == ""
    several = {"num_return_sequences": 3, "temperature": 0.9, "seed": 1}
    ends = [e async for e in client.stream("hello", several) if e.details]
    assert sorted(event.sequence for event in ends) == [0, 1, 2]


@pytest.mark.anyio
async def test_a_stream_is_refused_as_other_calls_are(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequestError, match="top_p must be in"):
        async for _ in client.stream("a", {"top_p": 2.0}):
            pass
    with pytest.raises(NotFoundError):
        await anext(client.stream("a", model="none"))
    async with client.stream("hello") as events:
        assert (await anext(events)).index == 0
    with pytest.raises(StopAsyncIteration):
        await anext(events)


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "given", "sent"),
    [
        (None, None, None),
        (None, "k", "Bearer k"),
        ("v", None, "Bearer v"),
        ("v", "k", "Bearer k"),
        ("v", "", None),
    ],
)
def test_a_key_is_given_or_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, given: str | None, sent: str | None
) -> None:
    monkeypatch.delenv("SEQSERVE_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("SEQSERVE_API_KEY", variable)
    with Client(api_key=given) as client:
        assert client._http.headers.get("authorization") == sent


@pytest.mark.parametrize(
    ("variable", "given", "asked"),
    [
        (None, None, "http://127.0.0.1:8000"),
        ("http://v:1", None, "http://v:1"),
        ("", None, "http://127.0.0.1:8000"),
        ("http://v:1", "http://g:2", "http://g:2"),
    ],
)
def test_an_address_is_given_or_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, given: str | None, asked: str
) -> None:
    monkeypatch.delenv("SEQSERVE_URL", raising=False)
    if variable is not None:
        monkeypatch.setenv("SEQSERVE_URL", variable)
    with Client(given) as client:
        assert client._http.base_url == asked
