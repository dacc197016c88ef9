"""Hostile input over a real socket: each is refused in the envelope, and the next request works."""

from __future__ import annotations

import contextlib
import gzip
import json
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from seqserve import Client
from seqserve.errors import UnauthorizedError
from tests.builders import make_native_model

from .conftest import PATIENCE, Server, serving

JSON = "content-type: application/json\r\n"


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving("--model", f"tiny={model}", "--receive-timeout", "1.5") as server:
        yield server


@pytest.fixture(autouse=True)
def next_request_works(server: Server) -> Iterator[None]:
    yield
    with Client(server.url) as client:
        assert client.generate("hello").generated_text
    assert "Traceback" not in "".join(server.log)


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), PATIENCE)


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one answer."""
    with connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers = {}
        while (line := file.readline().decode("latin-1").strip()) != "":
            name, value = line.split(":", 1)
            headers[name.lower()] = value.strip()
        return status, headers, file.read(int(headers.get("content-length", 0)))


def refused(answer: tuple[int, dict[str, str], bytes], status: int, message: str) -> None:
    found, headers, body = answer
    assert found == status, body[:300]
    envelope = json.loads(body)
    assert envelope.keys() == {"error", "error_type", "param", "request_id"}
    assert envelope["request_id"] == headers["x-request-id"]
    assert message in envelope["error"]
    assert len(body) < 1000


def post(
    server: Server, body: bytes, path: str = "/generate", headers: str = JSON
) -> tuple[int, dict[str, str], bytes]:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(body)}\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(head.encode("latin-1"))
        with contextlib.suppress(OSError):  # refused before it was read whole
            connection.sendall(body)
        return read_answer(connection)


def in_text(text: bytes) -> bytes:
    return b'{"inputs": "' + text + b'"}'


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (in_text(b"\\ud800"), 400, "surrogate"),
        (in_text(b"\\udfff\\ud800"), 400, "surrogate"),
        (in_text(b"\xed\xa0\x80"), 400, "UTF-8"),
        (in_text(b"\xff\xfe"), 400, "UTF-8"),
        (in_text(b"\x00"), 400, "control character"),
        (in_text(b"x" * 10_000_000), 413, "4194304 bytes (max_body_bytes)"),
        (in_text(b"x" * 4_000_000), 422, "at most 100000 are allowed (max_characters)"),
        (b"[" * 100_000, 400, "depth"),
        (b'{"inputs":' * 100_000, 400, "depth"),
        (b"[" * 100_000 + b"]" * 100_000, 400, "depth"),
        (b'{"input_ids": [1' + b"0" * 10_000 + b"]}", 400, "infinity"),
        (b'{"input_ids": [100000000000000000000]}', 422, "must be an integer"),
        (b'{"inputs": "a", "timeout": NaN}', 400, "not valid JSON"),
        (b'{"inputs": "a", "timeout": -Infinity}', 400, "not valid JSON"),
        (b'{"inputs": "a", "timeout": 1e400}', 400, "infinity"),
        (b'{"inputs": "a", "inputs": 5}', 422, "inputs must be a string"),
        (b"\xef\xbb\xbf" + in_text(b"a"), 400, "not valid JSON"),
        (b"PK\x03\x04", 400, "not valid JSON"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_a_hostile_body(server: Server, body: bytes, status: int, message: str) -> None:
    refused(post(server, body), status, message)


def test_control_characters_are_text(server: Server) -> None:
    for text in (b"\\u0000", b"a\\u0000b", b"\\u0001\\u001b[2J\\u007f", b"\\u202e\\ufeff"):
        status, _, body = post(server, in_text(text))
        assert status == 200
        assert isinstance(json.loads(body)["generated_text"], str)


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "x" * 3000])
def test_a_packed_body(server: Server, encoding: str) -> None:
    body = gzip.compress(in_text(b"a" * 1_000_000))
    answer = post(server, body, headers=f"content-encoding: {encoding}\r\n")
    refused(answer, 415, "content-encoding must be left out")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "X"])
def test_a_wrong_method(server: Server, method: str) -> None:
    with connect(server) as connection:
        connection.sendall(f"{method} /generate HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        status, headers, body = read_answer(connection)
    refused((status, headers, body), 405, f"/generate does not take {method}")
    assert headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path",
    [
        "/%00",
        "/..%2f..%2fetc/passwd",
        "/docs/../../settings.py",
        "/docs/%2e%2e/app.py",
        "/" + "x" * 9000,
    ],
    ids=lambda v: v[:20],
)
def test_a_strange_path(server: Server, path: str) -> None:
    with connect(server) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        refused(read_answer(connection), 404, "there is no /")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # without a host
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 600_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 600_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: " + b"9" * 50 + b"\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=lambda v: str(v)[:40],
)
def test_what_is_no_http(server: Server, sent: bytes) -> None:
    with connect(server) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(sent)
        answer = read_answer(connection)
        refused(answer, 400, "not valid HTTP")
        assert answer[1]["connection"] == "close"


@pytest.mark.parametrize(
    ("sent", "what"),
    [
        (b"", "head"),
        (b"POST /gener", "head"),
        (b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 20\r\n\r\n{", "body"),
        (
            b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
            "body",
        ),
    ],
)
def test_what_never_ends(server: Server, sent: bytes, what: str) -> None:
    began = time.monotonic()
    with connect(server) as connection:
        connection.sendall(sent)
        refused(read_answer(connection), 408, f"{what} took longer than 1.5 seconds")
    assert time.monotonic() - began >= 1.4


def test_a_byte_now_and_then_does_not_hold_a_connection(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        began = time.monotonic()
        connection.settimeout(0.2)
        while True:
            connection.sendall(b"x: y\r\n")
            with contextlib.suppress(TimeoutError):
                assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
                break
    assert 1.4 <= time.monotonic() - began < 20


def test_patience_is_for_each_request_of_a_connection(server: Server) -> None:
    with connect(server) as connection:
        for _ in range(3):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert read_answer(connection)[0] == 200
            time.sleep(0.8)


def test_keys_stand_in_no_log_and_on_no_command_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("# first\nsk-secret-in-file\n")
    monkeypatch.setenv("SEQSERVE_API_KEYS", "sk-secret-in-variable")
    monkeypatch.delenv("SEQSERVE_API_KEY", raising=False)
    arguments = ("--model", str(model), "--api-keys-file", str(file), "--log-level", "debug")
    with serving(*arguments) as guarded:
        for key in ("sk-secret-in-file", "sk-secret-in-variable"):
            with Client(guarded.url, api_key=key) as client:
                assert client.generate("hello").generated_text
        for key in ("", "sk-secret-in-fil"):
            with Client(guarded.url, api_key=key) as client, pytest.raises(UnauthorizedError):
                client.generate("hello")
        # The key is looked at first: this body never comes.
        host, port = guarded.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), PATIENCE) as connection:
            connection.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
            status, headers, _ = read_answer(connection)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert guarded.stop() == 0
    assert "sk-secret" not in "".join(guarded.log)
    assert "sk-secret" not in " ".join(map(str, guarded.process.args))


def test_a_file_of_keys_that_is_not_there_ends_the_process(model: Path, tmp_path: Path) -> None:
    server = Server("--model", str(model), "--port", "0", "--api-keys-file", str(tmp_path / "no"))
    assert server.wait() == 2
    assert f"api_keys_file {tmp_path / 'no'}: No such file" in "".join(server.log)


def test_probes_are_answered_while_large_bodies_come_in(server: Server) -> None:
    lists = b'{"input_ids": [' + b",".join([b"[]"] * 600_000) + b"]}"
    fields = b",".join(b'"%d": "x"' % number for number in range(300_000))
    biases = b'{"inputs": "a", "parameters": {"logit_bias": {' + fields + b"}}}"
    text = b'{"inputs": "' + b"x" * 4_000_000 + b'"}'
    slowest = 0.0
    with ThreadPoolExecutor(4) as callers:
        running = [callers.submit(post, server, body) for body in (lists, text, biases) * 3]
        while not all(call.done() for call in running):
            began = time.monotonic()
            assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
            slowest = max(slowest, time.monotonic() - began)
    statuses = {call.result()[0] for call in running}
    assert 422 in statuses
    assert statuses <= {422, 408}  # a busy machine may not read four megabytes in time
    print(f"slowest probe: {slowest:.3f} s")


def metric(server: Server, line: str) -> float:
    """The value of a series, 0 before it is there."""
    text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    values = [found.rpartition(" ")[2] for found in text.splitlines() if found.startswith(line)]
    return sum(map(float, values))


def test_what_is_no_http_is_counted_and_logged(server: Server) -> None:
    series = (
        'seqserve_requests_total{method="other",model="",route="other",status="400"}',
        'seqserve_request_errors_total{error_type="validation",model="",route="other"}',
    )
    before = [metric(server, line) for line in series]
    with connect(server) as connection:
        connection.sendall(b"what?\r\n\r\n")
        _, headers, _ = read_answer(connection)
    assert [metric(server, line) for line in series] == [count + 1 for count in before]
    assert metric(server, "seqserve_requests_in_flight") == 1, "the scrape itself"
    assert f"request_id={headers['x-request-id']} method=other" in "".join(server.log)


LARGE_ANSWER = {"input_ids": [5, 2], "target_ids": [5] * 1500, "format": "safetensors"}
"""To /attention; more than a system's buffers hold."""


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with large answers, which wants them taken soon."""
    model = make_native_model(tmp_path_factory.mktemp("long"), max_tgt=3000)
    with serving("--model", f"long={model}", "--send-timeout", "1") as server:
        yield server


@contextlib.contextmanager
def asked_for_a_large_answer(server: Server) -> Iterator[socket.socket]:
    """A connection on which it is to come, and which is closed behind it."""
    body = json.dumps(LARGE_ANSWER)
    head = f"content-length: {len(body)}\r\nconnection: close\r\n"
    with connect(server) as connection:
        connection.sendall(f"POST /attention HTTP/1.1\r\nhost: x\r\n{head}\r\n{body}".encode())
        yield connection


def test_a_caller_that_takes_nothing_of_its_answer_is_cut_off(long: Server) -> None:
    with asked_for_a_large_answer(long) as deaf:
        hung_up = select.poll()
        hung_up.register(deaf, select.POLLHUP)
        assert hung_up.poll(1e3 * PATIENCE)
    assert httpx.get(f"{long.url}/health", timeout=PATIENCE).status_code == 200


def test_a_caller_that_takes_its_answer_slowly_gets_it_all(long: Server) -> None:
    whole = httpx.post(f"{long.url}/attention", json=LARGE_ANSWER, timeout=PATIENCE)
    began, read = time.monotonic(), 0
    with asked_for_a_large_answer(long) as slow:
        while piece := slow.recv(1 << 20):
            read += len(piece)
            time.sleep(0.05)
    assert read > len(whole.content) > 10_000_000
    assert time.monotonic() - began > 2.0, "longer than the timeout"
