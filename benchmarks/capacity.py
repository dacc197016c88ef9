"""How many replicas a load needs, as a simulation says whose parts were measured.

    taskset -c 0 python -m benchmarks.capacity --measurements capacity.json --write docs/scaling.md

A step's time and what a request costs in callers, proxies and replicas are measured with a random
model of Marian base's shape, one thread on the CPU. The simulation is held against deployments on
Ray, all of whose processes share one core, which nothing else should want. Only for Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx
import numpy as np

from benchmarks.load import Figures, Request, requests
from benchmarks.models import MARIAN_BASE, write_model
from benchmarks.pages import write_between
from benchmarks.servers import SEQSERVE, free_port, running
from benchmarks.simulation import (
    Arrival,
    Cluster,
    Cores,
    Loss,
    Simulation,
    StepTime,
    percentile,
    poisson,
)
from model.config import EngineConfig

BEGIN, END = "<!-- capacity: benchmarks.capacity writes it -->", "<!-- end of the capacity -->"

MAX_ROWS = EngineConfig.max_rows
EOS = 2
CALLERS = ((4, 80, 0.0), (1, 20, 1.0), (4, 60, 1.0), (12, 100, 1.0), (30, 150, 1.0))
"""Callers side by side, requests of all, and how long their targets are beside the usual, of the
runs that tell what steps and requests take. Those of one token tell requests from tokens."""

ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Of Ray's processes."""

LIVE = ((1, 0.5), (1, 0.75), (2, 0.3), (2, 0.5), (2, 0.7))
"""Replicas, and the rate as a share of what one could do at most with what is ours of the core."""

LIMITS = (2.0, 4.0, 8.0)
"""Seconds that a request out of a hundred may take longer."""

RATES = (1, 3, 10, 30, 100, 300, 1000)
BIG = 10_000
LOST_FOR = 60.0
"""Seconds until a lost replica is replaced."""


@dataclass(frozen=True)
class Costs:
    """Of a step, and of a request beside its steps; seconds of a core.

    Attributes:
        base, row, source: see `StepTime`; what the replica does beside its engine counts too.
        hit: what is saved of `source` where the encoder cache has it.
        elsewhere: of one request, in callers and proxies.
        idle: share of a core that Ray takes without any request.
    """

    base: float
    row: float
    source: float
    hit: float
    elsewhere: float
    idle: float

    @property
    def step(self) -> StepTime:
        return StepTime(self.base, self.row, self.source)


@dataclass(frozen=True)
class Live:
    """A deployment under load.

    Attributes:
        rate: requests a second, of `count` in all.
        shares: of the core that it could have beside what others did on it, from so many seconds
            after the first request on.
        cpu: seconds that its replicas took for each request.
    """

    replicas: int
    rate: float
    count: int
    seed: int
    shares: list[tuple[float, float]]
    cpu: float
    figures: Figures

    @property
    def share(self) -> float:
        return statistics.mean(share for _, share in self.shares)


# --- measuring -----------------------------------------------------------------------------------


