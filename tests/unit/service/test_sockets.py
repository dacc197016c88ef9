"""The listening socket."""

from __future__ import annotations

import socket

import pytest

from service.sockets import listen, url


def test_a_free_port_is_picked_and_named() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url(listener) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port)).close()


def test_a_taken_port_is_an_error() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", taken.getsockname()[1])


def test_a_strange_host_is_an_error() -> None:
    with pytest.raises(OSError, match=r"not known|No address|resolution"):
        listen("no.such.host.invalid", 0)
