"""POST /logits, /next, /score, /attention, /tokenize and /detokenize: look inside a model."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from model.sequence import Event, Forward, ForwardEvent
from seqserve.schemas import (
    AttentionRequest,
    AttentionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    LogitsRequest,
    LogitsResponse,
    NextRequest,
    NextResponse,
    ScoreRequest,
    ScoreResponse,
    TokenizeRequest,
    TokenizeResponse,
    as_lists,
)
from service.errors import OF_A_BODY, OF_A_RUN, responses
from service.inspection import logits_as_json, logits_as_safetensors
from service.numbers import dump_json
from service.routes.common import (
    BINARY,
    BYTES_PER_TOKEN,
    JSON,
    NUMBERS_PER_TOKEN,
    JsonRoute,
    answer,
    body_size,
    check_size,
    check_time,
    model_of,
    run,
    sized,
)
from service.tensors import TensorFile

router = APIRouter(route_class=JsonRoute, tags=["look inside"])

USE_TENSORS = 'use "format": "safetensors"'


def examples(**values: dict[str, Any]) -> dict[str, Any]:
    """Bodies to try, for the OpenAPI document; a summary (with "_" for spaces) -> a body."""
    shown = {
        name: {"summary": name.replace("_", " "), "value": value} for name, value in values.items()
    }
    return {"requestBody": {"content": {"application/json": {"examples": shown}}}}


@router.post(
    "/logits",
    summary="Teacher-forced logits",
    response_model=LogitsResponse | list[LogitsResponse],
    responses={
        **responses(*OF_A_RUN),
        200: {
            "description": "JSON, or a safetensors file with `logits` (or `values` and `ids`), "
            "`target_lengths` and `target_ids`.",
            "content": {BINARY: {"schema": {"type": "string", "format": "binary"}}},
        },
    },
)
async def logits(request: Request, body: LogitsRequest) -> Response:
    """One pass over the decoder start and the targets, before any decoding parameter applies."""
    model = model_of(request, body.model, body.count)
    check_time(request, body.timeout)
    passes = await sized(await body_size(request), model.inspector.plan_logits, body)
    binary = _wants_binary(request, body)
    size = model.inspector.size(passes, padded=binary)
    less = "ask for fewer inputs, or for positions: last, or for top_k"
    check_size(request, size, less if binary else USE_TENSORS, binary=binary)
    outcome = await run(request, model, passes, body.timeout)
    done = [_pass(events) for events in outcome.events]
    if binary:
        file = await sized(size, logits_as_safetensors, done, model.loaded.spec.pad_id)
        return answer(file, outcome, _prompt_tokens(passes))
    content = [logits_as_json(event) for event in done]
    text = await sized(size, dump_json, content if body.is_list else content[0])
    return answer(text, outcome, _prompt_tokens(passes))


@router.post(
    "/next",
    summary="The likeliest next tokens",
    response_model=NextResponse | list[NextResponse],
    responses=responses(*OF_A_RUN),
    openapi_extra=examples(
        First_token={"inputs": "hello", "top_k": 3},
        Behind_a_prefix={"inputs": "hello", "target_prefix": "HH AH"},
        Behind_several_prefixes={"inputs": "hello", "target_prefix": ["HH", "HH AH"]},
    ),
)
async def next_tokens(request: Request, body: NextRequest) -> Response:
    """What the model would put behind the decoder start and the target prefix."""
    model = model_of(request, body.model, body.count)
    check_time(request, body.timeout)
    passes = await sized(await body_size(request), model.inspector.plan_next, body)
    size = model.inspector.size(passes, padded=False)
    advice = "ask for fewer inputs or a lower top_k"
    check_size(request, size, advice)
    outcome = await run(request, model, passes, body.timeout)

    def write() -> bytes:
        done = [_pass(events) for events in outcome.events]
        answers = [model.inspector.answer_next(event).model_dump() for event in done]
        return dump_json(answers if body.is_list else answers[0])

    return answer(await sized(BYTES_PER_TOKEN * size, write), outcome, _prompt_tokens(passes))


@router.post(
    "/score",
    summary="How likely given targets are",
    response_model=ScoreResponse | list[ScoreResponse],
    responses=responses(*OF_A_RUN),
    openapi_extra=examples(
        One_target={"inputs": "hello", "targets": "HH AH L OW"},
        Several_targets_of_one_input={"inputs": "hello", "targets": ["HH AH L OW", "HH EH L OW"]},
        Pairs={"inputs": ["cat", "dog"], "targets": ["K AE T", "D AO G"]},
    ),
)
async def score(request: Request, body: ScoreRequest) -> Response:
    """Log-softmax of the raw logits at each target token, in one teacher-forced pass."""
    model = model_of(request, body.model, body.count)
    check_time(request, body.timeout)
    passes = await sized(await body_size(request), model.inspector.plan_score, body)
    tokens = sum(len(p.tgt) for p in passes)
    check_size(request, NUMBERS_PER_TOKEN * tokens, "ask for fewer or shorter targets")
    outcome = await run(request, model, passes, body.timeout)
    done = [_pass(events) for events in outcome.events]

    def write() -> bytes:
        answers = [model.inspector.answer_score(event).model_dump() for event in done]
        return dump_json(answers if body.is_list else answers[0])

    return answer(await sized(BYTES_PER_TOKEN * tokens, write), outcome, _prompt_tokens(passes))


@router.post(
    "/attention",
    summary="Attention weights",
    response_model=AttentionResponse | list[AttentionResponse],
    responses={
        **responses(*OF_A_RUN),
        200: {
            "description": "JSON, or a safetensors file with `encoder`, `decoder`, `cross`, "
            "`source_lengths`, `target_lengths`, `source_ids` and `target_ids`.",
            "content": {BINARY: {"schema": {"type": "string", "format": "binary"}}},
        },
    },
    openapi_extra=examples(
        One_target={"inputs": "cat", "targets": "K AE T"},
        Half_precision={"inputs": "cat", "targets": "K AE T", "dtype": "float16"},
        The_first_step={"inputs": "cat"},
    ),
)
async def attention(request: Request, body: AttentionRequest) -> Response:
    """Of every layer and head, in one teacher-forced pass over decoder start and targets."""
    model = model_of(request, body.model, body.count)
    check_time(request, body.timeout)
    inspector = model.inspector
    passes = await sized(await body_size(request), inspector.plan_attention, body)
    binary = _wants_binary(request, body)
    size = inspector.attention_size(passes, padded=binary)
    less = "ask for fewer or shorter inputs and targets"
    check_size(request, size, less if binary else USE_TENSORS, binary=binary)
    outcome = await run(request, model, passes, body.timeout)
    done = [_pass(events) for events in outcome.events]

    def write() -> bytes | TensorFile:
        if binary:
            return inspector.attention_file(done, body.dtype)
        answers = [inspector.answer_attention(event, body.dtype) for event in done]
        return dump_json(answers if body.is_list else answers[0])

    return answer(await sized(size, write), outcome, _prompt_tokens(passes))


@router.post(
    "/tokenize",
    summary="Texts to token ids",
    response_model=TokenizeResponse | list[TokenizeResponse],
    responses=responses(*OF_A_BODY),
)
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Just what /generate makes of the same text, `</s>` included."""
    listed = isinstance(body.inputs, list)
    model = model_of(request, body.model, len(body.inputs) if listed else 1)
    tokenizer = model.vocabulary(body.side).need_tokenizer("inputs")

    def write() -> bytes:
        encoded = model.inspector.tokenize(body)
        answers = [{"ids": ids, "tokens": [tokenizer.token(id) for id in ids]} for ids in encoded]
        return dump_json(answers if listed else answers[0])

    return Response(await sized(await body_size(request), write), media_type=JSON)


