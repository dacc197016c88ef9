"""Whole servers against each other, over loopback: all requests at once, and as they come.

    python -m benchmarks.http --dtype int8

The servers of a comparison run side by side and idle while it is not their turn. Rates are shares
of the rival's own capacity, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx

from benchmarks.checkpoints import build
from benchmarks.load import Figures
from benchmarks.offline import ROOT

OURS, RIVAL, PLAIN = "seqserve", "CTranslate2", "transformers"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(*command: str, port: int) -> Iterator[str]:
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
        yield url
    finally:
        process.terminate()
        process.wait()


def measure(url: str, count: int, rate: float | None, seed: int, exact: bool) -> Figures:
    """One run of the load, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.load", url, "--count", str(count)]
    command += ["--seed", str(seed)]
    command += ["--rate", str(rate)] if rate else []
    command += ["--exact"] if exact else []
    return Figures(**json.loads(subprocess.run(command, capture_output=True, check=True).stdout))


def compare(urls: dict[str, str], count: int, rate: float | None, rounds: int) -> None:
    """Print each server's medians, and ours over the others' within each round."""
    runs: dict[str, list[Figures]] = {name: [] for name in urls}
    for seed in range(rounds):
        for name, url in urls.items():
            runs[name].append(measure(url, count, rate, seed, exact=name == OURS))
    load = f"{rate:.2f} a second" if rate else f"{count} at once"
    for name, figures in runs.items():
        cells = [load, name]
        for field in ("tokens_per_second", "p50", "p99"):
            values = [getattr(f, field) for f in figures]
            ratio = statistics.median(
                getattr(ours, field) / theirs
                for ours, theirs in zip(runs[OURS], values, strict=True)
            )
            digits = 0 if field == "tokens_per_second" else 2
            cells += [f"{statistics.median(values):.{digits}f}", f"{ratio:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


HEADER = """\
| load | server | tokens/s | ours / its | p50 s | ours / its | p99 s | ours / its |
|---|---|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float32", "int8"], default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=100, help="requests of a Poisson run")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--without-transformers", action="store_true")
    options = parser.parse_args()
    directories = build("marian-base", ROOT)
    threads = ("--threads", str(options.threads))
    servers: dict[str, tuple[str, ...]] = {
        OURS: (
            *(
                "-c",
                "from seqserve.cli import main; main()",
                "serve",
                "--model",
                str(directories["checkpoint"]),
            ),
            *("--dtype", options.dtype, "--max-rows", "32", "--log-level", "error", *threads),
        ),
        RIVAL: (
            *("-m", "benchmarks.rivals", "ctranslate2", str(directories[options.dtype])),
            *("--dtype", options.dtype, *threads),
        ),
    }
    if not options.without_transformers:
        checkpoint = str(directories["checkpoint"])
        servers[PLAIN] = ("-m", "benchmarks.rivals", "transformers", checkpoint, *threads)
    print(f"marian-base, {options.dtype}, {options.threads} threads\n\n{HEADER}", flush=True)
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(running(*command, port=free_port()))
            for name, command in servers.items()
        }
        compare(urls, 64, None, options.rounds)
        urls.pop(PLAIN, None)
        burst = measure(urls[RIVAL], 64, None, 0, exact=False)
        mean_tokens = 64 * 23 / 64
        capacity = burst.tokens_per_second / mean_tokens
        for share in (0.5, 0.8, 1.1):
            compare(urls, options.count, share * capacity, options.rounds)


if __name__ == "__main__":
    main()
