"""What the routes share: reading a body, finding the model, running work, timing it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from model.sequence import Event
from seqserve.errors import ClientGoneError, InvalidRequestError
from seqserve.schemas import TIMEOUT_LIMIT
from service.admission import Work
from service.catalogue import Catalogue, Entry
from service.limits import check_body
from service.observation import UNKNOWN_MODEL, record_of
from service.runner import Ticket, too_late, work_of
from service.served import ServedModel
from service.settings import Settings
from service.tensors import TensorFile
from service.validation import describe, parse_json

LARGE = 64 * 1024
"""Bytes or numbers from which tokenising and serialising leave the event loop."""

BYTES_PER_TOKEN = 64
"""What a described token takes in a JSON answer, about."""

NUMBERS_PER_TOKEN = 2
"""Its id and its log-probability."""

JSON = "application/json"
BINARY = "application/octet-stream"

P = ParamSpec("P")
T = TypeVar("T")


class JsonRequest(Request):
    """A request whose JSON is read strictly, within the limits, and off the loop where it is large.

    What it gives is validated already, so that FastAPI has nothing left to do with it.
    """

    async def json(self) -> BaseModel:
        body = await self.body()
        return await sized(len(body), self._read, body)

    def _read(self, body: bytes) -> BaseModel:
        content = self.parse(body)
        check_body(content, settings_of(self))
        schema: type[BaseModel] = self.scope["route"].body_field.field_info.annotation
        try:
            return schema.model_validate(content)
        except ValidationError as error:
            raise describe(error.errors(), schema) from error

    def parse(self, body: bytes) -> Any:
        """What a body says, not validated yet.

        Raises:
            SeqserveError: it cannot be read.
        """
        return parse_json(body)


class JsonRoute(APIRoute):
    """A route whose handler gets a `JsonRequest`."""

    request_class = JsonRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(self.request_class(request.scope, request.receive))

        return handle


@dataclass(frozen=True)
class Outcome:
    """What the engine made of a request's works.

    Attributes:
        events: of each work, in order.
        queue_time, inference_time: milliseconds.
    """

    events: list[list[Event]]
    queue_time: float
    inference_time: float


def models_of(request: Request) -> Catalogue[Entry]:
    """The application's models."""
    models: Catalogue[Entry] = request.app.state.models
    return models


def model_of(request: Request, name: str | None, inputs: int) -> ServedModel:
    """The model that a request asks for.

    Args:
        name: the body's; None is the default.
        inputs: texts or id lists in the body.

    Raises:
        SeqserveError: see `Models.get`.
    """
    models, record = models_of(request), record_of(request.scope)
    record.inputs = inputs
    record.model = models.names[0] if name is None else name
    if record.model not in models.names:
        record.model = UNKNOWN_MODEL
    return models.get(name)


def settings_of(request: Request) -> Settings:
    """The application's settings."""
    settings: Settings = request.app.state.settings
    return settings


async def sized(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function: here if its work is small, in a thread if it would hold the loop up."""
    if size < LARGE:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


async def body_size(request: Request) -> int:
    """Bytes of the body, which has been read."""
    return len(await request.body())


async def run(
    request: Request, model: ServedModel, works: Sequence[Work], seconds: float | None
) -> Outcome:
    """Have the engine do works for a caller who waits for whole answers.

    Args:
        seconds: the body's timeout; else the header's, else the server's.

    Raises:
        SeqserveError: see `Ticket.result`; the caller went away; the queue is full; the timeout
            header is no number in range.
    """
    async with running(request, model, works, seconds_of(request, seconds)) as ticket:
        events = await ticket.result()
    grouped: dict[Work, list[Event]] = {work: [] for work in works}
    for event in events:
        grouped[work_of(event)].append(event)
    return Outcome([grouped[work] for work in works], *times(ticket))


@asynccontextmanager
async def running(
    request: Request, model: ServedModel, works: Sequence[Work], seconds: float
) -> AsyncIterator[Ticket]:
    """The engine's work for a request, which ends when the caller goes away.

    Raises:
        SeqserveError: see `Runner.submitted`.
    """
    record = record_of(request.scope)
    async with (
        model.runner.submitted(works, seconds, since=record.started) as ticket,
        watched(request, ticket),
    ):
        record.ticket = ticket
        yield ticket


def seconds_of(request: Request, seconds: float | None) -> float:
    """How long a request may take: by its body, else its header, else the server.

    Raises:
        InvalidRequestError: see `header_timeout`.
    """
    header = header_timeout(request)  # refused where it is wrong, even if the body's counts
    return seconds or header or settings_of(request).timeout


def check_time(request: Request, seconds: float | None) -> None:
    """Refuse a request that has waited so long that nobody needs its answer, before it costs more.

    Args:
        seconds: the body's timeout.

    Raises:
        DeadlineError: its time is over.
        InvalidRequestError: see `header_timeout`.
    """
    seconds = seconds_of(request, seconds)
    if time.perf_counter() - record_of(request.scope).started >= seconds:
        raise too_late(seconds)


def header_timeout(request: Request) -> float | None:
    """Seconds from the header `x-request-timeout`.

    Raises:
        InvalidRequestError: it is no number in range.
    """
    text = request.headers.get("x-request-timeout")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= TIMEOUT_LIMIT:
        raise InvalidRequestError(
            f"x-request-timeout must be seconds in (0, {TIMEOUT_LIMIT:g}], got {text[:40]!r}",
            "x-request-timeout",
        )
    return seconds


def check_size(request: Request, size: int, advice: str, *, binary: bool = False) -> None:
    """Refuse a request whose answer would be too large.

    Args:
        size: numbers in the answer, at most.
        binary: whether it is a file rather than JSON.

    Raises:
        InvalidRequestError: these are more than the limit.
    """
    name = "max_tensor_values" if binary else "max_json_values"
    limit: int = getattr(settings_of(request), name)
    if size > limit:
        raise InvalidRequestError(
            f"the answer would hold {size} numbers, at most {limit} are allowed ({name}): {advice}"
        )


class TensorResponse(Response):
    """Tensors, sent from where they lie; others get their turn between two pieces."""

    media_type = BINARY

    def __init__(self, file: TensorFile, headers: dict[str, str]) -> None:
        super().__init__(headers={**headers, "content-length": str(len(file))})
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for piece in self._file:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def answer(
    body: bytes | TensorFile,
    outcome: Outcome,
    prompt_tokens: int,
    generated_tokens: int = 0,
) -> Response:
    """A written answer, with the headers of all answers that a model ran for."""
    headers = {
        "x-queue-time": f"{outcome.queue_time:.3f}",
        "x-inference-time": f"{outcome.inference_time:.3f}",
        "x-prompt-tokens": str(prompt_tokens),
        "x-generated-tokens": str(generated_tokens),
    }
    if isinstance(body, TensorFile):
        return TensorResponse(body, headers)
    return Response(body, 200, headers, JSON)


def times(ticket: Ticket) -> tuple[float, float]:
    """Milliseconds in the queue and in the engine."""
    if ticket.began is None or ticket.ended is None:  # nothing had to run
        return 0.0, 0.0
    began = max(ticket.began, ticket.submitted)
    return (began - ticket.submitted) * 1e3, (ticket.ended - began) * 1e3


@asynccontextmanager
async def watched(request: Request, ticket: Ticket) -> AsyncIterator[None]:
    """End the ticket when the caller goes away: Starlette lets a handler run on."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        ticket.fail(ClientGoneError("the caller closed the connection"))

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