@contextmanager
def deployment(model: Path, replicas: int) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """A deployment on a Ray of its own: its address, and CPU seconds of its replicas and the rest.

    All its processes are told by a variable that they inherit.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-") as directory:
        os.environ.update({**ENVIRONMENT, "RAY_TMPDIR": directory})
        words = ["serve", "--model", str(model), "--ray", "--replicas", str(replicas)]
        words += ["--replica-cpus", "0.01", "--threads", "1", "--lookahead", "0"]
        words += ["--log-level", "error", "--max-rows", str(MAX_ROWS)]
        with running(*SEQSERVE, *words, port=port) as server:
            yield server.url, lambda: cpu_seconds(f"RAY_TMPDIR={directory}".encode())


def cpu_seconds(variable: bytes) -> dict[str, float]:
    """CPU seconds of all processes with a variable in their environment but this one."""
    taken = {"replicas": 0.0, "rest": 0.0}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if variable not in (process / "environ").read_bytes().split(b"\0"):
                continue
            title = (process / "cmdline").read_bytes()
            figures = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended, or is somebody else's
            continue
        part = "replicas" if b"ServeReplica" in title else "rest"
        ticks = int(figures[11]) + int(figures[12])  # user and system
        taken[part] += ticks / os.sysconf("SC_CLK_TCK")
    return taken


class Neighbours:
    """How much of the core is ours to have, second by second, while the block lasts.

    That is what others leave, and no less than an even part: Linux divides a core evenly among the
    sessions that want it, and all that we start is in one.

    Attributes:
        shares: when a second began, as `time.monotonic` tells it, and what was ours then.
    """

    def __init__(self) -> None:
        self.shares: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch)

    def __enter__(self) -> Neighbours:
        self._watching.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._watching.join()

    @property
    def share(self) -> float:
        """The mean over the block, of the core."""
        return statistics.mean(share for _, share in self.shares)

    def _watch(self) -> None:
        own, began, before, core = os.getsid(0), time.monotonic(), session_seconds(), core_seconds()
        while not self._over.wait(1.0):
            now, after, core_now = time.monotonic(), session_seconds(), core_seconds()
            took = {
                session: after[session] - before.get(session, after[session]) for session in after
            }
            others = sum(seconds > 0.05 for session, seconds in took.items() if session != own)
            left = 1.0 - (core_now - core - took[own]) / (now - began)
            self.shares.append((began, min(1.0, max(left, 1.0 / (1 + others)))))
            began, before, core = now, after, core_now


def core_seconds() -> float:
    """What everybody took of the core that this process may use."""
    (core,) = os.sched_getaffinity(0)
    lines = Path("/proc/stat").read_text().splitlines()
    ticks = next(line.split()[1:] for line in lines if line.startswith(f"cpu{core} "))
    busy = sum(map(int, ticks[:8])) - int(ticks[3]) - int(ticks[4])  # without idle and iowait
    return busy / os.sysconf("SC_CLK_TCK")


def session_seconds() -> dict[int, float]:
    """CPU seconds of each session's processes that last ran on this process's core."""
    (core,), seconds = os.sched_getaffinity(0), dict[int, float]()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            figures = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        session, ticks = int(figures[3]), int(figures[11]) + int(figures[12])
        if int(figures[36]) == core or session == os.getsid(0):
            seconds[session] = seconds.get(session, 0.0) + ticks / os.sysconf("SC_CLK_TCK")
    return seconds


def measure_costs(model: Path) -> Costs:
    """What steps and requests take of a deployment of one replica.

    Callers ask one after the other, more and more of them side by side. The replica's CPU time of
    each run is a sum over its steps, tokens and requests, whose numbers are known.
    """
    runs: list[Run] = []
    with deployment(model, 1) as (url, cpu):
        asyncio.run(ask(url, requests(10, None, seed=3, eos=EOS), callers=4))
        for seed, (callers, count, length) in enumerate(CALLERS):
            made = [
                replace(each, tokens=max(1, round(length * each.tokens)))
                for each in requests(count, None, 100 + seed, EOS)
            ]
            runs.append(one_run(url, cpu, made, callers))
        again = one_run(url, cpu, made, callers)  # from the encoder cache
    for run in (*runs, again):
        print(run, flush=True)
    base, row, source = least_squares(
        [(run.steps, run.tokens, run.requests) for run in runs], [run.replica for run in runs]
    )
    idle, elsewhere = least_squares(
        [(run.seconds, run.requests) for run in (*runs, again)],
        [run.elsewhere for run in (*runs, again)],
    )
    saved = runs[-1].replica - again.replica - base * (runs[-1].steps - again.steps)
    return Costs(base, row, source, saved / again.requests, elsewhere, idle)


def least_squares(columns: Sequence[Sequence[float]], sums: Sequence[float]) -> list[float]:
    """What one of each column takes; each sum counts by its share, not by its size."""
    scale = np.array(sums)
    found, *_ = np.linalg.lstsq(np.array(columns) / scale[:, None], scale / scale, rcond=None)
    return [float(each) for each in found]


@dataclass(frozen=True)
class Run:
    """What a deployment did, how long it took, and CPU seconds of replica and all else."""

    steps: int
    tokens: int
    requests: int
    seconds: float
    replica: float
    elsewhere: float


def one_run(
    url: str, cpu: Callable[[], dict[str, float]], made: list[Request], callers: int
) -> Run:
    before, steps, began, own = cpu(), steps_of(url), time.monotonic(), time.process_time()
    asyncio.run(ask(url, made, callers))
    own, took, after = time.process_time() - own, time.monotonic() - began, cpu()
    return Run(
        steps_of(url) - steps,
        sum(each.tokens for each in made),
        len(made),
        took,
        after["replicas"] - before["replicas"],
        after["rest"] - before["rest"] + own,
    )


def steps_of(url: str) -> int:
    """Steps that the replicas have made so far."""
    text = httpx.get(f"{url}/metrics", timeout=600).text
    return sum(
        int(float(n)) for n in re.findall(r"(?m)^seqserve_step_seconds_count.* (\S+)$", text)
    )


async def ask(url: str, made: list[Request], callers: int) -> None:
    """Have requests answered, so many at a time."""
    waiting = iter(made)
    async with httpx.AsyncClient(timeout=600) as client:

        async def caller() -> None:
            for request in waiting:
                wanted = {"max_new_tokens": request.tokens, "min_new_tokens": request.tokens}
                body = {"input_ids": request.src, "parameters": {**wanted, "details": True}}
                (await client.post(f"{url}/generate", json=body)).raise_for_status()

        await asyncio.gather(*(caller() for _ in range(callers)))


def measure_live(model: Path, costs: Costs, count: int) -> list[Live]:
    """Deployments under the loads of `LIVE`."""
    most = 1 / (costs.elsewhere + 1 / costs.step.most(MAX_ROWS, mean_tokens()))
    found: list[Live] = []
    for replicas in sorted({replicas for replicas, _ in LIVE}):
        with deployment(model, replicas) as (url, cpu):
            load(url, 6 * replicas, None, seed=99)  # everything has run once
            for share in (share for n, share in LIVE if n == replicas):
                with Neighbours() as neighbours:
                    time.sleep(5)
                rate = round(share * most * neighbours.share, 2)
                found.append(one_live(url, cpu, replicas, rate, count, seed=len(found)))
                print(found[-1], flush=True)
    return found


def one_live(
    url: str,
    cpu: Callable[[], dict[str, float]],
    replicas: int,
    rate: float,
    count: int,
    seed: int,
) -> Live:
    before = cpu()
    with Neighbours() as neighbours:
        figures = load(url, count, rate, seed)
    spent = cpu()["replicas"] - before["replicas"]
    shares = [(at - figures.began, share) for at, share in neighbours.shares]
    return Live(replicas, rate, count, seed, shares, spent / count, figures)


def load(url: str, count: int, rate: float | None, seed: int) -> Figures:
    """One run of the load, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.load", url, "--count", str(count), "--exact"]
    command += ["--seed", str(seed), "--eos", str(EOS)]
    command += ["--rate", str(rate)] if rate else []
    return Figures(**json.loads(subprocess.run(command, capture_output=True, check=True).stdout))


