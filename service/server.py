"""The server process: a socket, the application in uvicorn, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
import sys
from types import FrameType
from typing import Any

import torch
import uvicorn

from seqserve import __version__
from service.app import create_app
from service.logs import configure_logging
from service.protocol import Protocol
from service.served import Models
from service.settings import Settings
from service.sockets import url
from service.tracing import TracingError, exporting_tracer

logger = logging.getLogger(__name__)

CLOSING_SECONDS = 5
"""For writing the last answers, after everything has been computed."""

QUIET_SECONDS = 10.0
"""Between two messages that there are too many open files."""

SWITCH_INTERVAL = 0.0005
"""Seconds until a busy Python thread lets another one run. The default of 5 ms would let the event
loop hold the engine's thread up many times in a step."""


class LoopErrors:
    """What asyncio reports of itself: logged as it does it, but for one thing that it would say
    thousands of times a second, that the process may open no more files."""

    def __init__(self) -> None:
        self._quiet_until = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif loop.time() >= self._quiet_until:
            self._quiet_until = loop.time() + QUIET_SECONDS
            logger.error("too many open files: new connections must wait until others are closed")


class Server(uvicorn.Server):
    """Ends in order: at the first signal /ready turns 503 and what runs gets `grace` seconds to
    finish, while the server still answers probes; a second signal cuts these short, a third one
    does not even wait for answers to be written."""

    def __init__(self, config: uvicorn.Config, settings: Settings) -> None:
        super().__init__(config)
        self.settings = settings
        self.failure: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[bool] | None = None
        self._finishing: asyncio.Task[None] | None = None
        self._signals = 0

    def fail(self, message: str) -> None:
        """A model cannot be loaded: end."""
        self.failure = message
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(LoopErrors())
        await super().startup(sockets)
        for listener in sockets or []:
            logger.info("seqserve %s listens on %s", __version__, url(listener))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not uvicorn's: that one stops listening first, and ends with the signal as exit status.
        self._signals += 1
        if self._loop is None or self._signals > 2:
            self.should_exit = self.force_exit = True
            return
        name = signal.Signals(sig).name
        if self._signals == 1:
            logger.info("%s: finishing what runs", name)
            self._loop.call_soon_threadsafe(self._start_to_finish)
        else:
            logger.info("%s again: not waiting for what runs", name)
            self._loop.call_soon_threadsafe(self._cut_short)

    def _start_to_finish(self) -> None:
        models: Models = self.config.app.state.models  # type: ignore[union-attr]
        self._drain = asyncio.ensure_future(models.drain(self.settings.grace))
        self._finishing = asyncio.ensure_future(self._finish(models, self._drain))

    async def _finish(self, models: Models, drain: asyncio.Task[bool]) -> None:
        await asyncio.wait([drain])
        if drain.cancelled() or not drain.result():
            logger.warning("gave up on what still ran")
            await models.stop()
        self.should_exit = True

    def _cut_short(self) -> None:
        assert self._drain
        self._drain.cancel()


def prepare_process(settings: Settings) -> None:
    """What a process that runs an engine needs of itself: threads that give way, and a log."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    configure_logging(settings.log_level, settings.log_format)


def serve(settings: Settings, listener: socket.socket) -> str | None:
    """Serve until a signal comes.

    Returns:
        why it ended, if it was for a model that cannot be loaded or traces that cannot be sent.
    """
    prepare_process(settings)
    try:
        tracer = exporting_tracer() if settings.tracing else None
    except TracingError as error:
        return str(error)
    server: Server | None = None

    def fail(message: str) -> None:
        assert server
        server.fail(message)

    config = uvicorn.Config(
        create_app(settings, on_failure=fail, tracer=tracer),
        http=Protocol,
        ws="none",  # there are no web sockets here, whatever library is installed
        log_level=settings.log_level,
        log_config=None,  # all messages go through the one handler above
        access_log=False,  # the application tells of each request, with more
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )
    server = Server(config, settings)
    # What the libraries have made stays. If each collection looked through it, a body of 600,000
    # lists would hold all threads for a second.
    gc.freeze()
    with contextlib.suppress(KeyboardInterrupt):
        server.run([listener])
    if tracer:
        tracer.close()
    return server.failure
