"""Whole servers against each other, over loopback: all requests at once, and as they come.

    python -m benchmarks.http --dtype int8

The servers of a comparison run side by side and idle while it is not their turn. Rates are shares
of the rival's own capacity, measured in the same run. The first token is that of a stream, where a
server streams; of the others it is the answer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace

from benchmarks.checkpoints import build
from benchmarks.load import Figures, requests
from benchmarks.offline import ROOT
from benchmarks.servers import SEQSERVE, free_port, running

OURS, RIVAL = "seqserve", "CTranslate2"
PLAIN, BATCHER = "transformers", "transformers behind LitServe"

FIGURES = {
    "tokens_per_second": "tokens/s",
    "p50": "p50 s",
    "p99": "p99 s",
    "first": "first token s",
}
COLUMNS = ("load", "server", *(c for told in FIGURES.values() for c in (told, "ours / its")))
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def measure(
    url: str, count: int, rate: float | None, seed: int, exact: bool, stream: bool = False
) -> Figures:
    """One run of the load, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.load", url, "--count", str(count)]
    command += ["--seed", str(seed)]
    command += ["--rate", str(rate)] if rate else []
    command += ["--exact"] if exact else []
    command += ["--stream"] if stream else []
    return Figures(**json.loads(subprocess.run(command, capture_output=True, check=True).stdout))


def compare(urls: dict[str, str], count: int, rate: float | None, rounds: int) -> None:
    """Print each server's medians, and ours over the others' within each round."""
    runs: dict[str, list[Figures]] = {name: [] for name in urls}
    for seed in range(rounds):
        for name, url in urls.items():
            runs[name].append(measure(url, count, rate, seed, exact=name == OURS))
        streamed = measure(urls[OURS], count, rate, seed, exact=True, stream=True)
        runs[OURS][-1] = replace(runs[OURS][-1], first=streamed.first)
    load = f"{rate:.2f} a second" if rate else f"{count} at once"
    for name, figures in runs.items():
        cells = [load, name]
        for field in FIGURES:
            values = [getattr(f, field) for f in figures]
            ratio = statistics.median(
                getattr(ours, field) / theirs
                for ours, theirs in zip(runs[OURS], values, strict=True)
            )
            digits = 0 if field == "tokens_per_second" else 2
            cells += [f"{statistics.median(values):.{digits}f}", f"{ratio:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


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
                *SEQSERVE,
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
        servers[BATCHER] = ("-m", "benchmarks.rivals", "litserve", checkpoint, *threads)
    print(f"marian-base, {options.dtype}, {options.threads} threads\n\n{HEADER}", flush=True)
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(running(*command, port=free_port())).url
            for name, command in servers.items()
        }
        for name, url in urls.items():  # what only the first burst takes: memory, kernels
            measure(url, 64, None, options.rounds, exact=name == OURS)
        compare(urls, 64, None, options.rounds)
        urls = {name: urls[name] for name in (OURS, RIVAL)}
        bursts = [measure(urls[RIVAL], 64, None, 0, exact=False) for _ in range(3)]
        burst = max(bursts, key=lambda figures: figures.tokens_per_second)
        alone = subprocess.run([sys.executable, *servers[RIVAL]], capture_output=True, check=True)
        share = burst.tokens_per_second / float(alone.stdout)
        print(f"\n{RIVAL}'s server does {share:.2f} of what its engine does alone.\n\n{HEADER}")
        mean_tokens = statistics.mean(request.tokens for request in requests(64, None, 0, eos=0))
        capacity = burst.tokens_per_second / mean_tokens
        for share in (0.5, 0.8, 1.1):
            compare(urls, options.count, share * capacity, options.rounds)


if __name__ == "__main__":
    main()
