"""How fast /logits hands tensors over, beside a plain `sendall` of as many bytes on loopback.

    python -m benchmarks.tensors

Both are timed from the first byte of the body to its last, without the model's own time.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import time
from multiprocessing import Process
from pathlib import Path

from benchmarks.models import write_model
from benchmarks.servers import SEQSERVE, free_port, running
from model.families.seqserve import TransformerConfig

ROWS, POSITIONS = 8, 64
SHAPE = TransformerConfig(100, 32_000, dim=64, hidden_dim=128, max_tgt=POSITIONS)
BUFFER = bytearray(1 << 20)


def read(connection: socket.socket, count: int) -> float:
    """Bytes a second of a body of which nothing was read yet."""
    connection.recv(1)
    began, left = time.perf_counter(), count - 1
    while left:
        got = connection.recv_into(BUFFER, min(left, len(BUFFER)))
        assert got, "the connection was closed"
        left -= got
    return count / (time.perf_counter() - began)


def of_logits(port: int) -> tuple[float, int]:
    """The speed of an answer, and its size."""
    body = json.dumps(
        {
            "input_ids": [[5, 6, 2]] * ROWS,
            "target_ids": [[7] * (POSITIONS - 1)] * ROWS,
            "positions": "all",
            "format": "safetensors",
        }
    )
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = f"POST /logits HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += connection.recv(1)
        assert answer.startswith(b"HTTP/1.1 200"), answer + connection.recv(1000)
        size = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return read(connection, size), size


def serve_bytes(port: int, size: int) -> None:
    """Answer every connection with so many bytes."""
    content = memoryview(bytearray(size))
    with socket.create_server(("127.0.0.1", port)) as server:
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(content)


def of_a_plain_send(port: int, size: int) -> float:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        return read(connection, size)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensors", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), SHAPE)
        served, plain = free_port(), free_port()
        command = (*SEQSERVE, "serve", "--model", directory, "--log-level", "error")
        with running(*command, port=served):
            _, size = of_logits(served)
            sender = Process(target=serve_bytes, args=(plain, size), daemon=True)
            sender.start()
            time.sleep(1.0)
            pairs = [(of_logits(served)[0], of_a_plain_send(plain, size)) for _ in range(rounds)]
            sender.terminate()
    ours, theirs = (statistics.median(speeds) / 1e9 for speeds in zip(*pairs, strict=True))
    share = statistics.median(a / b for a, b in pairs)
    print(f"{size / 1e6:.1f} MB: /logits {ours:.2f} GB/s, sendall {theirs:.2f} GB/s, {share:.2f}")


if __name__ == "__main__":
    main()
