"""POST /generate."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from model.sequence import TokenEvent
from seqserve.schemas import GenerateRequest, GenerateResponse
from service.errors import responses
from service.generation import Plan
from service.numbers import dump_json
from service.routes.common import (
    BYTES_PER_TOKEN,
    JsonRoute,
    answer,
    body_size,
    check_count,
    check_size,
    models_of,
    run,
    settings_of,
    sized,
)

router = APIRouter(route_class=JsonRoute, tags=["generate"])

NUMBERS_PER_TOKEN = 2
"""Its id and its log-probability."""

EXAMPLES = {
    "text": {"summary": "One text", "value": {"inputs": "hello"}},
    "list": {"summary": "Several texts", "value": {"inputs": ["hello", "world"]}},
    "details": {
        "summary": "Tokens and log-probabilities",
        "value": {"inputs": "hello", "parameters": {"details": True}},
    },
    "sampling": {
        "summary": "Draw instead of taking the likeliest",
        "value": {"inputs": "hello", "parameters": {"temperature": 0.8, "top_p": 0.9, "seed": 1}},
    },
}


@router.post(
    "/generate",
    summary="Continue each input",
    response_model=GenerateResponse | list[GenerateResponse],
    responses=responses(400, 404, 413, 422, 429, 500, 503, 504),
    openapi_extra={"requestBody": {"content": {"application/json": {"examples": EXAMPLES}}}},
)
async def generate(request: Request, body: GenerateRequest) -> Response:
    """One object for one input, a list of objects for a list of inputs."""
    check_count(request, "inputs" if body.inputs is not None else "input_ids", body.count)
    model = models_of(request).get(body.model)
    plans = await sized(await body_size(request), model.generator.plan, body)
    candidates = sum(plan.most_candidates for plan in plans)
    check_size(
        NUMBERS_PER_TOKEN * candidates,
        settings_of(request).max_json_values,
        "ask for fewer inputs, or for a lower top_n_tokens or max_new_tokens",
    )
    works = [plan.sequence for plan in plans if plan.sequence]
    outcome = await run(request, model, works, body.timeout)
    events = dict(zip(works, outcome.events, strict=True))

    def reply(plan: Plan) -> dict[str, Any]:
        tokens = events[plan.sequence] if plan.sequence else []
        reply = model.generator.answer(plan, [e for e in tokens if isinstance(e, TokenEvent)])
        return reply.model_dump(exclude_unset=True)

    def write() -> bytes:
        replies = [reply(plan) for plan in plans]
        return dump_json(replies if body.is_list else replies[0])

    generated_tokens = sum(len(tokens) for tokens in outcome.events)
    return answer(
        await sized(BYTES_PER_TOKEN * (generated_tokens + candidates), write),
        outcome,
        prompt_tokens=sum(len(plan.source.ids) for plan in plans),
        generated_tokens=generated_tokens,
    )
