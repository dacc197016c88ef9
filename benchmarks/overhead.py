"""What a server does beside its engine: the CPU seconds of its threads under 64 callers at once.

    python -m benchmarks.overhead --dtype int8

The engine runs in a thread of its own; HTTP, JSON and validation are what the others do. CPU
seconds hold on a busy machine too. Linux only.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path

from benchmarks.checkpoints import build
from benchmarks.http import measure
from benchmarks.offline import ROOT
from benchmarks.servers import SEQSERVE, free_port, running

CALLERS = 64
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> dict[int, float]:
    """Of each thread of a process so far."""
    return {
        int(task.name): sum(map(int, fields[11:13])) / TICKS
        for task in Path(f"/proc/{pid}/task").iterdir()
        for fields in [(task / "stat").read_text().rpartition(")")[2].split()]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "int8"), default="int8")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model, port = build("marian-base", ROOT)["checkpoint"], free_port()
    words = (*SEQSERVE, "serve", "--model", str(model), "--dtype", options.dtype)
    shares = []
    with running(*words, "--threads", "1", port=port) as server:
        measure(server.url, CALLERS, None, 0, exact=True)
        for _ in range(options.rounds):
            before = cpu_seconds(server.pid)
            measure(server.url, CALLERS, None, 0, exact=True)
            spent = [now - before.get(task, 0.0) for task, now in cpu_seconds(server.pid).items()]
            engine = max(spent)
            shares.append((sum(spent) - engine) / engine)
            print(f"engine {engine:.2f} s, all else {sum(spent) - engine:.2f} s", flush=True)
    print(
        f"{CALLERS} at once, {options.dtype}: {statistics.median(shares):.1%} of the engine's time"
    )


if __name__ == "__main__":
    main()
