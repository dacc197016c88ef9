"""Servers that are measured, each in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import httpx

SEQSERVE = ("-c", "from seqserve.cli import main; main()")
"""What Python is told, before the words of the command line."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Running(NamedTuple):
    """A server's address and its process."""

    url: str
    pid: int


@contextmanager
def running(*command: str, port: int) -> Iterator[Running]:
    """A server in a process of its own, until it is ready and as long as the block lasts."""
    process = subprocess.Popen([sys.executable, *command, "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise SystemExit(f"{command} ended with status {process.returncode}")
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        yield Running(url, process.pid)
    finally:
        process.terminate()
        process.wait()
