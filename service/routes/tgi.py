"""POST /: text-generation-inference's API, and that of the pipelines for translation and summaries.

Clients of Hugging Face send everything to the address that they are given. One reply serves all:
it has `generated_text`, `translation_text` and `summary_text`. `/generate` and `/generate_stream`
speak our own, which is close; here that server's rules hold where they differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BaseModel, Field, model_validator

from model.config import ModelSpec
from seqserve.errors import GenerationFailedError, InvalidRequestError, SeqserveError
from seqserve.parameters import MAX_STOPS, GenerationParameters
from seqserve.schemas import (
    Answer,
    Generated,
    GenerateResponse,
    Request,
    StreamEvent,
    Texts,
    as_list,
)
from service.catalogue import Catalogue, Entry
from service.defaults import default_decoding
from service.errors import Dialect, renamed
from service.observation import record_of
from service.routes.common import JsonRoute, model_of, seconds_of, times
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
from service.served import ServedModel
from service.settings import Settings

router = APIRouter(route_class=JsonRoute, tags=["text-generation-inference"])

FURTHER = "parameters.generate_parameters"

DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
"""Whoever sets one of them means to draw, even beside `do_sample: false`."""


# --- errors --------------------------------------------------------------------------------------


class ErrorBody(BaseModel):
    """The envelope of errors at this path."""

    error: str
    error_type: str


def _error_body(error: SeqserveError, request_id: str | None) -> dict[str, Any]:
    return ErrorBody(error=error.message, error_type=error.error_type).model_dump()


def _status(error: SeqserveError) -> int:
    return 424 if isinstance(error, GenerationFailedError) else error.status


DIALECT = Dialect(lambda method, path: (method, path) == ("POST", "/"), _error_body, _status)

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "As for /generate; 424: the model failed."},
    "5XX": {"model": ErrorBody, "description": "As for /generate."},
}

# --- request -------------------------------------------------------------------------------------


class PipelineParameters(GenerationParameters):
    """What the pipelines hand on to the model."""

    max_length: int | None = Field(
        None, ge=1, description="`max_new_tokens` and the decoder start together."
    )
    min_length: int | None = Field(
        None, ge=0, description="`min_new_tokens` and the decoder start together."
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for name in ("max", "min"):
            if {f"{name}_length", f"{name}_new_tokens"} <= self.model_fields_set:
                raise ValueError(f"{name}_length and {name}_new_tokens exclude each other")
        return self  # the rest is looked at once it is put together, see `RootRequest.values`

    def ours(self, spec: ModelSpec) -> dict[str, Any]:
        """The same by /generate's names.

        Raises:
            InvalidRequestError: `max_length` is more than the model takes.
        """
        start = len(spec.decoder_start_ids)  # the lengths count it
        most = spec.room(0, start) + start
        if (self.max_length or 0) > most:
            raise InvalidRequestError(
                f"{FURTHER}.max_length must be at most {most} here (the model's target takes "
                f"{spec.max_tgt} tokens, max_target_tokens), got {self.max_length}",
                f"{FURTHER}.max_length",
            )
        values = self.model_dump(exclude_unset=True)
        for name in ("max", "min"):
            if f"{name}_length" in values:
                values[f"{name}_new_tokens"] = max(0, values.pop(f"{name}_length") - start)
        return values


class RootParameters(GenerationParameters):
    """Those of /generate, and what else clients of Hugging Face may send."""

    best_of: int | None = Field(
        None,
        ge=1,
        description="Draw so many, and answer with the one that has the highest log-probability "
        "per token.",
    )
    decoder_input_details: bool = Field(False, description="Details with the decoder start.")
    truncation: Literal["do_not_truncate", "longest_first", "only_first"] | None = Field(
        None, description="Cut a source that is longer than the model takes, or refuse it."
    )
    clean_up_tokenization_spaces: Literal[False] | None = Field(None, description="Not supported.")
    generate_parameters: PipelineParameters | None = Field(
        None, description="Further parameters of /generate, `max_length` and `min_length`."
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if (self.num_return_sequences or 1) > 1:
            raise ValueError(
                "num_return_sequences must be 1 here, as clients read one answer for each input "
                f"(/generate has several), got {self.num_return_sequences}"
            )
        return self

    @property
    def draws(self) -> int:
        """Continuations of each input."""
        return self.best_of or 1

    @property
    def wants_details(self) -> bool:
        return self.details or self.decoder_input_details


class RootRequest(Request):
    """Continue, translate or summarise."""

    inputs: Texts = Field(description="A text, or a list of texts.", examples=["hello"])
    parameters: RootParameters = Field(RootParameters(), description="How to generate.")
    stream: bool = Field(False, description="Answer with server-sent events; for one text only.")

    @model_validator(mode="after")
    def _can_be_streamed(self) -> Self:
        if not self.stream:
            return self
        if isinstance(self.inputs, list):
            raise ValueError(f"stream needs one input, got a list of {len(self.inputs)}")
        if self.parameters.draws > 1:
            best_of = self.parameters.best_of
            raise ValueError(f"parameters.best_of must be 1 in a stream, got {best_of}")
        if self.parameters.decoder_input_details:
            raise ValueError("parameters.decoder_input_details must be false in a stream, got true")
        return self

    def values(self, spec: ModelSpec) -> dict[str, Any]:
        """The parameters of the same for /generate.

        Raises:
            InvalidRequestError: fields do not agree.
        """
        values = self._together(spec)
        self._pick(values, default_decoding(spec.defaults) == "sampling")
        if self.parameters.truncation in ("longest_first", "only_first"):
            values["truncate"] = min(values.get("truncate", spec.max_src), spec.max_src)
        values["details"] = self.parameters.wants_details or self.parameters.draws > 1
        values["return_full_text"] = False  # here it means the source
        return values

    def names(self) -> dict[str, str]:
        """How messages call our fields, see `renamed`."""
        further = self.parameters.generate_parameters
        given = further.model_fields_set if further else set()
        names = {rf"\bparameters\.{name}\b": f"{FURTHER}.{name}" for name in given}
        for least in ("max", "min"):
            if f"{least}_length" in given:
                names[rf"\bparameters\.{least}_new_tokens\b"] = f"{FURTHER}.{least}_length"
        return names | {r"\bparameters\.num_return_sequences\b": "parameters.best_of"}

    def _together(self, spec: ModelSpec) -> dict[str, Any]:
        """The parameters and those that the pipelines have in a place of their own."""
        parameters = self.parameters
        own = GenerationParameters.model_fields.keys()
        values = parameters.model_dump(exclude_unset=True, include=set(own))
        further = parameters.generate_parameters
        for name, value in (further.ours(spec) if further else {}).items():
            if name in values:
                raise InvalidRequestError(
                    f"{FURTHER}.{name} and parameters.{name} exclude each other",
                    f"{FURTHER}.{name}",
                )
            values[name] = value
        return values

    def _pick(self, values: dict[str, Any], draws_by_default: bool) -> None:
        """Decide between drawing and not, as text-generation-inference does."""
        draws = draws_by_default and values.get("do_sample") is None
        if values.get("do_sample") or any(name in values for name in DRAWING):
            values["do_sample"] = draws = True
        if not draws:
            values.pop("seed", None)
        if self.parameters.draws > 1:
            if not draws:
                raise InvalidRequestError(
                    f"parameters.best_of must be 1 without sampling, got {self.parameters.draws}",
                    "parameters.best_of",
                )
            values["num_return_sequences"] = self.parameters.draws


# --- answer --------------------------------------------------------------------------------------


class RootReply(Answer):
    """What became of one text, by all names that clients know."""

    generated_text: str
    translation_text: str
    summary_text: str
    details: dict[str, Any] | None = Field(
        None, description="As of /generate, with `prefill` and `best_of_sequences`."
    )


@dataclass(frozen=True)
class Writer:
    """Writes the answer to one request, whole or as events."""

    body: RootRequest
    model: ServedModel

    def whole(self, replies: list[GenerateResponse]) -> list[dict[str, Any]]:
        """The answer: a list, also for one text."""
        sources = as_list(self.body.inputs)
        told = [self._reply(s, reply) for s, reply in zip(sources, replies, strict=True)]
        return [reply.model_dump(exclude_unset=True) for reply in told]

    def event(self, place: int, event: StreamEvent) -> Iterator[dict[str, Any]]:
        """What an event of a stream becomes; tokens are counted from 1."""
        told: dict[str, Any] = {
            "index": event.index + 1,
            "token": event.token.model_dump() if event.token else None,
            "generated_text": None,
            "details": None,
        }
        if event.top_tokens:
            told["top_tokens"] = [token.model_dump() for token in event.top_tokens]
        if event.details:
            assert isinstance(self.body.inputs, str)
            told["generated_text"] = self._full(self.body.inputs, event.generated_text)
        if event.details and self.body.parameters.wants_details:
            told["details"] = {
                "finish_reason": event.details.finish_reason,
                "generated_tokens": event.details.generated_tokens,
                "input_length": event.details.input_tokens,
                "seed": event.details.seed,
            }
        yield told

    def _reply(self, source: str, reply: GenerateResponse) -> RootReply:
        best, *others = likeliest_first(sequences_of(reply))
        text = best.generated_text or ""
        told = RootReply(
            generated_text=self._full(source, text), translation_text=text, summary_text=text
        )
        if not self.body.parameters.wants_details:
            return told
        details = self._details(best)
        if others:
            details["best_of_sequences"] = [
                {"generated_text": self._full(source, other.generated_text)} | self._details(other)
                for other in others
            ]
        return told.model_copy(update={"details": details})

    def _full(self, source: str, text: str | None) -> str:
        """With the source in front of it where that is wanted."""
        return (source if self.body.parameters.return_full_text else "") + (text or "")

    def _details(self, sequence: Generated) -> dict[str, Any]:
        assert sequence.details
        told = sequence.details.model_dump(exclude_unset=True)
        if self.body.parameters.decoder_input_details:
            name = self.model.generator.target.name
            start = self.model.loaded.spec.decoder_start_ids
            told["prefill"] = [{"id": id, "text": name(id) or "", "logprob": None} for id in start]
        return told


@router.post(
    "/",
    summary="text-generation-inference and pipelines: continue, translate or summarise",
    response_model=list[RootReply],
    responses=ERRORS | streamed("With `stream`: server-sent events, the last with the text."),
)
async def root(request: HttpRequest, body: RootRequest) -> Response:
    """A list with one object for each text; events with `"stream": true`."""
    model = model_of(request, body.model, len(as_list(body.inputs)))
    check_speaks(model)
    values = body.values(model.loaded.spec)
    with renamed(body.names()):
        ours = generate_request(model=body.model, inputs=body.inputs, parameters=values)
        model, plans = await planned(request, ours)
    writer = Writer(body, model)
    if body.stream:
        if not plans[0].sequences:
            raise InvalidRequestError(
                "inputs must have something to continue, and max_new_tokens be above 0, in a "
                "stream: its text comes with its last token",
                "inputs",
            )
        return EventStream(request, model, plans, seconds_of(request, None), writer.event)
    response = await whole(request, model, plans, None, writer.whole)
    response.headers.update(_times_of(request))
    return response


def _times_of(request: HttpRequest) -> dict[str, str]:
    """Further headers of text-generation-inference, in milliseconds."""
    record = record_of(request.scope)
    assert record.ticket
    _, inference_time = times(record.ticket)
    told = {
        "x-total-time": (time.perf_counter() - record.started) * 1e3,
        "x-validation-time": (record.ticket.submitted - record.started) * 1e3,
        "x-time-per-token": inference_time / max(1, record.ticket.generated),
    }
    return {name: f"{milliseconds:.3f}" for name, milliseconds in told.items()}


def endpoint_info(models: Catalogue[Entry], settings: Settings) -> dict[str, Any]:
    """What /info says in text-generation-inference's words, of the first model."""
    name = models.names[0]
    told = {
        "model_id": name,
        "model_sha": None,
        "model_pipeline_tag": "text2text-generation",
        "max_concurrent_requests": settings.max_queue,
        "max_best_of": settings.max_return_sequences,
        "max_stop_sequences": MAX_STOPS,
        "max_client_batch_size": settings.max_inputs,
        "validation_workers": 1,
        "router": "seqserve",
        "sha": None,
        "docker_label": None,
    }
    for model in models.served:
        if model.name == name:
            info = model.info()
            assert info.device
            assert info.max_source_tokens
            assert info.max_target_tokens
            told |= {
                "model_dtype": f"torch.{info.dtype}",
                "model_device_type": info.device.partition(":")[0],
                "max_input_tokens": info.max_source_tokens,
                "max_total_tokens": info.max_source_tokens + info.max_target_tokens,
            }
    return told