@router.post(
    "/detokenize",
    summary="Token ids to texts",
    response_model=DetokenizeResponse | list[DetokenizeResponse],
    responses=responses(*OF_A_BODY),
)
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """Special tokens add nothing to the text."""
    id_lists = as_lists(body.input_ids)
    vocabulary = model_of(request, body.model, len(id_lists)).vocabulary(body.side)
    tokenizer = vocabulary.need_tokenizer("input_ids")
    nested = id_lists is body.input_ids

    def write() -> bytes:
        for i, ids in enumerate(id_lists):
            vocabulary.check(ids, f"input_ids[{i}]" if nested else "input_ids")
        answers = [{"text": tokenizer.decode(ids)} for ids in id_lists]
        return dump_json(answers if nested else answers[0])

    return Response(await sized(await body_size(request), write), media_type=JSON)


def _wants_binary(request: Request, body: LogitsRequest | AttentionRequest) -> bool:
    if body.format is not None:
        return body.format == "safetensors"
    return BINARY in request.headers.get("accept", "")


def _pass(events: list[Event]) -> ForwardEvent:
    event = events[0]
    assert isinstance(event, ForwardEvent)
    return event


def _prompt_tokens(passes: list[Forward]) -> int:
    """Source tokens; those of a source that several targets share count once."""
    return sum({id(p.src): len(p.src) for p in passes}.values())
