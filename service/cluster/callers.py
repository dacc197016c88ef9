"""Between an application and Ray: callers that go away, and bodies."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

GONE: Message = {"type": "http.disconnect"}

LAST_WORDS_SECONDS = 1.0
"""How long a request that is told that its caller has gone may take to end by itself."""


class CallerGone:
    """Runs an application as Ray does, and as servers do.

    - A caller that has gone is told of by a message. Ray cancels such a request, and a cancelled
      request could not say why it ended: it would be counted among the errors of the server.
    - Bodies are bytes. Applications may send what only looks into an array, which cannot be sent
      to another process.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        messages: asyncio.Queue[Message] = asyncio.Queue()
        reading = asyncio.create_task(_read(receive, messages))

        async def send_bytes(message: Message) -> None:
            if message["type"] == "http.response.body":
                message["body"] = bytes(message.get("body", b""))
            await send(message)

        run = asyncio.ensure_future(self.app(scope, messages.get, send_bytes))
        try:
            await asyncio.shield(run)
        except asyncio.CancelledError:
            messages.put_nowait(GONE)
            await asyncio.wait([run], timeout=LAST_WORDS_SECONDS)
            raise
        finally:
            reading.cancel()
            run.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                run.exception()


async def _read(receive: Receive, messages: asyncio.Queue[Message]) -> None:
    message: Message = {}
    while message.get("type") != GONE["type"]:
        message = await receive()
        messages.put_nowait(message)
