"""The callers' side of the socket, down to its bytes.

An HTTP library would hide what a soak is about: a second answer, a connection that breaks off, a
caller that leaves at a chosen moment. h11 only parses, strictly.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import h11

from tests.soak.traffic import Call, Wave

PATIENCE = 300.0
"""Seconds after which a call without an answer hangs."""

READ = 1 << 16

Fate = Literal["answered", "left", "lost", "hung"]


@dataclass
class Reply:
    """What became of a call.

    Attributes:
        fate: answered whole; left by its caller; lost: the server broke off, broke the protocol or
            could not be reached; hung: nothing came.
        reason: of what is lost.
        surplus: bytes that came behind the answer.
        began, seconds: when the call was made (`time.monotonic`), and how long it took.
    """

    fate: Fate = "lost"
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    reason: str = ""
    surplus: bytes = b""
    began: float = 0.0
    seconds: float = 0.0


class CallerLeft(Exception):  # noqa: N818  it is no error
    """The caller goes away, as it meant to."""


class Caller:
    """One caller: makes calls one after the other, over one connection while that lasts."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._http = h11.Connection(h11.CLIENT)

    async def make(self, call: Call) -> Reply:
        """Make a call; whatever happens, there is a reply that tells of it."""
        reply = Reply(began=time.monotonic())
        try:
            async with asyncio.timeout(PATIENCE):
                await self._make(call, reply)
            reply.fate = "answered"
        except CallerLeft:
            reply.fate = "left"
        except TimeoutError:
            reply.fate = "hung"
        except (OSError, h11.RemoteProtocolError) as error:
            reply.reason = f"{type(error).__name__}: {error}"
        reply.seconds = time.monotonic() - reply.began
        if reply.fate == "answered" and self._http.our_state is h11.DONE:
            reply.surplus = self._http.trailing_data[0]
        if reply.surplus or not self._reusable:
            self.close()
        else:
            self._http.start_next_cycle()
        return reply

    def close(self) -> None:
        """Close the connection at once, whatever is still on its way."""
        if self._writer:
            self._writer.transport.abort()
        self._reader = self._writer = None

    @property
    def _reusable(self) -> bool:
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _make(self, call: Call, reply: Reply) -> None:
        if self._writer is None:
            self._http = h11.Connection(h11.CLIENT)
            self._reader, self._writer = await asyncio.open_connection(self.host, self.port)
        await self._send(call)
        if call.manner.leaves_after is None:
            await self._receive(call, reply)
            return
        try:
            async with asyncio.timeout(call.manner.leaves_after):
                await self._receive(call, reply)
        except TimeoutError:
            raise CallerLeft from None

    async def _send(self, call: Call) -> None:
        assert self._writer
        headers = [("host", self.host), ("x-request-id", call.request_id), *call.headers]
        if call.method == "POST":
            headers.append(("content-length", str(len(call.body))))
        request = h11.Request(method=call.method, target=call.path, headers=headers)
        self._writer.write(self._http.send(request) or b"")
        sent = call.body[: int(len(call.body) * call.manner.sends)]
        self._writer.write(self._http.send(h11.Data(data=sent)) or b"")
        if len(sent) == len(call.body):
            self._writer.write(self._http.send(h11.EndOfMessage()) or b"")
        # Not awaited: who refuses a body may answer before it has read it.

    async def _receive(self, call: Call, reply: Reply) -> None:
        """Read an answer to its end, or to the event at which the caller leaves."""
        assert self._reader
        events = 0
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(READ))
            elif isinstance(event, h11.Response):
                reply.status = event.status_code
                reply.headers = {k.decode(): v.decode() for k, v in event.headers}
            elif isinstance(event, h11.Data):
                reply.body += bytes(event.data)
                events = reply.body.count(b"\n\n")
                if (
                    call.manner.leaves_at_event is not None
                    and events >= call.manner.leaves_at_event
                ):
                    raise CallerLeft
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise h11.RemoteProtocolError(f"the connection ended: {event!r}")


async def make_all(host: str, port: int, wave: Wave) -> list[tuple[Call, Reply]]:
    """Have a wave's callers make its calls, each the next one as soon as it is free."""
    calls = iter(wave.calls)
    made: list[tuple[Call, Reply]] = []

    async def work() -> None:
        caller = Caller(host, port)
        made.extend([(call, await caller.make(call)) for call in calls])
        caller.close()

    await asyncio.gather(*(work() for _ in range(min(wave.callers, len(wave.calls)))))
    return made


async def make_in_turn(host: str, port: int, calls: Sequence[Call]) -> list[tuple[Call, Reply]]:
    """One caller, one call at a time."""
    return await make_all(host, port, Wave(calls, callers=1))
