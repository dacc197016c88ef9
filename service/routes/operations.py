"""GET /health, /ready, /ping, /metrics, /info and /docs; HEAD of the first four."""

from __future__ import annotations

import html
from string import Template

import torch
from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse

from seqserve import __version__
from seqserve.schemas import InfoResponse, Limits, StatusResponse
from service.errors import responses
from service.metrics import Exposition
from service.routes.common import models_of, settings_of
from service.routes.tgi import endpoint_info

router = APIRouter(tags=["operations"])

DOCS = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>seqserve</title>
<link rel="icon" href="$root/docs/favicon-32x32.png">
<link rel="stylesheet" href="$root/docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="$root/docs/swagger-ui-bundle.js"></script>
<script src="$root/docs/start.js" data-openapi="$root/openapi.json"></script>
</body>
</html>
""")
"""Not FastAPI's page: that one has its script inside, which the page's policy forbids."""


@router.head("/health", include_in_schema=False)  # load balancers ask so
@router.get("/health", summary="Whether the process is alive")
async def health() -> StatusResponse:
    """200 as long as the process answers, also while models load."""
    return StatusResponse(status="ok")


@router.head("/ping", include_in_schema=False)
@router.get("/ping", summary="The same as /ready, by another name", responses=responses(503))
@router.head("/ready", include_in_schema=False)
@router.get("/ready", summary="Whether a model can answer", responses=responses(503))
async def ready(request: Request) -> StatusResponse:
    """200 only when a model can answer; 503 while loading and while shutting down."""
    models_of(request).check_ready()
    return StatusResponse(status="ready")


@router.head("/metrics", include_in_schema=False)
@router.get(
    "/metrics",
    summary="Figures for Prometheus",
    response_class=PlainTextResponse,  # what the OpenAPI document says of it
)
async def metrics(request: Request) -> Response:
    """In Prometheus' text format, or OpenMetrics where it is asked for."""
    figures: Exposition = request.app.state.metrics
    text, content_type = await figures.exposition(request.headers.get("accept", ""))
    return Response(text, headers={"content-type": content_type})


@router.get(
    "/info",
    summary="The server, its limits and its models",
    response_model_exclude_unset=True,
    responses=responses(401),
)
async def info(request: Request) -> InfoResponse:
    """Versions, limits, models, and how full the engines' steps were."""
    settings = settings_of(request)
    limits = Limits(
        max_body_bytes=settings.max_body_bytes,
        max_inputs=settings.max_inputs,
        max_characters=settings.max_characters,
        max_beams=settings.beam_limit[1],
        max_return_sequences=settings.max_return_sequences,
        max_queue=settings.max_queue,
        max_queue_tokens=settings.max_queue_tokens,
        max_rows=settings.max_rows,
        max_json_values=settings.max_json_values,
        max_tensor_values=settings.max_tensor_values,
        default_timeout=settings.timeout,
    )
    models = models_of(request)
    return InfoResponse(
        version=__version__,
        torch=str(torch.__version__),
        limits=limits,
        models=models.info(),
        **endpoint_info(models, settings),
    )


@router.get("/docs", include_in_schema=False)
@router.get("/docs/", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """Swagger UI from the server's own files: works without the internet."""
    return HTMLResponse(DOCS.substitute(root=html.escape(request.scope["root_path"])))
