"""What Ray's HTTP proxies do beside forwarding, so that the wire contract holds there too.

Ray runs a proxy on each node, and calls `middlewares` in it where the environment of the node says
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=service.cluster.proxies:middlewares`. Nothing here
imports Ray, torch or the application: proxies are small.
"""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seqserve.errors import DeadlineError, SeqserveError, UnavailableError

CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
"""Variable that has Ray's proxies call a function for further middlewares."""

OWN_PATHS = "/-/"
"""What the proxy answers about itself."""

RAY_TIMEOUT = "x-request-timeout-seconds"
"""Header by which the proxy is told how long a request may take."""

GRACE = 1.0
"""Seconds that the proxy waits beyond a request's deadline, so that the replica's answer says that
time was up; the proxy's own is for requests that no replica has taken."""


class WireContract:
    """Middleware of Ray's proxies.

    - A request that no replica answers, because it ended, or there was none in time, gets the
      envelope of all errors, with a status that tells clients whether to ask again.
    - The caller's `x-request-timeout` holds for the wait for a replica too.
    - An answer has one `x-request-id`: the application's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OWN_PATHS):
            await self.app(scope, receive, send)
            return
        tell_ray_the_deadline(scope)
        answer = Answer(send)
        await self.app(scope, receive, answer)
        if answer.status is None or not answer.ours:
            await answer.fail(failure_of(answer.status), Headers(scope=scope))


class Answer:
    """An ASGI `send` that lets the application's answers through and holds the proxy's own back.

    Attributes:
        status: of the answer; None where none began.
        ours: whether it is the application's.
    """

    def __init__(self, send: Send) -> None:
        self.status: int | None = None
        self.ours = False
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            self.status = message["status"]
            self.ours = "x-seqserve-version" in headers
            if self.ours and (request_id := headers.get("x-request-id")):
                headers["x-request-id"] = request_id  # once: the proxy has added one
        if self.ours:
            await self._send(message)

    async def fail(self, error: SeqserveError, asked: Headers) -> None:
        """Answer with the envelope of all errors."""
        request_id = asked.get("x-request-id")
        body = orjson.dumps(
            {
                "error": error.message,
                "error_type": error.error_type,
                "param": error.param,
                "request_id": request_id,
            }
        )
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-content-type-options": "nosniff",
        }
        if request_id:
            headers["x-request-id"] = request_id
        if error.retry_after is not None:
            headers["retry-after"] = f"{error.retry_after:g}"
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": error.status, "headers": raw})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def middlewares() -> list[Middleware]:
    """What Ray's proxies run around every request."""
    return [Middleware(WireContract)]


def failure_of(status: int | None) -> SeqserveError:
    """What the proxy's own answer means, or that the replica gave none."""
    if status == 404:  # the application takes every path
        return UnavailableError("the server is starting or shutting down", retry_after=1)
    if status == 408:
        return DeadlineError("no replica took the request within its timeout")
    return UnavailableError("the replica that had the request has ended; ask again", retry_after=1)


def tell_ray_the_deadline(scope: Scope) -> None:
    """Have the proxy wait no longer than the request's own header allows."""
    headers: list[Any] = [(k, v) for k, v in scope["headers"] if k != RAY_TIMEOUT.encode()]
    try:
        seconds = float(Headers(scope=scope).get("x-request-timeout", "nan"))
    except ValueError:
        seconds = math.nan  # for the application to refuse
    if seconds > 0.0 and math.isfinite(seconds):
        headers.append((RAY_TIMEOUT.encode(), f"{seconds + GRACE:.3f}".encode()))
    scope["headers"] = headers
