"""The SDK against a live server: callers that leave or run out of time free their rows, retries."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from seqserve import AsyncClient, Client
from seqserve.errors import DeadlineError, OverloadedError
from seqserve.schemas import ModelInfo
from tests.builders import make_native_model

from .conftest import ENDLESS, LONG, PATIENCE, Server, serving

NEVER = 600.0
"""Seconds of a timeout that does not pass."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that takes four sequences and refuses more."""
    model = make_native_model(tmp_path_factory.mktemp("long"), max_tgt=LONG)
    limits = ("--max-queue", "4", "--max-inputs", "4")
    with serving("--model", f"long={model}", *limits) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, timeout=NEVER) as client:
        yield client


def wait_until(server: Server, holds: Callable[[ModelInfo], bool]) -> ModelInfo:
    """What /info says as soon as something holds."""
    with Client(server.url) as watcher:
        deadline = time.monotonic() + PATIENCE
        while not holds(model := watcher.models()[0]):
            assert time.monotonic() < deadline, (model.waiting, model.running)
            time.sleep(0.005)
    return model


def runs(model: ModelInfo) -> bool:
    return bool(model.running)


def is_idle(model: ModelInfo) -> bool:
    """Nothing waits or runs, and nobody was waited for to the end."""
    assert model.batches is None or model.batches.steps < LONG
    return not model.running and not model.waiting


def test_leaving_a_loop_frees_the_rows(server: Server, client: Client) -> None:
    for event in client.stream("hello", ENDLESS):
        if event.index == 2:
            assert wait_until(server, runs).running == 1
            break
    wait_until(server, is_idle)


def test_leaving_a_stream_s_block_frees_the_rows(server: Server, client: Client) -> None:
    with client.stream("hello", ENDLESS) as events:
        next(events)
        wait_until(server, runs)
    wait_until(server, is_idle)
    with pytest.raises(StopIteration):
        next(events)


def test_leaving_an_asynchronous_stream_s_block_frees_the_rows(server: Server) -> None:
    async def run() -> None:
        async with (
            AsyncClient(server.url, timeout=NEVER) as client,
            client.stream("hello", ENDLESS) as events,
        ):
            async for event in events:
                if event.index == 2:
                    break
            await asyncio.to_thread(wait_until, server, runs)
        await asyncio.to_thread(wait_until, server, is_idle)

    asyncio.run(run())


def test_cancelling_a_task_frees_its_rows(server: Server) -> None:
    async def run() -> None:
        async with AsyncClient(server.url, timeout=NEVER) as client:
            task = asyncio.create_task(client.generate("hello", ENDLESS))
            await asyncio.to_thread(wait_until, server, runs)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_until, server, is_idle)

    asyncio.run(run())


def test_a_call_whose_time_is_up_has_the_server_stop(server: Server, client: Client) -> None:
    with pytest.raises(DeadlineError) as caught:
        client.generate("hello", ENDLESS, timeout=0.3)
    assert caught.value.status == 504  # the server's own answer, not the client's impatience
    wait_until(server, is_idle)


def test_a_stream_whose_time_is_up_says_so(server: Server, client: Client) -> None:
    events = client.stream("hello", ENDLESS, timeout=1.0)
    next(events)
    with pytest.raises(DeadlineError):
        list(events)
    wait_until(server, is_idle)


def test_a_server_that_says_nothing_is_waited_for_no_longer_than_the_call_has(
    server: Server,
) -> None:
    def silent(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("timed out", request=request)

    with (
        Client(http=httpx.Client(transport=httpx.MockTransport(silent), base_url="http://t")) as c,
        pytest.raises(DeadlineError) as caught,
    ):
        c.generate("hello", timeout=0.2)
    assert caught.value.status == 0


def test_a_refused_call_comes_through_once_there_is_room(server: Server, client: Client) -> None:
    streams = [client.stream("hello", ENDLESS) for _ in range(4)]
    for stream in streams:
        next(stream)
    short = {"max_new_tokens": 1, "details": True}
    with Client(server.url, retries=0) as impatient, pytest.raises(OverloadedError) as caught:
        impatient.generate("hello", short)
    assert caught.value.retry_after

    def leave() -> None:
        for stream in streams:
            stream.close()

    leaving = threading.Timer(0.2, leave)  # while the call pauses
    leaving.start()
    with Client(server.url, retries=5, timeout=PATIENCE) as patient:
        assert patient.generate("hello", short).details
    leaving.join(PATIENCE)
    wait_until(server, is_idle)


def test_map_shares_steps_and_keeps_order(server: Server, client: Client) -> None:
    words = ["fox", "hello", "dog", "quick"] * 4
    short = {"max_new_tokens": 4}
    alone = [client.generate(word, short).generated_text for word in words]
    answers = client.map(lambda word: client.generate(word, short), words, concurrency=4)
    assert [answer.generated_text for answer in answers] == alone


def test_many_threads_share_one_client_with_few_connections(server: Server) -> None:
    with Client(server.url, max_connections=2, timeout=NEVER) as client:
        answers = client.map(
            lambda word: client.tokenize(word).tokens, ["fox"] * 40, concurrency=16
        )
        assert list(answers) == [["f", "o", "x", "</s>"]] * 40