# --- answering -----------------------------------------------------------------------------------


def mean_tokens() -> float:
    """Of a target."""
    return statistics.mean(arrival.tokens for arrival in poisson(1000, 20))


def predicted(costs: Costs, live: Live) -> tuple[Figures, float]:
    """What the simulation says to the very requests that were sent, and seconds of all steps."""
    made: list[Request] = requests(live.count, live.rate, live.seed, EOS)
    cluster = Cluster(costs.step, live.replicas, MAX_ROWS, costs.elsewhere, cores=live.share)
    simulation = Simulation(cluster)
    outcomes = simulation.run(
        [Arrival(each.at, each.tokens) for each in made],
        [Cores(at, max(0.05, share - costs.idle)) for at, share in live.shares],
    )
    wall = max(outcome.at + outcome.seconds for outcome in outcomes)
    seconds = [outcome.seconds for outcome in outcomes]
    total = sum(each.tokens for each in made)
    p50 = percentile(seconds, 50)
    figures = Figures(total / wall, p50, percentile(seconds, 99), first=p50, began=0.0)
    return figures, simulation.step_seconds


def p99(cluster: Cluster, rate: float) -> float:
    """In seconds, of some thousand requests or more, without those of the beginning."""
    seconds = max(40.0, min(240.0, 4000 / rate))
    outcomes = Simulation(cluster).run(poisson(rate, seconds))
    return percentile([o.seconds for o in outcomes if o.at > seconds / 4], 99)


