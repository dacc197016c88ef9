"""What the server sets up around the application, and what asyncio reports of itself."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
import sys

import pytest

from service.server import LoopErrors, Server, serve
from service.settings import Settings

pytestmark = pytest.mark.anyio


async def test_too_many_open_files_are_told_of_once_in_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, errors = asyncio.get_running_loop(), LoopErrors()
    full = {"message": "accept", "exception": OSError(errno.EMFILE, "Too many open files")}
    for _ in range(2000):
        errors(loop, full)
    assert [record.getMessage() for record in caplog.records] == [
        "too many open files: new connections must wait until others are closed"
    ]
    monkeypatch.setattr("service.server.QUIET_SECONDS", 0.0)
    errors._quiet_until = 0.0
    errors(loop, full)
    errors(loop, full)
    assert len(caplog.records) == 3


async def test_anything_else_is_told_as_asyncio_does(caplog: pytest.LogCaptureFixture) -> None:
    LoopErrors()(asyncio.get_running_loop(), {"message": "something else"})
    assert [record.getMessage() for record in caplog.records] == ["something else"]


def test_collections_of_garbage_leave_the_libraries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(Server, "run", lambda *_: frozen.append(gc.get_freeze_count()))
    monkeypatch.setattr("service.server.configure_logging", lambda *_: None)
    interval = sys.getswitchinterval()
    try:
        with socket.socket() as listener:
            serve(Settings(), listener)
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)
    [count] = frozen
    assert count > 100_000
