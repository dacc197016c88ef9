"""The servers that a soak is about: `seqserve serve` processes with small limits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seqserve import Client
from seqserve.schemas import InfoResponse
from tests.e2e.conftest import SEQSERVE, Server, serving

PLACES = 256
"""In the queue, and inputs of a request: one request can ask whether all places are free."""

LIMITS = {
    "--max-queue": PLACES,
    "--max-inputs": PLACES,
    "--max-rows": 32,
    "--max-body-bytes": 1 << 16,
    "--grace": 120,
    "--timeout": 240,  # on a machine that is busy with other things too
}
"""Small, so that a soak reaches them."""

ENCODER_CACHE = {"--max-encoder-cache-bytes": 1 << 20}
"""So little that sources are dropped all the time."""

NO_ENCODER_CACHE = {"--max-encoder-cache-bytes": 0}
"""Every source is encoded for its own request."""


def arguments(models: dict[str, Path], *settings: dict[str, object]) -> list[str]:
    """Of the command line."""
    given = [pair for each in (LIMITS, *settings) for pair in each.items()]
    words = [word for name, path in models.items() for word in ("--model", f"{name}={path}")]
    return words + [str(word) for pair in given for word in pair]


@contextmanager
def started(*words: str, program: tuple[str, ...] = SEQSERVE) -> Iterator[Server]:
    """A server all of whose models are ready; it is killed at the end, if it still runs then."""
    with serving(*words, program=program) as server, Client(server.url) as client:
        while any(model.state == "loading" for model in client.info().models):
            time.sleep(0.05)
        yield server


def address(server: Server) -> tuple[str, int]:
    """Host and port."""
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def info_of(server: Server) -> InfoResponse:
    """What the server says of itself."""
    with Client(server.url) as client:
        return client.info()
