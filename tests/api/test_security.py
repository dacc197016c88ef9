"""API keys, origins of browsers, and the headers of pages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from model.loader import LoadedModel
from service.app import create_app
from service.settings import Settings

from .conftest import serving

pytestmark = pytest.mark.anyio

KEY = "sk-one"
ORIGIN = "https://app.example.org"
BODY = {"inputs": "hello"}


@pytest.fixture
async def guarded(
    native: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    """A server with two keys that one other origin may call."""
    monkeypatch.setenv("SEQSERVE_API_KEYS", KEY)
    file = tmp_path / "keys"
    file.write_text("sk-two\n")
    settings = Settings(api_keys_file=file, cors_origins=(ORIGIN,), root_path="/nlp")
    async with serving(create_app(settings, {"native": native})) as client:
        yield client


# --- keys ----------------------------------------------------------------------------------------


async def test_a_key_is_needed_where_keys_are_set(guarded: httpx.AsyncClient) -> None:
    for headers in ({}, {"authorization": "Bearer sk-wrong"}, {"x-api-key": "sk-wrong"}):
        response = await guarded.post("/generate", json=BODY, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"] == response.json()["request_id"]
        assert response.json()["error_type"] == "unauthorized"
        assert "sk-wrong" not in response.text
    for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": "sk-two"}):
        response = await guarded.post("/generate", json=BODY, headers=headers)
        assert response.status_code == 200


@pytest.mark.parametrize("prefix", ["", "/nlp"])
async def test_only_probes_and_pages_are_open(guarded: httpx.AsyncClient, prefix: str) -> None:
    for path in (
        "/health",
        "/ready",
        "/ping",
        "/docs",
        "/docs/start.js",
        "/openapi.json",
        "/",
        "/page/app.js",
    ):
        assert (await guarded.get(prefix + path)).status_code == 200, path
    document = (await guarded.get(f"{prefix}/openapi.json")).json()
    probes, translators = (
        ("/health", "/ready", "/ping", "/metrics"),
        ("/frontend/settings", "/languages"),
    )
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            is_open = path in (*probes, *translators)
            response = await guarded.request(method, prefix + path, json=BODY)
            assert (response.status_code in (401, 403)) != is_open, path
            assert ("security" in operation) != is_open
    for path in ("/nowhere", "/nlp/nlp/health", "/health/", "/docsx", "/pagex"):
        assert (await guarded.get(path)).status_code == 401, path
    assert (await guarded.request("DELETE", f"{prefix}/generate")).status_code == 401


async def test_a_body_is_not_read_before_the_key_is_known(guarded: httpx.AsyncClient) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        sent += 1
        yield b"x"

    assert (await guarded.post("/generate", content=endless())).status_code == 401
    assert sent == 0


async def test_without_keys_the_document_asks_for_none(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert "securitySchemes" not in document["components"]


# --- origins -------------------------------------------------------------------------------------

PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-request-timeout",
}


async def test_an_origin_that_is_set_may_call(guarded: httpx.AsyncClient) -> None:
    response = await guarded.options("/generate", headers={"origin": ORIGIN, **PREFLIGHT})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert response.headers["x-request-id"]

    for headers, status in (({"x-api-key": KEY}, 200), ({}, 401)):
        response = await guarded.post("/generate", json=BODY, headers={"origin": ORIGIN, **headers})
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == ORIGIN
        exposed = response.headers["access-control-expose-headers"]
        assert {"x-request-id", "x-inference-time", "retry-after"} <= set(exposed.split(", "))


async def test_a_body_over_the_limit_can_be_read_by_the_page_that_sent_it(
    guarded: httpx.AsyncClient,
) -> None:
    headers = {"origin": ORIGIN, "x-api-key": KEY}
    response = await guarded.post("/generate", content=b" " * 5_000_000, headers=headers)
    assert response.status_code == 413
    assert response.headers["access-control-allow-origin"] == ORIGIN


async def test_another_origin_may_not(guarded: httpx.AsyncClient) -> None:
    origin = {"origin": "https://app.example.org.evil.example"}
    response = await guarded.options("/generate", headers=origin | PREFLIGHT)
    assert response.status_code == 400
    assert "access-control-allow-origin" not in response.headers
    response = await guarded.post("/generate", json=BODY, headers=origin | {"x-api-key": KEY})
    assert "access-control-allow-origin" not in response.headers


async def test_no_origin_may_where_none_is_set(client: httpx.AsyncClient) -> None:
    response = await client.options("/generate", headers={"origin": ORIGIN, **PREFLIGHT})
    assert response.status_code == 405
    response = await client.post("/generate", json=BODY, headers={"origin": ORIGIN})
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origin", ["example.org", "https://example.org/", "https://a b", "https://", "null"]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="cors_origins must be"):
        Settings(cors_origins=(origin,))


# --- headers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_a_page_may_load_nothing_from_elsewhere(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(path)
    policy = dict(
        part.split(" ", 1) for part in response.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["x-frame-options"] == "DENY"


async def test_no_answer_is_taken_for_another_type(client: httpx.AsyncClient) -> None:
    requests: list[tuple[str, str, Any]] = [
        ("GET", "/docs", None),
        ("GET", "/docs/swagger-ui.css", None),
        ("GET", "/", None),
        ("GET", "/nowhere", None),
        ("GET", "/health", None),
        ("POST", "/generate", BODY),
        ("POST", "/generate", {"inputs": 5}),
        ("POST", "/generate_stream", BODY),
    ]
    for method, path, body in requests:
        response = await client.request(method, path, json=body)
        assert response.headers["x-content-type-options"] == "nosniff", path


# --- what is told --------------------------------------------------------------------------------

MARK = "qzxwv"
"""Stands in every text below; no text of the project has it."""


def failing_requests() -> list[tuple[str, Any]]:
    """Requests that fail, or are answered, at each stage on the way."""
    long = f"{MARK} " * 2000
    bodies: list[Any] = [
        f'{{"inputs": "{MARK}'.encode(),  # no JSON
        {"inputs": {"text": MARK}},
        {"inputs": MARK, MARK: 1},
        {"inputs": [MARK, 5]},
        {"inputs": MARK, "model": MARK},
        {"inputs": MARK, "timeout": 1e-9},
        {"inputs": long, "targets": long},
        {"inputs": long * 20},
        {"inputs": MARK, "targets": long},
        {"inputs": MARK, "src_lang": MARK},
        {"inputs": MARK, "parameters": {"bad_words": [MARK]}},
        {"inputs": MARK, "parameters": {"logit_bias": {MARK: 1}}},
        {"inputs": MARK, "parameters": {"tgt_lang": MARK, "stop": [MARK]}},
        {"inputs": MARK, "parameters": {"target_prefix": long}},
        {"inputs": MARK},
    ]
    paths = ("/generate", "/generate_stream", "/logits", "/next", "/score", "/attention")
    return [(path, body) for path in (*paths, "/tokenize", "/detokenize") for body in bodies]


async def test_no_log_has_a_caller_s_text_and_no_answer_a_path(
    native: LoadedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    caplog.set_level("WARNING", "httpx")  # the test's own client
    answers: list[httpx.Response] = []
    async with serving(create_app(Settings(), {"native": native})) as client:

        async def ask(path: str, body: Any) -> None:
            content = {"content": body} if isinstance(body, bytes) else {"json": body}
            answers.append(await client.post(path, **content))

        for path, body in failing_requests():
            await ask(path, body)

        def broken(*_: Any, **__: Any) -> Any:
            raise KeyError(MARK)

        monkeypatch.setattr("service.generation.read_sources", broken)
        monkeypatch.setattr("service.inspection.read_sources", broken)
        for path in ("/generate", "/logits", "/next", "/score", "/attention"):
            await ask(path, {"inputs": MARK, "targets" if path == "/score" else "model": None})
    assert {answer.status_code for answer in answers} >= {200, 400, 404, 422, 500, 504}
    log = "\n".join(record.getMessage() for record in caplog.records)
    assert MARK not in log
    assert log.count("KeyError in ") == 5
    for place in (str(native.directory), str(Path(__file__).parents[2]), "site-packages", ".py"):
        for answer in answers:
            assert place not in answer.text
        assert place not in log
