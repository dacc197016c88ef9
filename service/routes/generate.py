"""POST /generate and /generate_stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from model.sequence import Event, TokenEvent
from seqserve.errors import ClientGoneError, InvalidRequestError, SeqserveError
from seqserve.schemas import GenerateRequest, GenerateResponse, StreamEvent
from service.errors import OF_A_RUN, envelope_of, responses
from service.numbers import dump_json
from service.observation import record_of
from service.planning import Plan
from service.routes.common import (
    BYTES_PER_TOKEN,
    NUMBERS_PER_TOKEN,
    JsonRoute,
    answer,
    body_size,
    check_size,
    check_time,
    model_of,
    run,
    running,
    seconds_of,
    settings_of,
    sized,
    times,
)
from service.runner import Ticket
from service.served import ServedModel

router = APIRouter(route_class=JsonRoute, tags=["generate"])

EXAMPLES = {
    "text": {"summary": "One text", "value": {"inputs": "hello"}},
    "list": {"summary": "Several texts", "value": {"inputs": ["hello", "world"]}},
    "details": {
        "summary": "Tokens and log-probabilities",
        "value": {"inputs": "hello", "parameters": {"details": True}},
    },
    "beams": {
        "summary": "The best three of a beam search",
        "value": {
            "inputs": "hello",
            "parameters": {"num_beams": 5, "num_return_sequences": 3},
        },
    },
    "sampling": {
        "summary": "Draw instead of taking the likeliest",
        "value": {"inputs": "hello", "parameters": {"temperature": 0.8, "top_p": 0.9, "seed": 1}},
    },
}


class EventStream(Response):
    """A plan's events as they come.

    What is refused is refused before the first byte, with its status; a later error is an event.
    """

    media_type = "text/event-stream"

    def __init__(self, request: Request, model: ServedModel, plan: Plan, seconds: float) -> None:
        super().__init__(headers={"X-Accel-Buffering": "no", "Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._request = request
        self._model = model
        self._plan = plan
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        record.streamed = True
        async with running(
            self._request, self._model, self._plan.sequences, self._seconds
        ) as ticket:
            steps = ticket.steps()
            first: list[Event] = await anext(steps, [])  # an error up to here has its own status
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            try:
                async for event in self._told(first, steps, ticket):
                    await _send(send, event.model_dump(exclude_unset=True))
            except ClientGoneError as error:
                record.note_error(error)
                return
            except SeqserveError as error:
                record.note_error(error)
                await _send(send, envelope_of(error, self._request.state.request_id))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _told(
        self, first: list[Event], steps: AsyncIterator[list[Event]], ticket: Ticket
    ) -> AsyncIterator[StreamEvent]:
        stream = self._model.generator.stream(self._plan)
        if not self._plan.sequences:
            for told in stream.nothing():
                yield told
        for event in _tokens(first):
            for told in stream.push(event):
                yield _timed(told, ticket)
        async for events in steps:
            for event in _tokens(events):
                for told in stream.push(event):
                    yield _timed(told, ticket)


STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "With `stream`: server-sent events, each `data: ` and a `StreamEvent`.",
        "content": {
            "text/event-stream": {
                "itemSchema": {  # of OpenAPI 3.2: the body is a sequence of such events
                    "type": "object",
                    "required": ["data"],
                    "properties": {
                        "data": {"type": "string", "contentMediaType": "application/json"}
                    },
                }
            },
        },
    }
}


@router.post(
    "/generate",
    summary="Continue each input",
    response_model=GenerateResponse | list[GenerateResponse],
    responses=responses(*OF_A_RUN) | STREAM,
    openapi_extra={"requestBody": {"content": {"application/json": {"examples": EXAMPLES}}}},
)
async def generate(request: Request, body: GenerateRequest) -> Response:
    """One object for one input, a list of objects for a list; events with `"stream": true`."""
    model, plans = await _planned(request, body)
    if body.stream:
        return EventStream(request, model, plans[0], seconds_of(request, body.timeout))
    works = [sequence for plan in plans for sequence in plan.sequences]
    outcome = await run(request, model, works, body.timeout)
    events = dict(zip(works, map(_tokens, outcome.events), strict=True))

    def write() -> bytes:
        replies = [
            model.generator.answer(plan, events).model_dump(exclude_unset=True) for plan in plans
        ]
        return dump_json(replies if body.is_list else replies[0])

    candidates = sum(plan.most_candidates for plan in plans)
    generated_tokens = sum(len(tokens) for tokens in outcome.events)
    return answer(
        await sized(BYTES_PER_TOKEN * (generated_tokens + candidates), write),
        outcome,
        prompt_tokens=sum(len(plan.source.ids) for plan in plans),
        generated_tokens=generated_tokens,
    )


@router.post(
    "/generate_stream",
    summary="Continue one input, token by token",
    response_class=StreamingResponse,  # what the OpenAPI document says of it
    responses=responses(*OF_A_RUN) | STREAM,
)
async def generate_stream(request: Request, body: GenerateRequest) -> Response:
    """Server-sent events: `/generate` with `"stream": true`."""
    if body.is_list:
        raise InvalidRequestError(f"a stream needs one input, got a list of {body.count}", "inputs")
    model, plans = await _planned(request, body.model_copy(update={"stream": True}))
    return EventStream(request, model, plans[0], seconds_of(request, body.timeout))


async def _planned(request: Request, body: GenerateRequest) -> tuple[ServedModel, list[Plan]]:
    settings = settings_of(request)
    sequences = 0
    for i in range(body.count):
        parameters, place = body.parameters_of(i), body.parameters_place(i)
        sequences += (parameters.num_return_sequences or 1) if parameters.samples else 1
        for name, limit in (
            ("num_return_sequences", ("max_return_sequences", settings.max_return_sequences)),
            ("num_beams", settings.beam_limit),
        ):
            setting, most = limit
            if (wanted := getattr(parameters, name) or 1) > most:
                message = f"{place}.{name} must be at most {most} ({setting}), got {wanted}"
                raise InvalidRequestError(message, f"{place}.{name}")
    if sequences > settings.max_queue:
        raise InvalidRequestError(
            f"num_return_sequences of all inputs come to {sequences} draws, at most "
            f"{settings.max_queue} are allowed (max_queue)"
        )
    model = model_of(request, body.model, body.count)
    check_time(request, body.timeout)
    plans = await sized(await body_size(request), model.generator.plan, body)
    candidates = sum(plan.most_candidates for plan in plans)
    advice = "ask for fewer inputs, or for a lower top_n_tokens or max_new_tokens"
    check_size(request, NUMBERS_PER_TOKEN * candidates, advice)
    return model, plans


def _timed(event: StreamEvent, ticket: Ticket) -> StreamEvent:
    """With the times that headers tell of other answers."""
    if event.details is None:
        return event
    queue_time, inference_time = times(ticket)
    update = {"queue_time": queue_time, "inference_time": inference_time}
    return event.model_copy(update={"details": event.details.model_copy(update=update)})


async def _send(send: Send, content: dict[str, Any]) -> None:
    """One server-sent event."""
    body = b"data: " + dump_json(content) + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _tokens(events: Iterable[Event]) -> list[TokenEvent]:
    return [event for event in events if isinstance(event, TokenEvent)]
