"""Callers that go away, run out of time, or come when the queue is full, over a socket."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from seqserve import Client
from seqserve.schemas import ModelInfo
from tests.builders import make_native_model

from .conftest import ENDLESS, LONG, PATIENCE, Server, serving

NEVER = 600
"""Seconds of a timeout that does not pass."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that decodes one row at a time."""
    model = make_native_model(tmp_path_factory.mktemp("long"), max_tgt=LONG)
    limits = ("--max-rows", "1", "--max-queue-tokens", str(8 * LONG))
    with serving("--model", f"long={model}", *limits) as server:
        yield server


def info(server: Server) -> ModelInfo:
    with Client(server.url) as client:
        return client.info().models[0]


def wait_until(server: Server, holds: Callable[[ModelInfo], bool]) -> ModelInfo:
    """What /info says as soon as something holds."""
    deadline = time.monotonic() + PATIENCE
    while not holds(found := info(server)):
        assert time.monotonic() < deadline, (found.waiting, found.running)
        time.sleep(0.005)
    return found


@contextmanager
def asked(server: Server, **body: Any) -> Iterator[socket.socket]:
    """A connection on which an endless request was sent; leaving the block closes it."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps({"inputs": "hello", "parameters": ENDLESS, "timeout": NEVER, **body})
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        connection.sendall((head + content).encode())
        yield connection


def assert_idle(server: Server) -> None:
    """Nothing waits or runs, nothing is computed any more, and nobody was waited for to the end."""
    wait_until(server, lambda model: (model.waiting, model.running) == (0, 0))
    before, after = [info(server).batches for _ in range(2)]
    assert before
    assert before == after
    assert before.steps < LONG


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_running_row_is_freed_when_its_caller_goes_away(narrow: Server, stream: bool) -> None:
    with asked(narrow, stream=stream):
        wait_until(narrow, lambda model: model.running == 1)
    assert_idle(narrow)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_queued_request_is_forgotten_when_its_caller_goes_away(
    narrow: Server, stream: bool
) -> None:
    with asked(narrow):
        wait_until(narrow, lambda model: model.running == 1)
        with asked(narrow, stream=stream):
            wait_until(narrow, lambda model: model.waiting == 1)
        found = wait_until(narrow, lambda model: model.waiting == 0)
        assert found.running == 1, "the other one goes on"
    assert_idle(narrow)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_deadline_that_passes_in_the_queue_answers_504(narrow: Server, stream: bool) -> None:
    body = {"inputs": "hello", "parameters": ENDLESS, "timeout": 0.2, "stream": stream}
    with asked(narrow):
        wait_until(narrow, lambda model: model.running == 1)
        response = httpx.post(f"{narrow.url}/generate", json=body, timeout=PATIENCE)
        assert response.status_code == 504
        assert response.json()["error_type"] == "deadline"
        assert "0.2 seconds" in response.json()["error"]
        found = info(narrow)
        assert (found.waiting, found.running) == (0, 1)
    assert_idle(narrow)


def test_a_deadline_that_passes_while_a_row_runs_answers_504_and_frees_it(narrow: Server) -> None:
    response = httpx.post(
        f"{narrow.url}/generate",
        json={"inputs": "hello", "parameters": ENDLESS},
        headers={"x-request-timeout": "0.3"},
        timeout=PATIENCE,
    )
    assert response.status_code == 504
    assert_idle(narrow)


def test_a_deadline_that_passes_in_a_stream_is_its_last_event(narrow: Server) -> None:
    body = {"inputs": "hello", "parameters": ENDLESS, "timeout": 2.0}
    response = httpx.post(f"{narrow.url}/generate_stream", json=body, timeout=PATIENCE)
    assert response.status_code == 200
    *tokens, last = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-1]]
    assert [event["index"] for event in tokens] == list(range(len(tokens)))
    assert last["error_type"] == "deadline"
    assert_idle(narrow)


def test_one_input_is_not_held_up_by_a_request_for_a_thousand(narrow: Server) -> None:
    short = {"max_new_tokens": 3}
    with asked(narrow, inputs=["hello"] * 1000, parameters={"max_new_tokens": 40}):
        wait_until(narrow, lambda model: model.waiting > 500)
        with Client(narrow.url) as client:
            assert client.generate("world", short).generated_text
        assert info(narrow).waiting > 500, "most of the thousand still wait"
    assert_idle(narrow)


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(narrow: Server) -> None:
    body = {"inputs": "hello", "parameters": ENDLESS}
    with asked(narrow, inputs=["hello"] * 7):
        wait_until(narrow, lambda model: model.running == 1)
        began = time.monotonic()
        response = httpx.post(f"{narrow.url}/generate", json=body, timeout=PATIENCE)
        seconds = time.monotonic() - began
        print(f"refused after {1e3 * seconds:.0f} ms")
        assert seconds < 5.0
        assert response.status_code == 429
        assert response.json()["error_type"] == "overloaded"
        assert "(max_queue_tokens)" in response.json()["error"]
        assert 1 <= int(response.headers["retry-after"]) <= 60
    assert_idle(narrow)
    short = {"inputs": "hello", "parameters": {"max_new_tokens": 3}}
    assert httpx.post(f"{narrow.url}/generate", json=short, timeout=PATIENCE).status_code == 200
