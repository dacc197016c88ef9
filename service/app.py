"""The HTTP application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles

from model.loader import LoadedModel
from seqserve import __version__
from service.errors import install_error_handlers
from service.middleware import Frame
from service.routes import generate, inspect, operations
from service.served import Models
from service.settings import Settings

logger = logging.getLogger(__name__)

SWAGGER_UI = Path(__file__).parent / "swagger_ui"

DESCRIPTION = """
Inference for encoder-decoder Transformers, many callers at once.

One input gets one object, a list of inputs a list of objects in the same order. Every error has the
same envelope, and every response an `x-request-id`.
"""


def create_app(
    settings: Settings,
    models: Mapping[str, LoadedModel] | None = None,
    on_failure: Callable[[str], None] | None = None,
) -> FastAPI:
    """Build the application; its lifespan loads the models and ends their threads.

    Args:
        models: models in memory, by name, to serve instead of the settings'.
        on_failure: called with the message when a model cannot be loaded.
    """
    locations = {} if models else settings.locations
    host = Models(settings, locations, on_failure or logger.error, models)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # In the background: /health answers while a large model is still being read.
        loading = asyncio.create_task(host.load())
        if models:
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
        docs_url=None,  # FastAPI's pages load their scripts from the internet
        redoc_url=None,
    )
    app.state.models = host
    app.state.settings = settings
    app.add_middleware(Frame, root_path=settings.root_path, max_body_bytes=settings.max_body_bytes)
    install_error_handlers(app)
    for routes in (generate, inspect, operations):
        app.include_router(routes.router)
    app.mount("/docs", StaticFiles(directory=SWAGGER_UI))
    return app
