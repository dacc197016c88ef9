"""POST /generate and /generate_stream."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from model.sequence import Event, TokenEvent
from model.sequence import Sequence as Row
from seqserve.errors import ClientGoneError, InvalidRequestError, SeqserveError
from seqserve.schemas import Generated, GenerateRequest, GenerateResponse, StreamEvent
from service.errors import OF_A_RUN, responses, spoken
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
from service.validation import describe

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


Teller = Callable[[int, StreamEvent], Iterable[dict[str, Any]]]
"""What a stream says: the number of an input and what became of it -> events, as JSON objects."""


def nothing() -> Iterable[bytes]:
    """What most streams say at their end."""
    return ()


class EventStream(Response):
    """The events of plans as they come.

    What is refused is refused before the first byte, with its status; a later error is an event.

    Args:
        plans: of one request.
        seconds: until it fails.
        tell: what becomes of the events.
        end: what is said when all have come.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        request: Request,
        model: ServedModel,
        plans: Sequence[Plan],
        seconds: float,
        tell: Teller,
        end: Callable[[], Iterable[bytes]] = nothing,
    ) -> None:
        super().__init__(headers={"X-Accel-Buffering": "no", "Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._request = request
        self._model = model
        self._plans = plans
        self._seconds = seconds
        self._tell = tell
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        record.streamed = True
        async with running(
            self._request, self._model, works_of(self._plans), self._seconds
        ) as ticket:
            steps = ticket.steps()
            first: list[Event] = await anext(steps, [])  # an error up to here has its own status
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            try:
                async for place, event in self._told(first, steps, ticket):
                    for content in self._tell(place, event):
                        await _send(send, dump_json(content))
                for data in self._end():
                    await _send(send, data)
            except ClientGoneError as error:
                record.note_error(error)
                return
            except SeqserveError as error:
                record.note_error(error)
                await _send(send, dump_json(spoken(error, scope)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _told(
        self, first: list[Event], steps: AsyncIterator[list[Event]], ticket: Ticket
    ) -> AsyncIterator[tuple[int, StreamEvent]]:
        streams = [self._model.generator.stream(plan) for plan in self._plans]
        places = {row: place for place, plan in enumerate(self._plans) for row in plan.sequences}
        for place, plan in enumerate(self._plans):
            if not plan.sequences:
                for event in streams[place].nothing():
                    yield place, _timed(event, ticket)
        for token in _tokens(first):
            place = places[token.sequence]
            for event in streams[place].push(token):
                yield place, _timed(event, ticket)
        async for events in steps:
            for token in _tokens(events):
                place = places[token.sequence]
                for event in streams[place].push(token):
                    yield place, _timed(event, ticket)


def streamed(description: str) -> dict[int | str, dict[str, Any]]:
    """The answer of a route that may answer with events, for the OpenAPI document."""
    events = {  # of OpenAPI 3.2: the body is a sequence of such events
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"type": "string", "contentMediaType": "application/json"}},
    }
    content = {"text/event-stream": {"itemSchema": events}}
    return {200: {"description": description, "content": content}}


STREAM = streamed("With `stream`: server-sent events, each `data: ` and a `StreamEvent`.")


@router.post(
    "/generate",
    summary="Continue each input",
    response_model=GenerateResponse | list[GenerateResponse],
    responses=responses(*OF_A_RUN) | STREAM,
    openapi_extra={"requestBody": {"content": {"application/json": {"examples": EXAMPLES}}}},
)
async def generate(request: Request, body: GenerateRequest) -> Response:
    """One object for one input, a list of objects for a list; events with `"stream": true`."""
    model, plans = await planned(request, body)
    if body.stream:
        return EventStream(request, model, plans, seconds_of(request, body.timeout), _as_it_is)

    def write(replies: list[GenerateResponse]) -> Any:
        told = [reply.model_dump(exclude_unset=True) for reply in replies]
        return told if body.is_list else told[0]

    return await whole(request, model, plans, body.timeout, write)


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
    model, plans = await planned(request, body.model_copy(update={"stream": True}))
    return EventStream(request, model, plans, seconds_of(request, body.timeout), _as_it_is)


def _as_it_is(place: int, event: StreamEvent) -> Iterable[dict[str, Any]]:
    return [event.model_dump(exclude_unset=True)]


def generate_request(**fields: Any) -> GenerateRequest:
    """The request that another API's becomes.

    Raises:
        InvalidRequestError: names a field as /generate calls it.
    """
    try:
        return GenerateRequest.model_validate(fields)
    except ValidationError as error:
        raise describe(error.errors(), GenerateRequest) from error


async def planned(request: Request, body: GenerateRequest) -> tuple[ServedModel, list[Plan]]:
    """The model asked for, and a plan for each input.

    Raises:
        SeqserveError: there is no such model; it cannot serve this; it is more than is allowed.
    """
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
    advice = "ask for fewer inputs, a lower top_n_tokens or max_new_tokens, or no beam_steps"
    check_size(request, NUMBERS_PER_TOKEN * candidates, advice)
    return model, plans


async def whole(
    request: Request,
    model: ServedModel,
    plans: Sequence[Plan],
    seconds: float | None,
    write: Callable[[list[GenerateResponse]], Any],
) -> Response:
    """Run plans, and answer when all is done.

    Args:
        seconds: see `run`.
        write: the answer's JSON, of a reply for each plan.

    Raises:
        SeqserveError: see `run`.
    """
    works = works_of(plans)
    outcome = await run(request, model, works, seconds)
    events = dict(zip(works, map(_tokens, outcome.events), strict=True))

    def body() -> bytes:
        return dump_json(write([model.generator.answer(plan, events) for plan in plans]))

    candidates = sum(plan.most_candidates for plan in plans)
    generated_tokens = sum(len(tokens) for tokens in outcome.events)
    return answer(
        await sized(BYTES_PER_TOKEN * (generated_tokens + candidates), body),
        outcome,
        prompt_tokens=sum(len(plan.source.ids) for plan in plans),
        generated_tokens=generated_tokens,
    )


def works_of(plans: Iterable[Plan]) -> list[Row]:
    """What the engine has to run."""
    return [sequence for plan in plans for sequence in plan.sequences]


def check_speaks(model: ServedModel) -> None:
    """Refuse a model that has no texts to answer with, where an API knows nothing else.

    Raises:
        InvalidRequestError: it has no tokenizer.
    """
    if model.generator.target.tokenizer is None:
        raise InvalidRequestError(
            f"model {model.name} has no tokenizer, so it cannot answer with text here: "
            "/generate answers with token ids",
            "model",
        )


def sequences_of(reply: GenerateResponse) -> list[Generated]:
    """All continuations of an input, also where there is one."""
    if reply.sequences is not None:
        return reply.sequences
    return [Generated(generated_text=reply.generated_text, details=reply.details)]


def likeliest_first(sequences: Iterable[Generated]) -> list[Generated]:
    """Draws by what other APIs call the best: the highest log-probability per token."""
    return sorted(sequences, key=_mean_logprob, reverse=True)


def _mean_logprob(sequence: Generated) -> float:
    tokens = sequence.details.tokens if sequence.details else []
    logprobs = [-math.inf if token.logprob is None else token.logprob for token in tokens]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0


def _timed(event: StreamEvent, ticket: Ticket) -> StreamEvent:
    """With the times that headers tell of other answers."""
    if event.details is None:
        return event
    queue_time, inference_time = times(ticket)
    update = {
        "queue_time": queue_time,
        "inference_time": inference_time,
        "input_length": event.details.input_tokens,
    }
    return event.model_copy(update={"details": event.details.model_copy(update=update)})


async def _send(send: Send, data: bytes) -> None:
    """One server-sent event."""
    body = b"data: " + data + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _tokens(events: Iterable[Event]) -> list[TokenEvent]:
    return [event for event in events if isinstance(event, TokenEvent)]
