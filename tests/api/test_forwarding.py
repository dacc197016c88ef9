"""A gateway in process, in front of applications with one model each."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.types import Message, Receive, Scope, Send

from model.loader import LoadedModel
from seqserve.errors import UnavailableError
from service.app import create_app
from service.cluster.callers import GONE, CallerGone
from service.cluster.forwarding import (
    Described,
    Forwarded,
    Forwarding,
    RemoteModels,
    answered,
    described,
)
from service.settings import Settings

from .conftest import Api, serving

pytestmark = pytest.mark.anyio


class OneProcess:
    """The replicas of a model: one, in this process, which may go away.

    Attributes:
        after: answers break off after so many messages; None: they are whole.
        later: seconds by which the replica that is asked was loaded after the first one.
    """

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.after: int | None = None
        self.later = 0.0

    async def describe(self) -> Described:
        if self.after == 0:
            raise UnavailableError("gone")
        (model,) = self.app.state.models.here
        told = described(model)
        return replace(told, loaded_at=told.loaded_at + self.later)

    async def answer(self, request: Forwarded) -> AsyncIterator[Message]:
        sent = 0
        async for message in answered(CallerGone(self.app), request):
            if sent == self.after:
                raise UnavailableError("gone", retry_after=1)
            yield message
            sent += 1


@asynccontextmanager
async def gateway(
    models: dict[str, LoadedModel],
) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, OneProcess]]]:
    """A client of a gateway, and what stands behind it."""
    apps = {name: create_app(Settings(), {name: model}) for name, model in models.items()}
    remotes = {name: OneProcess(app) for name, app in apps.items()}
    host = RemoteModels(Settings(), remotes)
    front = create_app(Settings(), host)
    front.user_middleware.append(Middleware(Forwarding, models=host))
    async with AsyncExitStack() as stack:
        for app in apps.values():
            await stack.enter_async_context(app.router.lifespan_context(app))
        await host.load()
        yield await stack.enter_async_context(serving(front)), remotes


@pytest.mark.one_process
async def test_it_answers_as_a_server_of_one_process(
    client: httpx.AsyncClient, models: dict[str, LoadedModel]
) -> None:
    requests = [
        ("/generate", {"inputs": ["hello", "world"], "model": "native"}),
        ("/generate", {"inputs": "hello"}),
        ("/generate", {"inputs": "hello", "stream": True}),
        ("/generate", {"input_ids": [3, 4], "model": "tutorial"}),
        ("/generate", {"inputs": "hello", "model": "other"}),
        ("/generate", {"inputs": "hello", "parameters": {"top_k": -1}}),
        ("/logits", {"inputs": "hello", "model": "native"}),
        ("/v1/completions", {"prompt": "hello", "model": "other"}),
        ("/", {"inputs": "hello"}),
    ]
    async with gateway(models) as (behind, _):
        for path, body in requests:
            mine = {"x-request-id": "mine"}
            answers = [await c.post(path, json=body, headers=mine) for c in (client, behind)]
            one, other = answers
            assert one.status_code == other.status_code
            if one.headers["content-type"] == "application/json":
                assert told(one) == told(other)
            assert one.headers.keys() == other.headers.keys()
            assert other.headers["x-request-id"] == "mine"


def told(response: httpx.Response) -> object:
    """A body without its times."""
    return (
        {k: v for k, v in response.json().items() if k not in ("created", "id")}
        if isinstance(response.json(), dict)
        else response.json()
    )


async def test_a_model_was_loaded_at_one_time_whichever_replica_is_asked(
    models: dict[str, LoadedModel],
) -> None:
    async with gateway(models) as (behind, remotes):
        listed = (await behind.get("/v1/models")).json()
        remotes["native"].later = 7.0
        assert (await behind.get("/v1/models")).json() == listed


async def test_it_tells_of_the_models_behind_it(
    client: httpx.AsyncClient, models: dict[str, LoadedModel]
) -> None:
    async with gateway(models) as (behind, remotes):
        for path in ("/v1/models", "/info", "/ready", "/v1/models/tutorial"):
            assert (await behind.get(path)).status_code == 200
        info = (await behind.get("/info")).json()
        assert [m["name"] for m in info["models"]] == ["native", "tutorial"]
        assert info.keys() == (await client.get("/info")).json().keys()
        remotes["native"].after = 0
        info = (await behind.get("/info")).json()
        assert [m["state"] for m in info["models"]] == ["loading", "ready"]
        assert (await behind.get("/ready")).status_code == 200
        remotes["tutorial"].after = 0
        assert (await behind.get("/ready")).status_code == 503


async def test_a_replica_that_ends_before_it_answers_is_an_error_to_try_again(
    models: dict[str, LoadedModel],
) -> None:
    async with gateway(models) as (behind, remotes):
        remotes["native"].after = 0
        error = await Api(behind).refused("/generate", 503, inputs="hello")
        assert error["error_type"] == "unavailable"


async def test_half_an_answer_is_cut_off(models: dict[str, LoadedModel]) -> None:
    async with gateway(models) as (behind, remotes):
        remotes["native"].after = 2
        with pytest.raises(UnavailableError):
            await behind.post("/generate", json={"inputs": "hello", "stream": True})


async def test_a_caller_that_goes_away_is_told_of_by_a_message() -> None:
    ends: list[Message] = []
    began = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        began.set()
        ends.append(await receive())

    sent: asyncio.Queue[Message] = asyncio.Queue()
    sent.put_nowait({"type": "http.request", "body": b"", "more_body": False})

    async def send(message: Message) -> None: ...

    run = asyncio.ensure_future(CallerGone(app)({"type": "http"}, sent.get, send))
    await began.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert ends == [GONE]


async def test_bodies_can_be_sent_to_another_process() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.body", "body": memoryview(b"abc")})

    request = Forwarded({"type": "http"}, b"")
    (message,) = [message async for message in answered(CallerGone(app), request)]
    assert pickle.loads(pickle.dumps(message))["body"] == b"abc"


async def test_a_stream_that_is_given_up_frees_its_rows(native: LoadedModel) -> None:
    app = create_app(Settings(), {"native": native})
    body = {"inputs": "hello", "stream": True, "parameters": {"min_new_tokens": 40}}
    scope = {
        "type": "http", "method": "POST", "path": "/generate", "query_string": b"",
        "headers": [], "root_path": "", "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    async with serving(app):
        runner = app.state.models.get("native").runner
        messages = answered(CallerGone(app), Forwarded(scope, json.dumps(body).encode()))
        await anext(messages)
        assert runner.outstanding == 1
        await messages.aclose()  # type: ignore[attr-defined]
        assert runner.outstanding == 0
        told = await app.state.metrics.exposition("")
        assert b'error_type="client_gone"' in told[0]
