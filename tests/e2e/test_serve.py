"""The server as a user meets it: a process, a socket, signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from seqserve import Client
from tests.builders import make_native_model

from .conftest import ENDLESS, LONG, PATIENCE, Server, serving

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def long_model(tmp_path: Path) -> Path:
    """A model that can be asked for `LONG` tokens."""
    return make_native_model(tmp_path, max_tgt=LONG)


def ask(server: Server, inputs: list[str], tokens: int) -> httpx.Response:
    """The answer for `inputs`, each of exactly `tokens` tokens."""
    parameters = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    body = {"inputs": inputs, "parameters": parameters}
    return httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE)


def wait_until_running(client: Client) -> None:
    """Until the engine has rows."""
    deadline = time.monotonic() + PATIENCE
    while not client.info().models[0].running:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_64_concurrent_words_come_back_right_and_batched(server: Server) -> None:
    words = [LETTERS[i % 20 : i % 20 + 1 + i % 7] for i in range(64)]
    with Client(server.url) as client:
        alone = [client.generate(word).generated_text for word in words]
        with ThreadPoolExecutor(64) as pool:
            together = list(pool.map(lambda w: client.generate(w).generated_text, words))
        batches = client.info().models[0].batches
    assert together == alone
    assert batches
    print(f"rows in a step -> steps: {batches.histogram}")
    assert batches.max_rows >= 8


def test_curl_without_a_content_type_works(server: Server) -> None:
    done = subprocess.run(
        ["curl", "-s", f"{server.url}/generate", "-d", '{"inputs": "hello"}'],
        capture_output=True,
        check=True,
        timeout=PATIENCE,
    )
    assert json.loads(done.stdout)["generated_text"]


def test_a_body_over_the_limit_is_answered_before_it_is_sent_whole(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n{"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_caller_that_goes_away_does_not_hold_the_server_up(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"inputs": ["hello"] * 1000}).encode()
    for _ in range(3):
        with socket.create_connection((host, int(port)), PATIENCE) as connection:
            connection.sendall(
                b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
                + body
            )
            time.sleep(0.05)
    with Client(server.url) as client:
        assert client.generate("hello").generated_text
        model = client.info().models[0]
    assert (model.waiting, model.running) == (0, 0)


def test_closing_a_stream_ends_its_generation(long_model: Path) -> None:
    with serving("--model", f"long={long_model}") as server, Client(server.url) as client:
        events = client.stream("hello", ENDLESS)
        assert [next(events).index for _ in range(3)] == [0, 1, 2]
        with Client(server.url) as other:
            assert other.info().models[0].running == 1
        events.close()
        deadline = time.monotonic() + PATIENCE
        while client.info().models[0].running:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        batches = client.info().models[0].batches
        assert batches
        assert batches.steps < LONG
        assert client.generate("hello").generated_text


def test_sigterm_finishes_what_runs_and_exits_0(long_model: Path) -> None:
    with (
        serving("--model", str(long_model)) as server,
        ThreadPoolExecutor() as pool,
        Client(server.url) as client,  # its idle connection must not hold the end up
    ):
        running = pool.submit(ask, server, ["hello", "quick"] * 20, 1500)
        wait_until_running(client)
        server.process.send_signal(signal.SIGTERM)
        statuses = set()
        while not running.done():
            try:
                statuses.add(httpx.get(f"{server.url}/ready").status_code)
            except httpx.TransportError:  # it has stopped listening
                break
            time.sleep(0.01)
        answer = running.result(PATIENCE)
        assert answer.status_code == 200
        assert len(answer.json()) == 40
        assert server.wait() == 0
        assert 503 in statuses
        assert "Traceback" not in "".join(server.log)


def test_a_second_signal_does_not_wait_for_what_runs(long_model: Path) -> None:
    with serving("--model", str(long_model)) as server, ThreadPoolExecutor() as pool:
        running = pool.submit(ask, server, ["hello"], LONG)
        with Client(server.url) as client:
            wait_until_running(client)
        server.process.send_signal(signal.SIGINT)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert running.result(PATIENCE).status_code == 503
        assert "Traceback" not in "".join(server.log)


def test_a_body_that_never_comes_does_not_hold_the_end_up(model: Path) -> None:
    with serving("--model", str(model)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), PATIENCE) as slow:
            slow.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 20\r\n\r\n{")
            with Client(server.url) as client:
                assert client.generate("hello").generated_text
            assert server.stop() == 0
            assert slow.recv(4096).startswith(b"HTTP/1.1 503 ")
        assert "Traceback" not in "".join(server.log)


def test_sigterm_while_a_model_is_loaded_ends_in_order(tmp_path: Path) -> None:
    large = make_native_model(tmp_path, dim=256, hidden_dim=4096)
    server = Server("--model", str(large), "--port", "0")
    try:
        server.wait_until_listening()
        assert server.stop() == 0
        assert "Traceback" not in "".join(server.log)
        assert "terminate" not in "".join(server.log)
    finally:
        server.process.kill()
        server.wait()


def test_sigterm_gives_up_after_the_grace_period(long_model: Path) -> None:
    arguments = ("--model", str(long_model), "--grace", "0")
    with serving(*arguments) as server, ThreadPoolExecutor() as pool:
        running = pool.submit(ask, server, ["hello"], LONG)
        with Client(server.url) as client:
            wait_until_running(client)
        assert server.stop() == 0
        assert running.result(PATIENCE).status_code == 503


def test_a_taken_port_is_named_and_nothing_is_loaded(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = Server("--model", str(model), "--port", str(port))
        assert server.wait() == 1
    [line] = server.log
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in line
    assert "--port" in line


def test_a_model_that_cannot_be_loaded_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "perceptron"}')
    server = Server("--model", f"bad={tmp_path}", "--port", "0")
    assert server.wait() == 1
    assert server.log[-1].startswith("seqserve: model bad: ")
    assert "perceptron" in server.log[-1]
    assert "Traceback" not in "".join(server.log)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_head_answers_a_probe_without_a_body(server: Server, path: str) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        connection.sendall(f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, end, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert (end, body) == (b"\r\n\r\n", b"")


def test_as_json_every_line_of_the_log_is_an_object(model: Path) -> None:
    arguments = ("--model", f"tiny={model}", "--log-format", "json", "--log-level", "debug")
    with serving(*arguments) as server:
        with Client(server.url) as client:
            client.generate("hello")
        assert server.stop() == 0
    lines = [json.loads(line) for line in server.log]
    [line] = [line for line in lines if line.get("route") == "/generate"]
    assert (line["status"], line["model"], line["inputs"]) == (200, "tiny", 1)
    assert not [line for line in lines if line["logger"].startswith("uvicorn.access")]
