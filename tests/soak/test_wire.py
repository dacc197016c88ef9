"""The callers' side of the socket, against servers that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.soak import wire
from tests.soak.traffic import Call, Manner
from tests.soak.wire import Caller, Reply

CALL = Call(1, "health", "GET", "/health", frozenset({200}))
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"9\r\ndata: 1\n\n\r\n" * 3

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def said(*pieces: bytes, then_close: bool = False) -> Handler:
    """A server that reads one request and says this, whatever it was asked."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
        if not then_close:
            await reader.read()
        writer.close()

    return handle


def replies(handle: Handler, *calls: Call) -> list[Reply]:
    async def make() -> list[Reply]:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        caller = Caller(*server.sockets[0].getsockname()[:2])
        made = [await caller.make(call) for call in calls]
        caller.close()
        server.close()
        await asyncio.sleep(0.05)  # its handlers see that the caller has gone
        return made

    return asyncio.run(make())


def test_an_answer_is_read_whole() -> None:
    [reply] = replies(said(ANSWER), CALL)
    assert (reply.fate, reply.status, reply.body, reply.surplus) == ("answered", 200, b"{}", b"")


def test_a_second_answer_is_seen() -> None:
    [reply] = replies(said(ANSWER + ANSWER), CALL)
    assert reply.surplus == ANSWER


@pytest.mark.parametrize(
    "pieces", [(), (ANSWER[:-1],), (STREAM,)], ids=["nothing", "half", "a stream without its end"]
)
def test_a_connection_that_breaks_off_is_a_lost_answer(pieces: tuple[bytes, ...]) -> None:
    [reply] = replies(said(*pieces, then_close=True), CALL)
    assert reply.fate == "lost"
    assert reply.reason


def test_nobody_listening_is_a_lost_answer() -> None:
    async def make() -> Reply:
        return await Caller("127.0.0.1", 1).make(CALL)

    assert asyncio.run(make()).fate == "lost"


def test_no_answer_is_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PATIENCE", 0.05)
    [reply] = replies(said(), CALL)
    assert reply.fate == "hung"


@pytest.mark.parametrize(
    "manner", [Manner(leaves_after=0.02), Manner(leaves_at_event=2)], ids=["a time", "an event"]
)
def test_a_caller_leaves_when_it_means_to_and_calls_again(manner: Manner) -> None:
    leaving = Call(1, "left", "GET", "/", frozenset(), manner=manner)
    first, second = replies(said(STREAM), leaving, leaving)
    assert (first.fate, second.fate) == ("left", "left")
    assert first.body.count(b"\n\n") >= 2
