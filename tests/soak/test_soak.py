"""A short soak, and servers with faults that it must find."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.builders import make_native_model
from tests.soak.alone import Judge, Oracle
from tests.soak.report import as_json, as_markdown
from tests.soak.run import compare, soak, under_traffic
from tests.soak.serving import ENCODER_CACHE, NO_ENCODER_CACHE, address, arguments, started

SEED = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {
        "tiny": make_native_model(directory / "tiny"),
        "small": make_native_model(directory / "small", seed=1, max_tgt=200),
    }


def test_every_promise_holds_in_a_short_soak(models: dict[str, Path]) -> None:
    report = asyncio.run(soak(models, requests=400, seed=SEED))
    print(as_markdown(report))
    assert not report.broken
    assert report.ledger.total() == 400 + len(models)
    assert report.compared.answers > 150
    assert all(report.ledger.total(status) for status in (200, 422, 429, 504, "left"))
    assert min(report.busiest.values()) > 8
    assert report.terminated.answered
    assert report.killed.lost
    assert report.killed.again
    assert as_json(report)["requests"] == 400


FAULTS = {
    "the queue is full": """
from service.runner import Runner, _Command
def keep(self, ticket):
    left = tuple(work for work in ticket.unfinished if work in self._owners)
    self._commands.put(_Command("cancel", left))
Runner._release = keep
""",
    "not the answer alone": """
import model.step as step
right = step.pick
def pick(scores, rows):
    tokens = right(scores, rows)
    tokens[0] = 5 if len(rows) > 5 else tokens[0]
    return tokens
step.pick = pick
""",
    "lost after": """
import itertools
from uvicorn.protocols.http.h11_impl import RequestResponseCycle as Cycle
whole, number = Cycle.send, itertools.count()
async def send(self, message):
    if message["type"] == "http.response.start" and next(number) % 20 == 19:
        self.transport.abort()
    await whole(self, message)
Cycle.send = send
""",
}
"""What a soak says of a server -> the code that makes it such a server."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_with_a_fault_is_found_out(fault: str, models: dict[str, Path]) -> None:
    program = ("-c", FAULTS[fault] + "from seqserve.cli import main\nmain()\n")

    async def run() -> list[str]:
        words = arguments(models, ENCODER_CACHE, {"--grace": 0})
        report = await under_traffic(words, requests=120, seed=SEED, program=program)
        if "alone" in fault:
            with started(*arguments(models, NO_ENCODER_CACHE)) as server:
                report.compared = await compare(
                    report.ledger, Oracle(*address(server)), Judge(models)
                )
        return report.broken

    assert any(fault in each for each in asyncio.run(run()))
