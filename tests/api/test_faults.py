"""What callers see when the queue is full, the engine fails, they go away or the server ends.

The engine is a fake one behind a real model's tokenizers, so that a test decides when it steps.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import service.served
from model.loader import LoadedModel
from service.app import create_app
from service.generation import Generator
from service.settings import Settings
from tests.fake_engine import FakeEngine

from .conftest import serving

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def with_fake_engine(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient, FakeEngine]]:
    engines: list[FakeEngine] = []

    def make(loaded: LoadedModel, config: Any, on_step: Any = None) -> FakeEngine:
        engines.append(FakeEngine(config.max_rows, on_step))  # the first one only warms up
        return engines[-1]

    monkeypatch.setattr(service.served, "Engine", make)
    app = create_app(Settings(**settings), {"fake": native})
    async with serving(app) as client:
        try:
            yield app, client, engines[1]
        finally:
            for engine in engines:
                engine.gate.set()


async def generate(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/generate", json={"inputs": "hello", **body})


async def began(engine: FakeEngine) -> None:
    assert await asyncio.to_thread(engine.stepped.wait, 5)


async def test_a_full_queue_answers_429_and_recovers(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_fake_engine(native, monkeypatch, max_queue=2, max_inputs=2) as (_, client, e):
        with e.held_up():
            running = [asyncio.create_task(generate(client)) for _ in range(2)]
            await began(e)
            refused = await generate(client)
            assert refused.status_code == 429
            assert refused.json()["error_type"] == "overloaded"
            assert int(refused.headers["retry-after"]) >= 1
        assert [(await r).status_code for r in running] == [200, 200]
        assert (await generate(client)).status_code == 200


async def test_a_queue_that_is_full_by_tokens_answers_429_and_recovers(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_fake_engine(native, monkeypatch, max_queue_tokens=40) as (_, client, e):
        long = {"parameters": {"max_new_tokens": 30}}
        with e.held_up():
            running = asyncio.create_task(generate(client, **long))
            await began(e)
            refused = await generate(client, **long)
            assert refused.status_code == 429
            assert "37 of 40 tokens are taken, the request needs 37" in refused.json()["error"]
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert (await running).status_code == 200
        assert (await generate(client, **long)).status_code == 200
        never = await generate(client, inputs=["hello", "hello"], **long)
        assert never.status_code == 422
        assert "at most 40 are allowed (max_queue_tokens)" in never.json()["error"]


async def test_a_deadline_answers_504_and_frees_the_rows(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_fake_engine(native, monkeypatch) as (_, client, engine):
        with engine.held_up():
            response = await generate(client, timeout=0.5, inputs=["a", "b"])
        assert response.status_code == 504
        assert "0.5 seconds" in response.json()["error"]
        assert (await generate(client)).status_code == 200
        assert len(engine.cancelled) == 2


async def test_a_request_that_is_late_when_it_has_come_is_not_planned(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'{"inputs": "a", "timeout": 0.1'
        await asyncio.sleep(0.2)
        yield b"}"

    async with with_fake_engine(native, monkeypatch) as (_, client, engine):
        with monkeypatch.context() as patch:
            patch.setattr(Generator, "plan", pytest.fail)
            for path in ("/generate", "/generate_stream"):
                response = await client.post(path, content=body())
                assert response.status_code == 504
                assert "0.1 seconds" in response.json()["error"]
        assert engine.submitted == []
        assert (await generate(client)).status_code == 200


async def test_a_failing_row_fails_its_request_and_spares_its_batch_mates(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_fake_engine(native, monkeypatch) as (_, client, engine):
        engine.poison = {9}
        bad, good = await asyncio.gather(
            client.post("/generate", json={"input_ids": [[5], [9]]}),
            client.post("/generate", json={"input_ids": [5]}),
        )
        assert bad.status_code == 500
        assert bad.json()["error_type"] == "generation"
        assert "not finite" in bad.json()["error"]
        assert good.status_code == 200


async def test_a_broken_engine_answers_500_then_503_and_is_not_ready(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    exiting = {"on_engine_failure": "exit"}
    async with with_fake_engine(native, monkeypatch, **exiting) as (_, client, engine):
        engine.explode = RuntimeError("CUDA error at /home/me")
        first = await generate(client)
        assert first.status_code == 500
        assert first.json()["error_type"] == "generation"
        assert "/home" not in first.text
        assert (await generate(client)).status_code == 503
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/info")).json()["models"][0]["state"] == "failed"


async def test_a_broken_engine_is_replaced_and_counted(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_fake_engine(native, monkeypatch) as (_, client, engine):
        engine.explode = RuntimeError("device lost")
        failed = await asyncio.gather(*(generate(client) for _ in range(3)))
        assert {response.status_code for response in failed} <= {500, 503}
        async with asyncio.timeout(5):
            while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert (await generate(client)).status_code == 200
        [model] = (await client.get("/info")).json()["models"]
        assert (model["state"], model["restarts"]) == ("ready", 1)


async def test_what_the_engine_can_never_run_is_a_422(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_fake_engine(native, monkeypatch) as (_, client, engine):
        object.__setattr__(engine.config, "max_cache_tokens", 3)
        response = await generate(client)
        assert response.status_code == 422
        assert "cache positions" in response.json()["error"]


@pytest.mark.parametrize(
    ("content", "count"),
    [({"inputs": ["a", "b", "c"]}, 3), ({"inputs": "a", "stream": True}, 1)],
    ids=["whole", "stream"],
)
async def test_a_caller_that_goes_away_frees_its_rows(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any], count: int
) -> None:
    async with with_fake_engine(native, monkeypatch) as (app, client, engine):
        gone = asyncio.Event()
        body = json.dumps(content).encode()
        messages = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/generate",
            "headers": [],
            "query_string": b"",
            "http_version": "1.1",
        }
        with engine.held_up():
            request = asyncio.create_task(app(scope, receive, send))
            await began(engine)
            gone.set()
            await asyncio.wait_for(request, 5)
        assert (await generate(client)).status_code == 200
        assert len(engine.cancelled) == count
        assert engine.running == 0


async def test_an_error_after_the_first_token_is_the_last_event_of_a_stream(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_fake_engine(native, monkeypatch) as (_, client, engine):
        engine.fail_after = 2
        response = await generate(client, stream=True)
        assert response.status_code == 200
        events = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-1]]
        *tokens, error = events
        assert [event["token"]["id"] for event in tokens] == [1, 2]
        assert error["error_type"] == "generation"
        assert error["request_id"] == response.headers["x-request-id"]


async def test_an_error_before_the_first_token_of_a_stream_has_its_status(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_fake_engine(native, monkeypatch, max_queue=1, max_inputs=1) as (_, client, e):
        e.fail_after = 0
        assert (await generate(client, stream=True)).status_code == 500
        e.fail_after = None
        with e.held_up():
            running = asyncio.create_task(generate(client))
            await began(e)
            assert (await generate(client, stream=True)).status_code == 429
        assert (await running).status_code == 200
        with e.held_up():
            assert (await generate(client, stream=True, timeout=0.05)).status_code == 504


async def test_draining_finishes_what_runs_and_turns_the_rest_away(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_fake_engine(native, monkeypatch) as (app, client, engine):
        with engine.held_up():
            running = asyncio.create_task(generate(client))
            await began(engine)
            drained = asyncio.create_task(app.state.models.drain(5))
            await asyncio.sleep(0)
            for response in (await client.get("/ready"), await generate(client)):
                assert response.status_code == 503
                assert "shutting down" in response.json()["error"]
            assert (await client.get("/health")).status_code == 200
        assert (await running).status_code == 200
        assert await drained


async def test_leaving_the_lifespan_ends_the_engine_thread(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_fake_engine(native, monkeypatch) as (app, _, _engine):
        [model] = app.state.models.served
        assert model.runner._thread.is_alive()
    assert not model.runner._thread.is_alive()
