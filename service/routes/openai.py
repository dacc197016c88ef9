"""POST /v1/completions, GET /v1/models and /v1/models/{name}: OpenAI's API.

The prompt is the source. What a request leaves open, its model decides, as everywhere here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from seqserve.errors import DeadlineError, NotFoundError, SeqserveError
from seqserve.parameters import MANY, MAX_SEED, ONE, Bias, Strict, list_or_not
from seqserve.schemas import (
    Details,
    FinishReason,
    Generated,
    GenerateRequest,
    GenerateResponse,
    Ids,
    StreamEvent,
    Texts,
    Token,
)
from service.catalogue import Entry
from service.defaults import default_decoding
from service.errors import Dialect, renamed
from service.numbers import dump_json
from service.routes.common import JsonRoute, model_of, models_of, seconds_of
from service.routes.generate import (
    EventStream,
    check_speaks,
    generate_request,
    likeliest_first,
    planned,
    sequences_of,
    streamed,
    whole,
)
from service.validation import shown

router = APIRouter(prefix="/v1", route_class=JsonRoute, tags=["openai"])

DONE = b"[DONE]"
"""What a stream ends with."""

# --- errors --------------------------------------------------------------------------------------

CODES = {
    "overloaded": "rate_limit_exceeded",
    "unauthorized": "invalid_api_key",
}
"""Kinds of errors that OpenAI's API has a name of its own for."""


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """The envelope of errors under /v1."""

    error: ErrorObject


def _error_body(error: SeqserveError, request_id: str | None) -> dict[str, Any]:
    described = ErrorObject(
        message=error.message,
        type=_error_type(_status(error)),
        param=error.param,
        code=_code(error),
    )
    return ErrorBody(error=described).model_dump()


def _code(error: SeqserveError) -> str:
    if isinstance(error, NotFoundError) and error.param == "model":
        return "model_not_found"
    return CODES.get(error.error_type, error.error_type)


def _error_type(
    status: int,
) -> Literal["invalid_request_error", "rate_limit_error", "server_error"]:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _status(error: SeqserveError) -> int:
    return 400 if error.status == 422 else error.status


def _headers(error: SeqserveError) -> dict[str, str]:
    """The client tries again by itself; of what took too long that would come to nothing."""
    return {"x-should-retry": "false"} if isinstance(error, DeadlineError) else {}


DIALECT = Dialect(
    lambda method, path: path == "/v1" or path.startswith("/v1/"), _error_body, _status, _headers
)

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is wrong, or there are too many."},
    "5XX": {"model": ErrorBody, "description": "The model failed, is loading, or took too long."},
}

# --- request -------------------------------------------------------------------------------------


def _texts_or_ids(value: Any) -> str:
    ids = isinstance(value, list) and len(value) > 0 and isinstance(value[0], int | list)
    return MANY if ids else ONE


Prompt = Annotated[
    Annotated[Texts, Tag(ONE)] | Annotated[Ids, Tag(MANY)], Discriminator(_texts_or_ids)
]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Stop = Annotated[
    Annotated[StopText, Tag(ONE)] | Annotated[list[StopText], Field(max_length=4), Tag(MANY)],
    Discriminator(list_or_not),
]


class StreamOptions(Strict):
    """What a stream tells beside the text."""

    include_usage: bool = Field(False, description="A last chunk, without choices, has `usage`.")
    include_obfuscation: Literal[False] | None = Field(None, description="Not supported.")


