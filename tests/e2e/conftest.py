"""A real `seqserve serve` process on a free port."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest

from seqserve import Client
from tests.builders import make_native_model

ROOT = Path(__file__).parents[2]
SEQSERVE = ("-c", "from seqserve.cli import main; main()")
FAULTY = ("-m", "tests.e2e.faulty_server")
"""What Python runs: the command line as it is, or with a model whose steps fail for some inputs."""

PATIENCE = 240.0
"""Seconds for what takes a few: the machine may be busy with other things."""

LONG = 40_000
"""Tokens that take minutes: whatever is to arrive before the last of them does, on any machine."""

ENDLESS = {"max_new_tokens": LONG, "min_new_tokens": LONG}
"""More than anybody waits for."""


class Server:
    """A running server.

    Args:
        arguments: of `seqserve serve`.
        program: what Python runs.
        environment: variables beside those of this process.

    Attributes:
        url: where it listens.
        log: what it has written so far.
    """

    def __init__(
        self,
        *arguments: str,
        program: tuple[str, ...] = SEQSERVE,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *program, "serve", "--threads", "1", *arguments],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self.url = ""
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr
        with self.process.stderr as lines:
            for line in lines:
                self.log.append(line)
                if found := re.search(r'listens on (http://[^\s"]+)', line):
                    self.url = found[1]
                    self._listening.set()
        self._listening.set()

    def wait_until_listening(self) -> None:
        """Until it can be reached."""
        assert self._listening.wait(PATIENCE)
        assert self.url, "".join(self.log)

    def wait_until_ready(self) -> None:
        """Until a model can answer."""
        self.wait_until_listening()
        deadline = time.monotonic() + PATIENCE
        with Client(self.url) as client:
            while not client.ready():
                assert self.process.poll() is None, "".join(self.log)
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def wait_until_loaded(self, api_key: str | None = None) -> None:
        """Until no model is still to come: one is enough to be ready."""
        deadline = time.monotonic() + PATIENCE
        with Client(self.url, api_key=api_key) as client:
            while any(model.state == "loading" for model in client.info().models):
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """The exit status, once it has ended by itself."""
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status


@contextmanager
def serving(
    *arguments: str, program: tuple[str, ...] = SEQSERVE, api_key: str | None = None
) -> Iterator[Server]:
    """A server whose models are all loaded; `api_key` is one that it asks for, if it does."""
    server = Server("--port", "0", *arguments, program=program)
    try:
        server.wait_until_ready()
        if arguments.count("--model") > 1:
            server.wait_until_loaded(api_key)
        yield server
    finally:
        server.process.kill()
        server.wait()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_native_model(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Server]:
    with serving("--model", f"tiny={model}") as server:
        yield server


@pytest.fixture(autouse=True, scope="module")
def nothing_stays_open() -> Iterator[None]:
    """A connection that a module leaves open is told there, not in whatever test comes next."""
    yield
    gc.collect()
