"""What holds for every request, whatever its route: an id, a bounded body, an answer."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seqserve.errors import SeqserveError, TooLargeError, UnavailableError
from service.errors import envelope

logger = logging.getLogger(__name__)

SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""Request ids taken over from a caller: printable ASCII, short. Others are replaced."""


class Frame:
    """Outermost middleware.

    - Every response has `x-request-id`: the caller's own if it is sane, else a fresh one.
    - `root_path` holds, whether or not the proxy in front takes it off the path.
    - A body over the limit is refused before it is read whole, also when it comes in chunks.
    - What no handler caught becomes a plain 500 in the envelope; its trace goes to the log only.
    """

    def __init__(self, app: ASGIApp, root_path: str, max_body_bytes: int) -> None:
        self.app = app
        self.root_path = root_path
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        scope.setdefault("state", {})["request_id"] = request_id
        scope["root_path"] = self.root_path
        if scope["method"] == "POST":
            _declare_json(scope)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check(_content_length(headers))
            await self.app(scope, self._counting(receive), send_with_id)
        except (Exception, asyncio.CancelledError) as error:
            if started:
                raise
            await _failure(error, request_id)(scope, receive, send_with_id)

    def _counting(self, receive: Receive) -> Receive:
        size = 0

        async def receive_counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            self._check(size)
            return message

        return receive_counted

    def _check(self, size: int) -> None:
        if size > self.max_body_bytes:
            raise TooLargeError(f"the body is larger than the limit of {self.max_body_bytes} bytes")


def _failure(error: BaseException, request_id: str) -> ASGIApp:
    if isinstance(error, asyncio.CancelledError):  # the server ends and waits no longer
        error = UnavailableError("the server is shutting down")
    if isinstance(error, SeqserveError):
        return envelope(error, request_id)
    logger.error("request %s failed", request_id, exc_info=error)
    return envelope(SeqserveError("internal error; the server's log has the details"), request_id)


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if SANE_ID.fullmatch(given) else secrets.token_hex(16)


def _content_length(headers: Headers) -> int:
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


def _declare_json(scope: Scope) -> None:
    """All bodies are JSON, so that `curl -d` works without a header; FastAPI would look at it."""
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    scope["headers"] = [*others, (b"content-type", b"application/json")]