def replicas_for(cluster: Cluster, rate: float, limit: float) -> int:
    """The fewest replicas with which 99 of 100 requests take no longer than the limit."""
    fewest = max(1, math.ceil(rate / cluster.step.most(cluster.max_rows, mean_tokens())))

    def enough(replicas: int) -> bool:
        return p99(replace(cluster, replicas=replicas), rate) <= limit

    most = fewest
    while not enough(most):
        fewest, most = most + 1, most + max(1, most // 4)
    while fewest < most:
        middle = (fewest + most) // 2
        fewest, most = (fewest, middle) if enough(middle) else (middle + 1, most)
    return most


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---", *["--:"] * (len(head) - 1)], *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cost_table(costs: Costs) -> str:
    parts = [
        ("a step", f"{1e3 * costs.base:.1f} + {1e3 * costs.row:.2f} a row"),
        ("a request in its replica, beside its steps", f"{1e3 * costs.source:.1f}"),
        ("less, where the encoder cache has its source", f"{1e3 * costs.hit:.1f}"),
        ("a request in the caller and Ray's proxy", f"{1e3 * costs.elsewhere:.1f}"),
    ]
    return table(["costs", "ms of a core"], parts)


def comparison_table(costs: Costs, lives: Sequence[Live]) -> str:
    lines = []
    for live in lives:
        (told, spent), seen = predicted(costs, live), live.figures
        pairs = [(told.p50, seen.p50), (told.p99, seen.p99)]
        cells = [f"{a:.2f} / {b:.2f} s ({a / b - 1:+.0%})" for a, b in pairs]
        a, b = told.tokens_per_second, seen.tokens_per_second
        cells.append(f"{a:.0f} / {b:.0f} ({a / b - 1:+.0%})")
        a, b = 1e3 * spent / live.count, 1e3 * live.cpu
        cells.append(f"{a:.0f} / {b:.0f} ms ({a / b - 1:+.0%})")
        lines.append([str(live.replicas), f"{live.rate:.2f}", f"{live.share:.0%}", *cells])
    return table(
        ["replicas", "requests/s", "of the core", "p50", "p99", "tokens/s", "core, a request"],
        lines,
    )


def replica_table(cluster: Cluster) -> str:
    lines = []
    for rate in (*RATES, BIG):
        limits = LIMITS if rate < BIG else LIMITS[1:2]
        found = {limit: f"{replicas_for(cluster, rate, limit):,}" for limit in limits}
        lines.append([f"{rate:,}", *(found.get(limit, "not asked") for limit in LIMITS)])
        print(lines[-1], flush=True)
    return table(["requests/s", *(f"p99 of {limit:g} s" for limit in LIMITS)], lines)


def batching_table(cluster: Cluster) -> str:
    lines = []
    for max_rows in (1, 2, 4, 8, 16, 32, 64):
        one = replace(cluster, replicas=1, max_rows=max_rows)
        most = cluster.step.most(max_rows, mean_tokens())
        lines.append(
            [
                str(max_rows),
                f"{1e3 * cluster.step.of(max_rows):.0f} ms",
                f"{most:.2f}",
                f"{p99(one, 0.8 * most):.1f} s",
            ]
        )
    return table(["`--max-rows`", "a full step", "requests/s at most", "p99 at 80 % of it"], lines)


def loss_table(cluster: Cluster) -> str:
    lines = []
    most = cluster.step.most(cluster.max_rows, mean_tokens())
    for replicas in (2, 4, 8, 16):
        several = replace(cluster, replicas=replicas)
        cells = [str(replicas)]
        for share in (0.4, 0.7):
            arrivals = poisson(share * most * replicas, 600)
            outcomes = Simulation(several).run(arrivals, [Loss(200.0, LOST_FOR)])
            spans = [(50.0, 190.0), (195.0, 200.0 + LOST_FOR), (350.0, 600.0)]
            told = (
                percentile([o.seconds for o in outcomes if begin < o.at < end], 99)
                for begin, end in spans
            )
            cells.append(" / ".join(f"{seconds:.1f}" for seconds in told) + " s")
        lines.append(cells)
    return table(["replicas", "at 40 % of their most", "at 70 %"], lines)


def page(costs: Costs, lives: Sequence[Live]) -> str:
    """All tables, as Markdown."""
    own_cores = Cluster(costs.step, 1, MAX_ROWS, costs.elsewhere)
    most = costs.step.most(MAX_ROWS, mean_tokens())
    return "\n\n".join(
        [
            cost_table(costs),
            f"Ray takes {costs.idle:.0%} of a core without any request. Predicted / measured:",
            comparison_table(costs, lives),
            "Replicas with a core each, targets of 5 to 100 tokens, 26 on average; a replica "
            f"does {most:.1f} requests/s at most:".replace("26", f"{mean_tokens():.0f}"),
            replica_table(own_cores),
            f"{BIG:,} requests/s also keep {BIG * costs.elsewhere:,.0f} cores of callers and "
            "proxies busy. Where batching stops paying, for one replica:",
            batching_table(own_cores),
            f"A replica is lost and replaced after {LOST_FOR:.0f} s; p99 before / from the loss "
            "until then / later:",
            loss_table(own_cores),
        ]
    )


def measure(count: int) -> tuple[Costs, list[Live]]:
    """All that is measured, on the one core that this process is held to."""
    if len(os.sched_getaffinity(0)) != 1:
        raise SystemExit("what is measured shares one core: taskset -c 0 python -m ...")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory, MARIAN_BASE)
        costs = measure_costs(directory)
        print(costs, flush=True)
        return costs, measure_live(directory, costs, count)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="requests of a run on Ray")
    parser.add_argument(
        "--measurements", type=Path, help="file to read what was measured from, or to keep it in"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into a page")
    options = parser.parse_args()
    kept: Path | None = options.measurements
    if kept and kept.exists():
        told = json.loads(kept.read_text())
        costs = Costs(**told["costs"])
        lives = [Live(**{**live, "figures": Figures(**live["figures"])}) for live in told["lives"]]
    else:
        costs, lives = measure(options.count)
    if kept:
        kept.write_text(json.dumps({"costs": asdict(costs), "lives": [*map(asdict, lives)]}))
    text = page(costs, lives)
    print(text)
    if options.write:
        write_between(options.write, BEGIN, END, text)


if __name__ == "__main__":
    main()
