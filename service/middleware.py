"""What holds for every request, whatever its route: an id, who may ask, a bounded body, an answer.

From the outside in: `Frame`, CORS where it is set (so that its headers stand on refusals too),
`Gate`, the routes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seqserve import __version__
from seqserve.errors import (
    InvalidRequestError,
    SeqserveError,
    TooLargeError,
    UnavailableError,
)
from service.errors import OURS, Dialect, envelope
from service.keys import ApiKeys
from service.places import place_of

logger = logging.getLogger(__name__)

SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""Request ids taken over from a caller: printable ASCII, short. Others are replaced."""

OPEN = frozenset(
    {"/", "/docs", "/health", "/metrics", "/openapi.json", "/ping", "/ready"}
    | {"/frontend/settings", "/languages"}
)
"""Paths that need no API key, beside the files of pages: probes; pages that are the same on every
server, as a browser that opens one could not send any; what LibreTranslate's clients ask without
one."""

KEY_IN_BODY = frozenset({"/detect", "/translate"})
"""Paths whose requests may have their API key in the body, as LibreTranslate's clients send it; the
routes check it there."""

PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}
"""On pages: nothing from elsewhere, no script or style inside the page, and no frame around it."""


class Frame:
    """Outermost middleware.

    - Every response has `x-request-id`: the caller's own if it is sane, else a fresh one.
    - Every response has `x-seqserve-version`: a client can tell what it talks to.
    - Every response has `x-content-type-options: nosniff`, and pages have `PAGE_HEADERS`.
    - `root_path` holds, whether or not the proxy in front takes it off the path.
    - Errors leave in the dialect of the API that the path belongs to.
    """

    def __init__(self, app: ASGIApp, root_path: str, dialects: Sequence[Dialect]) -> None:
        self.app = app
        self.root_path = root_path
        self.dialects = (*dialects, OURS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope))
        scope.setdefault("state", {})["request_id"] = request_id
        _publish(scope, self.root_path)
        method, path = scope["method"], _route_path(scope)
        scope["state"]["dialect"] = next(d for d in self.dialects if d.speaks(method, path))

        async def send_framed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-seqserve-version"] = __version__
                headers["x-content-type-options"] = "nosniff"
                if headers.get("content-type", "").startswith("text/html"):
                    headers.update(PAGE_HEADERS)
            await send(message)

        await self.app(scope, receive, send_framed)


class Gate:
    """Innermost middleware: what comes in, and what goes out when a handler fails.

    - Where there are API keys, a request without one is refused before its body is read, but for
      those that may have it there.
    - So is a body over the limit; one that comes in chunks, as soon as it is over; one that does
      not come, when its time is over.
    - What no handler caught becomes a plain 500 in the envelope; the log names its place, and has
      its trace where it is set to debug.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, max_body_bytes: int, receive_timeout: float
    ) -> None:
        self.app = app
        self.keys = keys
        self.max_body_bytes = max_body_bytes
        self.receive_timeout = receive_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def send_watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            self._check_head(scope)
            await self.app(scope, self._bounded(receive), send_watched)
        except (Exception, asyncio.CancelledError) as error:
            if started:
                raise
            await _failure(error, scope)(scope, receive, send)

    def _check_head(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        path = _route_path(scope)
        later = path in KEY_IN_BODY and scope["method"] == "POST" and not self.keys.sent(headers)
        if not later and not is_open(scope["method"], path):
            self.keys.check(headers)
        if scope["method"] == "POST":
            _check_encoding(headers)
            _declare_json(scope)
        self._check_size(_content_length(headers))

    def _bounded(self, receive: Receive) -> Receive:
        size, complete = 0, False
        deadline = asyncio.get_running_loop().time() + self.receive_timeout

        async def receive_bounded() -> Message:
            nonlocal size, complete
            if complete:  # what follows is the end of the connection, whenever that comes
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise InvalidRequestError(
                    f"the body took longer than {self.receive_timeout:g} seconds (receive_timeout)",
                    status=408,
                ) from None
            complete = not message.get("more_body", False)
            size += len(message.get("body", b""))
            self._check_size(size)
            return message

        return receive_bounded

    def _check_size(self, size: int) -> None:
        if size > self.max_body_bytes:
            raise TooLargeError(
                f"the body is larger than the limit of {self.max_body_bytes} bytes (max_body_bytes)"
            )


def _failure(error: BaseException, scope: Scope) -> ASGIApp:
    if isinstance(error, asyncio.CancelledError):  # the server ends and waits no longer
        error = UnavailableError("the server is shutting down")
    if isinstance(error, SeqserveError):
        return envelope(error, scope)
    request_id = scope["state"]["request_id"]
    logger.error("request %s failed: %s", request_id, place_of(error))
    logger.debug("request %s failed", request_id, exc_info=error)
    return envelope(SeqserveError("internal error; the server's log has the details"), scope)


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if SANE_ID.fullmatch(given) else secrets.token_hex(16)


def _publish(scope: Scope, root_path: str) -> None:
    """Put `root_path` on the path if the proxy took it off: Starlette's mounts need it there."""
    path = scope["path"]
    if path != root_path and not path.startswith(f"{root_path}/"):
        scope["path"] = root_path + path
    scope["root_path"] = root_path


def _route_path(scope: Scope) -> str:
    """The path as the router sees it."""
    return str(scope["path"].removeprefix(scope["root_path"])) or "/"


def is_open(method: str, path: str) -> bool:
    """Whether a request needs no API key: a page or a probe, but nothing that a model runs for."""
    return method != "POST" and (path in OPEN or path.startswith(("/docs/", "/page/")))


def _content_length(headers: Headers) -> int:
    length = headers.get("content-length", "")
    return int(length[:20]) if length.isdecimal() else 0  # more digits do not mean less


def _check_encoding(headers: Headers) -> None:
    """A body that unpacks to more than its length could not be bounded while it is read."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise InvalidRequestError(
            f"content-encoding must be left out, bodies are taken as they are, "
            f"got {encoding[:40]!r}",
            "content-encoding",
            status=415,
        )


def _declare_json(scope: Scope) -> None:
    """All bodies are JSON, so that `curl -d` works without a header; FastAPI would look at it.

    What the caller declared is kept for routes that take something else too.
    """
    scope["state"]["content_type"] = Headers(scope=scope).get("content-type", "")
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    scope["headers"] = [*others, (b"content-type", b"application/json")]
