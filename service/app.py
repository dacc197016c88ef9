"""The HTTP application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.staticfiles import StaticFiles
from fastapi.telemetry import TelemetryConfig

from model.loader import LoadedModel
from seqserve import __version__
from service.catalogue import Catalogue, Entry
from service.errors import install_error_handlers
from service.keys import read_keys
from service.logs import log_request
from service.metrics import Metrics
from service.middleware import Frame, Gate, is_open
from service.observation import Listener, Observed
from service.routes import generate, inspect, libretranslate, openai, operations, page, tgi
from service.served import Models
from service.settings import Settings
from service.tracing import RequestTracer

logger = logging.getLogger(__name__)

SWAGGER_UI = Path(__file__).parent / "swagger_ui"

OPENAPI = "/openapi.json"

NO_TELEMETRY: TelemetryConfig = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "auto_configure": False,
}
"""FastAPI's own would tell of paths, queries and addresses, and of each request a second time."""
REQUEST_HEADERS = [
    "authorization",
    "content-type",
    "x-api-key",
    "x-request-id",
    "x-request-timeout",
]
"""What a page of another origin may send."""

RESPONSE_HEADERS = [
    "retry-after",
    "x-generated-tokens",
    "x-inference-time",
    "x-prompt-tokens",
    "x-queue-time",
    "x-request-id",
    "x-seqserve-version",
]
"""What such a page may read of an answer."""

DIALECTS = (openai.DIALECT, tgi.DIALECT, libretranslate.DIALECT)
"""Of the routes that answer errors as other APIs do."""

SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""Either way to send an API key will do."""

DESCRIPTION = """
Inference for encoder-decoder Transformers, many callers at once.

One input gets one object, a list of inputs a list of objects in the same order. Every error has the
same envelope, and every response an `x-request-id`.
"""


def create_app(
    settings: Settings,
    models: Mapping[str, LoadedModel] | Catalogue[Entry] | None = None,
    on_failure: Callable[[str], None] | None = None,
    tracer: RequestTracer | None = None,
) -> FastAPI:
    """Build the application; its lifespan loads the models and ends their threads.

    Args:
        models: models in memory, by name, to serve instead of the settings'; or those of other
            processes.
        on_failure: called with the message when a model cannot be loaded.
        tracer: told of each request, if there is to be a trace of it.
    """
    keys = read_keys(settings)
    host: Catalogue[Entry]
    if isinstance(models, Catalogue):
        host = models
    else:
        locations = {} if models else settings.locations
        host = Models(settings, locations, on_failure or logger.error, models)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # In the background: /health answers while a large model is still being read.
        loading = asyncio.create_task(host.load())
        if isinstance(models, Mapping):
            await loading
        try:
            yield
        finally:
            loading.cancel()
            await host.drain(settings.grace)
            await host.stop()

    app = FastAPI(
        title="seqserve",
        summary="Inference server for encoder-decoder Transformers",
        description=DESCRIPTION,
        version=__version__,
        lifespan=lifespan,
        openapi_url=OPENAPI,
        docs_url=None,  # FastAPI's pages load their scripts from the internet
        redoc_url=None,
        telemetry=NO_TELEMETRY,
    )
    metrics = Metrics(host)
    listeners: list[Listener] = [metrics.observe, log_request]
    if tracer:
        listeners.insert(0, tracer)  # the log names the trace
    app.state.models = host
    app.state.settings = settings
    app.state.keys = keys
    app.state.metrics = metrics
    app.state.listeners = listeners
    ours = (generate, inspect, operations, page)
    routers = [routes.router for routes in (*ours, openai, tgi, libretranslate)]
    # The last one added is the outermost.
    app.add_middleware(
        Gate,
        keys=keys,
        max_body_bytes=settings.max_body_bytes,
        receive_timeout=settings.receive_timeout,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=REQUEST_HEADERS,
            expose_headers=RESPONSE_HEADERS,
        )
    app.add_middleware(Frame, root_path=settings.root_path, dialects=DIALECTS)
    app.add_middleware(
        Observed,
        on_start=metrics.begin,
        listeners=listeners,
        root_path=settings.root_path,
        paths={OPENAPI, *(route.path for router in routers for route in router.routes)},
    )
    install_error_handlers(app)
    for router in routers:
        app.include_router(router)
    app.mount("/docs", StaticFiles(directory=SWAGGER_UI))
    app.mount("/page", page.PageFiles())
    if keys:
        _declare_keys(app)
    return app


def _declare_keys(app: FastAPI) -> None:
    """Let the OpenAPI document say which paths need a key, so that /docs asks for one."""
    document = app.openapi

    def openapi() -> dict[str, Any]:
        found = document()
        found["components"]["securitySchemes"] = SECURITY_SCHEMES
        for path, methods in found["paths"].items():
            for method, operation in methods.items():
                if not is_open(method.upper(), path):
                    operation["security"] = [{name: []} for name in SECURITY_SCHEMES]
        return found

    app.openapi = openapi  # type: ignore[method-assign] # as FastAPI has it extended