class CompletionRequest(Strict):
    """Continue each prompt."""

    prompt: Prompt = Field(
        description="The source: a text, token ids, or a list of either.", examples=["hello"]
    )
    model: str | None = Field(
        None, description="Name of the model. Null: the first one that the server has."
    )
    max_tokens: int | None = Field(
        None, ge=0, description="Tokens to generate at most. Null: the model's default."
    )
    temperature: float | None = Field(
        None,
        ge=0.0,
        le=2.0,
        description="0: greedy, whatever else is asked for. Null: as the model's defaults say.",
    )
    top_p: float | None = Field(None, gt=0.0, le=1.0, description="Below 1 it means to draw.")
    seed: int | None = Field(
        None, ge=0, le=MAX_SEED, description="Of the draws; without any it changes nothing."
    )
    n: int = Field(1, ge=1, description="Choices for each prompt.")
    best_of: int | None = Field(
        None,
        ge=1,
        description="Draw so many, and return the `n` with the highest log-probability per token.",
    )
    logprobs: int | None = Field(
        None, ge=0, le=5, description="Log-probabilities of the tokens, and of so many likeliest."
    )
    stop: Stop | None = Field(None, description="Up to four texts that end the answer.")
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    logit_bias: dict[str, Bias] | None = Field(None, max_length=1000)
    stream: bool = Field(False, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    echo: bool = Field(False, description="Not supported: a source is no beginning of its target.")
    suffix: str | None = Field(None, description="Not supported.")
    user: str | None = Field(None, description="Neither used nor kept.")
    task: str | None = Field(None, description="As in /generate; not OpenAI's.")
    src_lang: str | None = Field(None, description="As in /generate; not OpenAI's.")
    tgt_lang: str | None = Field(None, description="As in /generate; not OpenAI's.")
    truncate: int | None = Field(None, ge=1, description="As in /generate; not OpenAI's.")

    @model_validator(mode="after")
    def _can_be_meant(self) -> Self:
        if self.echo:
            raise ValueError(
                "echo must be false: a prompt is a source here, not the beginning of the answer, "
                "got true"
            )
        if self.suffix is not None:
            raise ValueError(
                f"suffix must be null: nothing is inserted here, got {shown(self.suffix)}"
            )
        if self.draws < self.n:
            raise ValueError(f"best_of must be at least n, {self.n}, got {self.best_of}")
        if self.stream and self.draws > self.n:
            raise ValueError(f"best_of must be n, {self.n}, in a stream, got {self.best_of}")
        if self.temperature == 0 and self.draws > 1:
            name = "n" if self.best_of is None else "best_of"
            raise ValueError(f"{name} must be 1 with temperature 0, got {self.draws}")
        if self.stream_options and not self.stream:
            raise ValueError("stream_options need stream to be true, got false")
        return self

    @property
    def draws(self) -> int:
        """Continuations of each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def prompts(self) -> int:
        """Number of prompts."""
        many = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return len(self.prompt) if many else 1

    def names(self) -> dict[str, str]:
        """How messages call our fields, see `renamed`."""
        return {
            r"at most num_beams, (\d+), without sampling": r"at most \1 unless temperature is set",
            r"\bfewer inputs\b": "fewer prompts",
            r"\binput(s|_ids)\b": "prompt",
            r"\bparameters\.": "",
            r"\bmax_new_tokens\b": "max_tokens",
            r"\bnum_return_sequences\b": "n" if self.best_of is None else "best_of",
            r"\btop_n_tokens\b": "logprobs",
        }

    def ours(self, draws_by_default: bool) -> GenerateRequest:
        """The same for /generate.

        Args:
            draws_by_default: whether the model draws tokens where a request says nothing.

        Raises:
            InvalidRequestError: fields do not agree; names them as /generate does.
        """
        texts = _texts_or_ids(self.prompt) == ONE
        parameters = {
            **self._picking(draws_by_default),
            "max_new_tokens": self.max_tokens,
            "num_return_sequences": self.draws if self.draws > 1 else None,
            "details": True,
            "top_n_tokens": self.logprobs,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "logit_bias": self.logit_bias,
            "task": self.task,
            "src_lang": self.src_lang,
            "tgt_lang": self.tgt_lang,
            "truncate": self.truncate,
        }
        inputs = {"inputs" if texts else "input_ids": self.prompt}
        return generate_request(model=self.model, **inputs, parameters=parameters)

    def _picking(self, draws_by_default: bool) -> dict[str, Any]:
        """How tokens are picked: what only draws need must not lead to any."""
        if self.temperature == 0:
            return {"do_sample": False, "num_beams": 1}
        top_p = None if self.top_p == 1 else self.top_p
        draws = self.temperature is not None or top_p is not None or draws_by_default
        seed = self.seed if draws else None
        return {"temperature": self.temperature, "top_p": top_p, "seed": seed}


# --- answer --------------------------------------------------------------------------------------


class Logprobs(BaseModel):
    """Of a choice's tokens, but for special ones, which add no text."""

    tokens: list[str] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    top_logprobs: list[dict[str, float | None]] = Field(default_factory=list)
    text_offset: list[int] = Field(
        default_factory=list, description="Where each token begins in the choice's text."
    )


class Choice(BaseModel):
    """One continuation of one prompt."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None


class Usage(BaseModel):
    """Tokens of all prompts and of all that was generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    """An answer, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


FINISH_REASONS: dict[FinishReason, Literal["stop", "length"]] = {
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
}


def logprobs_of(
    tokens: Sequence[Token], likeliest: Sequence[Sequence[Token]], offset: int = 0
) -> Logprobs:
    """Tokens as OpenAI tells of them.

    Args:
        likeliest: at the same places; empty where none were asked for.
        offset: of the first token in the text.
    """
    told = Logprobs()
    for place, token in enumerate(tokens):
        if token.special:
            continue
        text = _text_of(token)
        told.tokens.append(text)
        told.token_logprobs.append(token.logprob)
        told.top_logprobs.append(_top(token, likeliest[place] if likeliest else ()))
        told.text_offset.append(offset)
        offset += len(text)
    return told


def _top(token: Token, likeliest: Iterable[Token]) -> dict[str, float | None]:
    """The likeliest tokens, best first, and in any case the one that was taken."""
    own = _text_of(token)
    told: dict[str, float | None] = {}
    for candidate in likeliest:
        name = own if candidate.id == token.id else candidate.text or ""
        told.setdefault(name, candidate.logprob)
    return told | {own: token.logprob}


def _text_of(token: Token) -> str:
    """What a token adds to the text."""
    return "" if token.special else token.text or ""


@dataclass
class Writer:
    """Writes the answer to one request, whole or in chunks."""

    body: CompletionRequest
    model: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    _offsets: Counter[int] = field(default_factory=Counter)
    _prompt_tokens: dict[int, int] = field(default_factory=dict)
    _completion_tokens: int = 0

    def whole(self, replies: list[GenerateResponse]) -> dict[str, Any]:
        """The answer, of a reply for each prompt."""
        choices: list[Choice] = []
        for place, reply in enumerate(replies):
            sequences = sequences_of(reply)
            for sequence in sequences:
                self._count(place, _details_of(sequence))
            if self.body.draws > self.body.n:
                sequences = likeliest_first(sequences)[: self.body.n]
            first = place * self.body.n
            choices += [self._choice(i, s) for i, s in enumerate(sequences, first)]
        return self._completion(choices, self._usage()).model_dump()

    def chunk(self, place: int, event: StreamEvent) -> Iterator[dict[str, Any]]:
        """What an event of a stream becomes; special tokens say nothing unless they are the last.

        Args:
            place: of the prompt.
        """
        if event.details:
            self._count(place, event.details)
        text = _text_of(event.token) if event.token else ""
        if event.token and event.token.special and not event.details:
            return
        index = place * self.body.n + event.sequence
        choice = Choice(
            index=index,
            text=text,
            logprobs=self._logprobs(
                [event.token] if event.token else [],
                [event.top_tokens] if event.top_tokens else [],
                self._offsets[index],
            ),
            finish_reason=FINISH_REASONS[event.details.finish_reason] if event.details else None,
        )
        self._offsets[index] += len(text)
        yield self._chunk([choice])

    def end(self) -> Iterator[bytes]:
        """What a stream says when all choices have come."""
        if self._counts:
            yield dump_json(self._chunk([], self._usage()))
        yield DONE

    @property
    def _counts(self) -> bool:
        options = self.body.stream_options
        return options is not None and options.include_usage

    def _chunk(self, choices: list[Choice], usage: Usage | None = None) -> dict[str, Any]:
        completion = self._completion(choices, usage)
        return completion.model_dump(exclude=None if self._counts else {"usage"})

    def _completion(self, choices: list[Choice], usage: Usage | None) -> Completion:
        return Completion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def _choice(self, index: int, sequence: Generated) -> Choice:
        details = _details_of(sequence)
        return Choice(
            index=index,
            text=sequence.generated_text or "",
            logprobs=self._logprobs(details.tokens, details.top_tokens or []),
            finish_reason=FINISH_REASONS[details.finish_reason],
        )

    def _logprobs(
        self, tokens: Sequence[Token], likeliest: Sequence[Sequence[Token]], offset: int = 0
    ) -> Logprobs | None:
        return None if self.body.logprobs is None else logprobs_of(tokens, likeliest, offset)

    def _count(self, place: int, details: Details) -> None:
        self._prompt_tokens[place] = details.input_tokens
        self._completion_tokens += details.generated_tokens

    def _usage(self) -> Usage:
        prompt, completion = sum(self._prompt_tokens.values()), self._completion_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
        )


def _details_of(sequence: Generated) -> Details:
    assert sequence.details  # they are always asked for
    return sequence.details


# --- routes --------------------------------------------------------------------------------------


@router.post(
    "/completions",
    summary="OpenAI: continue each prompt",
    response_model=Completion,
    responses=ERRORS | streamed("With `stream`: server-sent events, each a `Completion`."),
)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """`n` choices for each prompt, in order; events, then `[DONE]`, with `"stream": true`."""
    model = model_of(request, body.model, body.prompts)
    check_speaks(model)
    with renamed(body.names()):
        ours = body.ours(default_decoding(model.loaded.spec.defaults) == "sampling")
        model, plans = await planned(request, ours)
    writer = Writer(body, model.name, f"cmpl-{request.state.request_id}")
    if body.stream:
        seconds = seconds_of(request, None)
        return EventStream(request, model, plans, seconds, writer.chunk, writer.end)
    return await whole(request, model, plans, None, writer.whole)


class ModelCard(BaseModel):
    """A model, as OpenAI tells of it."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="When it was loaded, in seconds since the epoch.")
    owned_by: Literal["seqserve"] = "seqserve"


class ModelList(BaseModel):
    """The models that can be asked."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


@router.get("/models", summary="OpenAI: the models", responses=ERRORS)
async def models(request: Request) -> ModelList:
    """Those in memory, the one that answers where none is named first."""
    host = models_of(request)
    served = {model.name: model for model in host.served}
    return ModelList(data=[_card(served[name]) for name in host.names if name in served])


@router.get("/models/{name}", summary="OpenAI: one model", responses=ERRORS)
async def model_card(request: Request, name: str) -> ModelCard:
    """Whether there is such a model, and whether it is in memory."""
    return _card(models_of(request).find(name))


def _card(model: Entry) -> ModelCard:
    return ModelCard(id=model.name, created=int(model.loaded_at))
