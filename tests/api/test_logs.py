"""The log: one line a request, with what an operator needs and nothing that a caller wrote."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from model.loader import LoadedModel
from service.app import create_app
from service.logs import JsonFormatter, TextFormatter
from service.settings import Settings

from .conftest import serving
from .test_faults import with_fake_engine

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.fixture
async def fresh(models: dict[str, LoadedModel]) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(create_app(Settings(), models)) as client:
        yield client


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """The request lines so far, as their JSON says."""
    caplog.set_level(logging.DEBUG, "service.logs")

    def read() -> list[dict[str, Any]]:
        told = [r for r in caplog.records if r.name == "service.logs"]
        return [json.loads(JsonFormatter().format(record)) for record in told]

    return read


async def test_a_request_leaves_one_line_with_its_counts(
    fresh: httpx.AsyncClient, lines: Any
) -> None:
    body = {"inputs": ["abc", "de"], "parameters": {"max_new_tokens": 3, "min_new_tokens": 3}}
    answer = await fresh.post("/generate", json=body, headers={"x-request-id": "mine-42"})
    [line] = lines()
    assert line["request_id"] == "mine-42"
    assert (line["method"], line["route"], line["model"]) == ("POST", "/generate", "native")
    assert (line["status"], line["error_type"], line["client_gone"]) == (200, None, False)
    assert (line["inputs"], line["streamed"], line["generated_tokens"]) == (2, False, 6)
    assert line["prompt_tokens"] == int(answer.headers["x-prompt-tokens"])
    assert line["queue_ms"] == float(answer.headers["x-queue-time"])
    assert line["inference_ms"] == float(answer.headers["x-inference-time"])
    assert line["total_ms"] >= line["queue_ms"] + line["inference_ms"] > 0
    assert (line["level"], line["message"]) == ("info", "request")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])


async def test_streams_and_errors_say_so(fresh: httpx.AsyncClient, lines: Any) -> None:
    await fresh.post("/generate", json={"inputs": "ab", "stream": True})
    await fresh.post("/generate", json={"inputs": "ab", "parameters": {"top_p": 7}})
    await fresh.get("/nowhere")
    stream, wrong, lost = lines()
    assert (stream["streamed"], stream["status"], stream["error_type"]) == (True, 200, None)
    assert stream["generated_tokens"] > 0
    assert (wrong["status"], wrong["error_type"], wrong["inputs"]) == (422, "validation", 0)
    assert (lost["status"], lost["error_type"], lost["route"]) == (404, "not_found", "other")


async def test_an_error_late_in_a_stream_is_told_with_the_status_that_had_gone(
    native: LoadedModel, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_fake_engine(native, monkeypatch) as (_, client, engine):
        engine.fail_after = 2
        await client.post("/generate_stream", json={"inputs": "ab"})
    [line] = lines()
    assert (line["status"], line["error_type"]) == (200, "generation")
    assert line["generated_tokens"] == 2


async def test_a_deadline_leaves_how_long_the_request_had_waited(
    native: LoadedModel, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_fake_engine(native, monkeypatch) as (_, client, engine):
        with engine.held_up():
            await client.post("/generate", json={"inputs": "ab", "timeout": 0.5})
    [line] = lines()
    assert (line["status"], line["error_type"]) == (504, "deadline")
    assert line["queue_ms"] >= 50
    assert (line["inference_ms"], line["generated_tokens"]) == (0, 0)


async def test_a_caller_who_went_away_is_told(models: dict[str, LoadedModel], lines: Any) -> None:
    body = json.dumps(
        {"inputs": "ab", "parameters": {"max_new_tokens": 45, "min_new_tokens": 45}}
    ).encode()
    received = [
        {"type": "http.request", "body": body, "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return received.pop(0)

    async def send(message: Any) -> None:
        pass

    app = create_app(Settings(), models)
    scope = {
        "type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b"",
    }  # fmt: skip
    async with app.router.lifespan_context(app):
        await app(scope, receive, send)
    [line] = lines()
    assert (line["status"], line["error_type"], line["client_gone"]) == (499, "client_gone", True)


async def test_probes_and_scrapes_are_for_debugging_only(
    fresh: httpx.AsyncClient, lines: Any
) -> None:
    for path in ("/health", "/ready", "/metrics", "/info"):
        await fresh.get(path)
    assert [line["level"] for line in lines()] == ["debug", "debug", "debug", "info"]


async def test_nothing_that_a_caller_wrote_is_in_the_log(
    fresh: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    headers = {"authorization": "Bearer xyzzy", "x-forwarded-for": "192.0.2.77"}
    for path, body in (
        ("/generate", {"inputs": "xyzzy"}),
        ("/generate", {"inputs": "xyzzy", "model": "xyzzy"}),
        ("/generate", {"inputs": ["xyzzy", 5]}),
        ("/generate?key=xyzzy", {"inputs": "a", "xyzzy": 1}),
        ("/xyzzy", {}),
    ):
        await fresh.post(path, json=body, headers=headers)
    ours = [record for record in caplog.records if not record.name.startswith("httpx")]
    assert len([r for r in ours if r.name == "service.logs"]) == 5
    for record in ours:
        line = JsonFormatter().format(record)
        assert not re.search("xyzzy|192.0.2.77|127.0.0.1", line), line


async def test_every_field_is_documented_and_every_documented_one_is_there(
    fresh: httpx.AsyncClient, lines: Any
) -> None:
    await fresh.post("/generate", json={"inputs": "a"})
    section = DOCS.read_text().split("\n## Log\n")[1].split("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    [line] = lines()
    assert line.keys() | {"exception"} == documented
    [example] = re.findall(r"```json\n(.*)\n```", section)
    assert json.loads(example).keys() == line.keys()


def record(**extra: Any) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"name": "x", "levelname": "INFO", "msg": "told %s", "args": ("you",), **extra}
    )


def test_as_text_a_line_has_its_fields_behind_the_message() -> None:
    fields = {"a": "b", "empty": "", "none": None, "spaced": 'two "words"', "n": 1.5, "no": False}
    line = TextFormatter().format(record(fields=fields))
    assert line.endswith('INFO told you a=b spaced="two \\"words\\"" n=1.5 no=false')
    assert TextFormatter().format(record()).endswith("INFO told you")


def test_a_message_stays_one_line_of_json_whatever_is_in_it() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        line = JsonFormatter().format(record(args=("a\nb",), exc_info=(ValueError, error, None)))
    assert "\n" not in line
    told = json.loads(line)
    assert told["message"] == "told a\nb"
    assert "ValueError: two\nlines" in told["exception"]
