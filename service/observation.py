"""What is told of every request once it has ended: to the log, the metrics and the traces.

A `RequestRecord` holds counts, times and names. Neither texts nor keys nor addresses come into it,
so none can leave through whoever listens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import cast

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seqserve.errors import ClientGoneError, SeqserveError
from service.runner import Ticket

OTHER = "other"
"""Stands for a path or method that the server does not know, whatever it was."""

UNKNOWN_MODEL = "unknown"
"""Stands for a model that the server does not have, whatever its name was."""

PROBES = frozenset({"/health", "/metrics", "/ping", "/ready"})
"""Routes that machines ask every few seconds."""

METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


@dataclass
class RequestRecord:
    """What is known of a request.

    Attributes:
        method, route: the route's template; `OTHER` for what the server does not know.
        request_id: as in the response.
        headers: of the request; for the context of a trace alone.
        model: name of the model asked for; empty where the route or the error came before one.
        status: of the response; 0 if none began.
        error_type: of the error in the response or, after its status, in its stream.
        streamed: whether the answer is a stream of events.
        inputs: texts or id lists.
        ticket: of the engine's work for it, where it came so far.
        trace_id: of the span that tells of it, where traces are on.
        wall, started, ended: nanoseconds since the epoch; `time.perf_counter` at both ends.
    """

    method: str
    headers: Headers
    route: str = OTHER
    request_id: str = ""
    model: str = ""
    status: int = 0
    error_type: str | None = None
    streamed: bool = False
    inputs: int = 0
    ticket: Ticket | None = None
    trace_id: str | None = None
    wall: int = field(default_factory=time.time_ns)
    started: float = field(default_factory=time.perf_counter)
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """From its arrival to the end of the response."""
        return self.ended - self.started

    @property
    def client_gone(self) -> bool:
        """Whether the caller closed the connection before the answer."""
        return self.error_type == ClientGoneError.error_type

    @property
    def prompt_tokens(self) -> int:
        """Source tokens handed to the engine; a source of several works counts once."""
        works = self.ticket.works if self.ticket else ()
        return sum({id(work.src): len(work.src) for work in works}.values())

    @property
    def generated_tokens(self) -> int:
        return self.ticket.generated if self.ticket else 0

    @property
    def queue(self) -> tuple[float, float] | None:
        """When the engine's queue was entered and left; None for what never got there."""
        if self.ticket is None or not self.ticket.works:
            return None
        submitted, began = self.ticket.submitted, self.ticket.began
        return submitted, self._over if began is None else max(began, submitted)

    @property
    def inference(self) -> tuple[float, float] | None:
        """From the first step that ran for it to the last; None if there was none."""
        if self.queue is None or self.ticket is None or self.ticket.began is None:
            return None
        return self.queue[1], self._over

    @property
    def first_token_seconds(self) -> float | None:
        """From the request's arrival to its first token."""
        first = self.ticket.first_token if self.ticket else None
        return None if first is None else first - self.started

    @property
    def seconds_per_token(self) -> float | None:
        """Between two tokens of the longest sequence, on average; None for fewer than two."""
        ticket = self.ticket
        if ticket is None or ticket.first_token is None or ticket.ended is None:
            return None
        if ticket.longest < 2:
            return None
        return (ticket.ended - ticket.first_token) / (ticket.longest - 1)

    @property
    def _over(self) -> float:
        assert self.ticket
        return self.ended if self.ticket.ended is None else self.ticket.ended

    def note_error(self, error: SeqserveError) -> None:
        """The request failed."""
        self.error_type = error.error_type


Listener = Callable[[RequestRecord], None]


def refused(error: SeqserveError, request_id: str) -> RequestRecord:
    """The record of what was refused before it was a request."""
    record = RequestRecord(OTHER, Headers(), request_id=request_id, status=error.status)
    record.note_error(error)
    record.ended = record.started
    return record


def record_of(scope: Scope) -> RequestRecord:
    """What is noted of a request so far."""
    return cast("RequestRecord", scope["state"]["record"])


class Observed:
    """Outermost middleware: keeps a request's record and tells of it at the end.

    Args:
        on_start: told that a request has begun.
        listeners: told of each request that has ended, in order.
        root_path: under which a proxy publishes the server.
        paths: of all routes, for requests that are refused before a route sees them.
    """

    def __init__(
        self,
        app: ASGIApp,
        on_start: Callable[[], None],
        listeners: Sequence[Listener],
        root_path: str,
        paths: Collection[str],
    ) -> None:
        self.app = app
        self.on_start = on_start
        self.listeners = listeners
        self.root_path = root_path
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in METHODS else OTHER
        record = RequestRecord(method, Headers(scope=scope))
        state = scope.setdefault("state", {})
        state["record"] = record

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        self.on_start()
        try:
            await self.app(scope, receive, noting)
        except BaseException:
            record.error_type = record.error_type or SeqserveError.error_type
            raise
        finally:
            record.ended = time.perf_counter()
            record.request_id = state.get("request_id", "")
            record.route = self._route(scope)
            for listener in self.listeners:
                listener(record)

    def _route(self, scope: Scope) -> str:
        """The template of the route that the request was meant for."""
        template: str | None = getattr(scope.get("route"), "path", None)
        if template is not None:
            return template
        path: str = scope["path"].removeprefix(self.root_path)
        return path if path in self.paths else OTHER
