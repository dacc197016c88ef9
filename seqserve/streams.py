"""Streams of events: reading them, and the iterators that hand them out."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Iterator
from types import TracebackType
from typing import Self

from seqserve.errors import NoConnectionError, SeqserveError
from seqserve.events import EventReader
from seqserve.failures import error_from
from seqserve.schemas import ErrorResponse, StreamEvent


class StreamReader:
    """The events of a stream, as its bytes arrive.

    Attributes:
        began: whether there has been one.
    """

    def __init__(self) -> None:
        self.began = False
        self._events = EventReader()
        self._open: set[int] = set()  # sequences whose last event has not come

    def push(self, piece: bytes) -> Iterator[StreamEvent]:
        """The events that end with this piece.

        Raises:
            SeqserveError: one of them is an error.
        """
        for data in self._events.push(piece):
            event = read_event(data)
            self.began = True
            if event.details is None:
                self._open.add(event.sequence)
            else:
                self._open.discard(event.sequence)
            yield event

    def check_complete(self) -> None:
        """To be called once all has arrived.

        Raises:
            NoConnectionError: the end is missing.
        """
        if self._open or not self.began:
            raise NoConnectionError("the stream ended before its last event")


def read_event(data: str) -> StreamEvent:
    """One event of a stream.

    Raises:
        SeqserveError: it is an error, or nothing that this client knows.
    """
    try:
        fields = json.loads(data)
        if isinstance(fields, dict) and "error" in fields:
            blank = {"error_type": "internal", "param": None, "request_id": None}
            raise error_from(ErrorResponse.model_validate({**blank, **fields}))
        return StreamEvent.model_validate(fields)
    except ValueError as error:  # pydantic's are such too
        raise SeqserveError(f"an event of the stream cannot be read: {data[:200]}") from error


class Stream:
    """The events of one generation as they come; as a context manager, it ends with its block.

    Nothing is sent before the first event is asked for. Closing the stream closes its connection,
    and the server frees its rows within a step.
    """

    def __init__(self, events: Generator[StreamEvent, None, None]) -> None:
        self._events = events

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamEvent:
        return next(self._events)

    def close(self) -> None:
        """End the generation."""
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncStream:
    """`Stream` for asyncio: an asynchronous iterator and context manager."""

    def __init__(self, events: AsyncGenerator[StreamEvent, None]) -> None:
        self._events = events

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        return await anext(self._events)

    async def aclose(self) -> None:
        """End the generation."""
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
