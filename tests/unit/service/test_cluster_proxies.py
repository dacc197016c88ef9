"""The middleware of Ray's proxies, around applications that behave as the proxy does."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from service.cluster.proxies import RAY_TIMEOUT, WireContract

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def answering(status: int, headers: dict[str, str], body: bytes = b"text") -> ASGIApp:
    """An application that says this."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": body})

    return app


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    """What the proxy is when a replica dies: it ends without having said anything."""


async def ask(app: ASGIApp, path: str = "/generate", **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(WireContract(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, headers={k.replace("_", "-"): v for k, v in headers.items()})


async def test_an_answer_of_the_application_goes_through_with_one_request_id() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        ours = [(b"x-seqserve-version", b"1"), (b"x-request-id", b"mine")]
        raw = [*ours, (b"x-request-id", b"ray's")]
        await send({"type": "http.response.start", "status": 422, "headers": raw})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})

    response = await ask(app)
    assert (response.status_code, response.content) == (422, b"ab")
    assert response.headers.get_list("x-request-id") == ["mine"]


@pytest.mark.parametrize(
    ("app", "status", "kind", "again"),
    [
        (silent, 503, "unavailable", "1"),
        (answering(500, {}), 503, "unavailable", "1"),
        (answering(503, {}), 503, "unavailable", "1"),
        (answering(404, {}), 503, "unavailable", "1"),
        (answering(408, {}), 504, "deadline", None),
    ],
)
async def test_what_no_replica_answers_gets_the_envelope(
    app: ASGIApp, status: int, kind: str, again: str | None
) -> None:
    response = await ask(app, x_request_id="mine")
    assert response.status_code == status
    assert response.json().keys() == {"error", "error_type", "param", "request_id"}
    assert response.json()["error_type"] == kind
    assert response.json()["request_id"] == response.headers["x-request-id"] == "mine"
    assert response.headers.get("retry-after") == again


async def test_the_proxy_s_own_pages_are_left_alone() -> None:
    response = await ask(answering(200, {"x-request-id": "a"}, b"success"), "/-/healthz")
    assert (response.status_code, response.text) == (200, "success")


@pytest.mark.parametrize(
    ("asked", "told"), [("2.5", "3.500"), ("0", None), ("-1", None), ("inf", None), ("x", None)]
)
async def test_the_caller_s_timeout_bounds_the_wait_for_a_replica(
    asked: str, told: str | None
) -> None:
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await answering(200, {"x-seqserve-version": "1"})(scope, receive, send)

    await ask(app, x_request_timeout=asked)
    headers: dict[Any, Any] = dict(scopes[0]["headers"])
    assert headers.get(RAY_TIMEOUT.encode()) == (told.encode() if told else None)


async def test_callers_cannot_tell_ray_themselves() -> None:
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)

    await ask(app, **{RAY_TIMEOUT.replace("-", "_"): "0"})
    assert RAY_TIMEOUT.encode() not in dict(scopes[0]["headers"])
