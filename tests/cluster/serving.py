"""`seqserve serve --ray` as a process, with a Ray of its own."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.conftest import Server

ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "service.cluster.proxies:middlewares",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # or whatever else runs here would come first
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "5",  # the machine may be busy
}
"""Of all processes of a test's Ray."""


@contextmanager
def on_ray(models: Mapping[str, Path], *arguments: str) -> Iterator[Server]:
    """Models on a Ray that ends with the block, once all of them can answer.

    Replicas count as a part of a CPU, so that any number of them fits any machine.
    """
    words = [word for name, path in models.items() for word in ("--model", f"{name}={path}")]
    words += ["--ray", "--replica-cpus", "0.01", "--port", str(free_port()), *arguments]
    # A short path: the names of Unix sockets have 107 bytes at most.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-") as directory:
        server = Server(*words, environment={**ENVIRONMENT, "RAY_TMPDIR": directory})
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.stop()


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
