"""A server whose model fails: only those at fault notice, and a lost engine comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from seqserve import Client

from .conftest import FAULTY, PATIENCE, Server, serving

# As in faulty_server.py.
LOST, SICK, LARGE = 20, 21, 22

HANGING = ("-m", "tests.e2e.hanging_server")
ENDLESS = 20
"""First source id, as in hanging_server.py."""

OTHERS = [[first, 5 + n % 9, 6 + n % 7, 2] for n, first in enumerate([4, 5, 6, 7, 8, 9] * 4)]


@pytest.fixture(scope="module")
def faulty(model: Path) -> Iterator[Server]:
    with serving("--model", f"tiny={model}", program=FAULTY) as server:
        yield server


def ask(server: Server, ids: list[int], tokens: int = 40) -> httpx.Response:
    """Generate in a connection of one's own."""
    body = {"input_ids": ids, "parameters": {"max_new_tokens": tokens, "details": True}}
    return httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE)


def ids_of(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    return [token["id"] for token in response.json()["details"]["tokens"]]


def all_at_once(server: Server, sources: list[list[int]]) -> list[httpx.Response]:
    with ThreadPoolExecutor(len(sources)) as pool:
        return list(pool.map(lambda ids: ask(server, ids), sources))


def test_sick_rows_fail_alone_and_the_others_get_what_they_get_without_them(
    faulty: Server,
) -> None:
    alone = [ids_of(ask(faulty, ids)) for ids in OTHERS]
    assert len(set(map(tuple, alone))) > len(OTHERS) // 2, "answers must vary"
    sick = [[SICK, n, 2] for n in range(4, 12)]
    answers = all_at_once(faulty, [*OTHERS, *sick])
    assert [ids_of(response) for response in answers[: len(OTHERS)]] == alone
    for response in answers[len(OTHERS) :]:
        assert response.status_code == 500
        assert response.json()["error_type"] == "generation"
        assert "sick" not in response.text, "words that were not meant for callers"


def test_where_memory_runs_out_everybody_still_gets_the_same_answer(faulty: Server) -> None:
    alone = [ids_of(ask(faulty, ids)) for ids in OTHERS]
    large = [[LARGE, n, 2] for n in range(4, 8)]
    large_alone = [ids_of(ask(faulty, ids)) for ids in large]
    answers = all_at_once(faulty, [*OTHERS, *large])
    assert [ids_of(response) for response in answers] == [*alone, *large_alone]
    with Client(faulty.url) as client:
        assert client.info().models[0].restarts == 0


def test_a_lost_engine_fails_what_waits_at_once_and_is_restarted(faulty: Server) -> None:
    before = ids_of(ask(faulty, OTHERS[0]))
    began = time.monotonic()
    answers = all_at_once(faulty, [*OTHERS, [LOST, 2]])
    assert time.monotonic() - began < PATIENCE / 2
    assert {response.status_code for response in answers} <= {200, 500, 503}
    assert answers[-1].status_code == 500
    faulty.wait_until_ready()
    assert ids_of(ask(faulty, OTHERS[0])) == before
    with Client(faulty.url) as client:
        [model] = client.info().models
    assert (model.state, model.restarts) == ("ready", 1)
    assert "engine of model tiny failed: AcceleratorError in " in "".join(faulty.log)
    assert "device lost" not in "".join(faulty.log), "what libraries say may hold callers' texts"


@pytest.mark.parametrize(
    ("settings", "restarts", "message"),
    [
        (("--on-engine-failure", "exit"), 0, "the engine of model tiny has failed"),
        (("--max-restarts", "1"), 1, "the engine of model tiny has failed after 1 restarts"),
    ],
    ids=["at once", "after restarts"],
)
def test_a_lost_engine_ends_the_process_where_set(
    model: Path, settings: tuple[str, ...], restarts: int, message: str
) -> None:
    with serving("--model", f"tiny={model}", *settings, program=FAULTY) as server:
        for _ in range(restarts):
            assert ask(server, [LOST, 2]).status_code == 500
            server.wait_until_ready()
        assert ask(server, [LOST, 2]).status_code == 500
        assert server.wait() == 1
        assert server.log[-1] == f"seqserve: {message}\n"


def test_a_step_that_hangs_does_not_hold_the_end_up(model: Path) -> None:
    with serving("--model", f"tiny={model}", "--grace", "0", program=HANGING) as server:
        body = {"input_ids": [ENDLESS, 2], "timeout": 0.5}
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE)
        assert answer.status_code == 504
        assert server.stop() == 0
        assert "engine of model tiny hangs in a step" in "".join(server.log)


def test_a_killed_server_loses_nothing_but_what_was_running(model: Path) -> None:
    with serving("--model", f"tiny={model}") as server:
        port = server.url.rpartition(":")[2]
        before = ids_of(ask(server, OTHERS[0]))
        server.process.kill()
        server.wait()
        again = Server("--model", f"tiny={model}", "--port", port)
        try:
            again.wait_until_ready()
            assert ids_of(ask(again, OTHERS[0])) == before
        finally:
            again.process.kill()
            again.wait()
