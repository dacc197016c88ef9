"""Plan capacity: `python -m benchmarks.capacity`.

Measures what an engine's steps cost on this machine, and simulates replicas with these costs:
requests arrive at random, go to a replica as Ray Serve sends them (the one with fewer under way of
two drawn), join its batch between two steps, and leave it when they have their tokens. What is
simulated has three costs and nothing else:

    step(rows)    = step_base + step_row * rows        one position for all rows
    join(sources) = join_base + join_source * sources  encoding those that join
    request       = overhead of HTTP, tokenising and Ray, in the replica's process

`--check URL` puts the simulation beside a deployment that runs: same replicas, same arrivals.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count

import numpy as np
import torch

from benchmarks.load import Figures, Request, call
from model.config import EngineConfig
from model.engine import Engine
from model.loader import LoadedModel, load_model
from model.sequence import Decoding
from model.sequence import Sequence as Row
from service.settings import DEFAULT_MODEL

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Batches whose steps are timed."""

STEPS = 12
"""Timed in each batch: the shipped model's answers are hardly longer."""

SAMPLE = DEFAULT_MODEL / "dev-sample.tsv"

RATES = (10, 100, 1_000, 10_000)
P99S = (0.1, 0.25, 1.0)

CHECK_SECONDS = 20.0
"""How long a deployment is asked at each rate."""

ALONE = 40
"""Requests, one after the other, from which a request's overhead is taken."""

REPEATS = 3
"""Of every batch, interleaved; the median counts."""


@dataclass(frozen=True)
class Costs:
    """Seconds that a replica spends, see the module."""

    step_base: float
    step_row: float
    join_base: float
    join_source: float
    request: float

    def step(self, rows: int) -> float:
        """One position for all rows."""
        return self.step_base + self.step_row * rows

    def join(self, sources: int) -> float:
        """Encoding sources; none cost nothing."""
        return self.join_base + self.join_source * sources if sources else 0.0

    def most(self, tokens: float, rows: int) -> float:
        """Requests a second that one replica can do with so many rows at a time."""
        per_request = tokens * self.step(rows) / rows + self.join(rows) / rows + self.request
        return 1.0 / per_request


# --- measuring -----------------------------------------------------------------------------------


def measure(loaded: LoadedModel, words: Sequence[str]) -> Costs:
    """What steps and joins cost here; a request's overhead is left at 0."""
    timed: dict[int, list[tuple[float, float]]] = {rows: [] for rows in ROWS}
    for _ in range(REPEATS):
        for rows in ROWS:
            timed[rows].append(_batch(loaded, words[:rows]))
    joins = [statistics.median(join for join, _ in timed[rows]) for rows in ROWS]
    steps = [statistics.median(step for _, step in timed[rows]) for rows in ROWS]
    step_row, step_base = np.polyfit(ROWS, steps, 1)
    join_row, join_base = np.polyfit(ROWS, joins, 1)
    # The first step of a batch joins and decodes.
    return Costs(
        step_base=float(step_base),
        step_row=float(step_row),
        join_base=max(0.0, float(join_base - step_base)),
        join_source=max(0.0, float(join_row - step_row)),
        request=0.0,
    )


def _batch(loaded: LoadedModel, words: Sequence[str]) -> tuple[float, float]:
    """Seconds of a batch's first step, and of each one after it."""
    engine = Engine(loaded, EngineConfig(max_encoder_cache_bytes=0))
    assert loaded.source_tokenizer
    decoding = Decoding(max_new_tokens=STEPS + 2, min_new_tokens=STEPS + 2)
    for ids in loaded.source_tokenizer.encode(list(words)):
        engine.submit(Row(list(ids), list(loaded.spec.decoder_start_ids), decoding))
    began = time.process_time()  # of one thread: what else the machine does is left out
    engine.step()
    joined = time.process_time()
    for _ in range(STEPS):
        engine.step()
    return joined - began, (time.process_time() - joined) / STEPS


# --- simulating ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What is simulated.

    Attributes:
        replicas: how many.
        cores: that they share; a replica computes on one.
        max_rows: of each.
        lost_at, back_at: when one replica ends with all it has, and when another one takes its
            place, in seconds; what it had is asked again after `pause`.
    """

    replicas: int
    cores: int
    max_rows: int = 64
    lost_at: float = math.inf
    back_at: float = math.inf
    pause: float = 1.0


@dataclass
class Replica:
    """Requests that wait, requests in rows with the tokens that each still wants."""

    up: bool = True
    busy: bool = False
    life: int = 0
    waiting: deque[int] = field(default_factory=deque)
    rows: dict[int, int] = field(default_factory=dict)

    @property
    def under_way(self) -> int:
        return len(self.waiting) + len(self.rows)

    def emptied(self) -> list[int]:
        """What it had when it ended."""
        had = [*self.waiting, *self.rows]
        self.waiting.clear()
        self.rows.clear()
        return had


class Simulation:
    """Replicas in simulated time.

    Args:
        made: the requests.

    Attributes:
        latencies: of each request, by its number.
    """

    def __init__(self, plan: Plan, costs: Costs, made: Sequence[Request], seed: int = 0) -> None:
        self.plan = plan
        self.costs = costs
        self.made = made
        self.latencies: dict[int, float] = {}
        self._replicas = [Replica() for _ in range(plan.replicas)]
        self._random = random.Random(seed)
        self._order = count()
        self._busy = 0
        self._events: list[tuple[float, int, str, int, int]] = []
        for number, request in enumerate(made):
            self._at(request.at, "arrive", number)
        self._at(plan.lost_at, "lose", 0)
        self._at(plan.back_at, "return", 0)

    def run(self) -> Figures:
        """Until every request has its answer."""
        now = 0.0
        while len(self.latencies) < len(self.made):
            now, _, kind, number, life = heapq.heappop(self._events)
            if kind == "arrive":
                self._arrive(now, number)
            elif kind == "step":
                self._end_step(now, number, life)
            elif kind == "lose":
                self._lose(now, number)
            else:
                self._replicas[number].up = True
        return figures(self.made, self.latencies, now)

    def _at(self, when: float, kind: str, number: int, life: int = 0) -> None:
        heapq.heappush(self._events, (when, next(self._order), kind, number, life))

    def _arrive(self, now: float, request: int) -> None:
        drawn = [self._draw(), self._draw()]
        place = min(drawn, key=lambda each: self._replicas[each].under_way)
        self._replicas[place].waiting.append(request)
        self._begin_step(now, place)

    def _draw(self) -> int:
        """A replica that is up."""
        while True:
            place = self._random.randrange(len(self._replicas))
            if self._replicas[place].up:
                return place

    def _begin_step(self, now: float, place: int) -> None:
        replica = self._replicas[place]
        if replica.busy or not replica.under_way:
            return
        joining = min(len(replica.waiting), self.plan.max_rows - len(replica.rows))
        for _ in range(joining):
            request = replica.waiting.popleft()
            replica.rows[request] = self.made[request].tokens
        replica.busy = True
        seconds = self.costs.join(joining) + self.costs.request * joining
        seconds += self.costs.step(len(replica.rows))
        self._busy += 1
        seconds *= max(1.0, self._busy / self.plan.cores)
        self._at(now + seconds, "step", place, replica.life)

    def _end_step(self, now: float, place: int, life: int) -> None:
        replica = self._replicas[place]
        if life != replica.life:  # it ended in the meantime
            return
        replica.busy = False
        self._busy -= 1
        for request in list(replica.rows):
            replica.rows[request] -= 1
            if not replica.rows[request]:
                del replica.rows[request]
                self.latencies[request] = now - self.made[request].at
        self._begin_step(now, place)

    def _lose(self, now: float, place: int) -> None:
        replica = self._replicas[place]
        self._busy -= replica.busy
        replica.up, replica.busy = False, False
        replica.life += 1
        for request in replica.emptied():
            self._at(now + self.plan.pause, "arrive", request)


def figures(made: Sequence[Request], latencies: dict[int, float], wall: float) -> Figures:
    """As callers see them."""
    ranked = sorted(latencies.values())
    p99 = ranked[math.ceil(0.99 * len(ranked)) - 1]
    tokens = sum(request.tokens for request in made)
    return Figures(tokens / wall, ranked[len(ranked) // 2], p99)


# --- the shipped model's traffic -----------------------------------------------------------------


def traffic(loaded: LoadedModel, number: int, rate: float, seed: int) -> list[Request]:
    """Words of the model's dev sample, as long as their pronunciations, at random times."""
    draw = random.Random(seed)
    pairs = [line.split("\t") for line in SAMPLE.read_text().splitlines()]
    assert loaded.source_tokenizer
    sources = loaded.source_tokenizer.encode([word for word, _ in pairs])
    made, at = [], 0.0
    for _ in range(number):
        place = draw.randrange(len(pairs))
        tokens = min(len(pairs[place][1].split()) + 1, loaded.spec.max_tgt - 1)
        made.append(Request(sources[place], tokens, at))
        at += draw.expovariate(rate)
    return made


def replicas_for(loaded: LoadedModel, costs: Costs, rate: float, p99: float) -> int:
    """The fewest replicas, each on a core of its own, that keep 99 of 100 answers within `p99`."""
    made = traffic(loaded, max(2000, round(2 * rate)), rate, seed=1)
    tokens = statistics.fmean(request.tokens for request in made)
    least = max(1, math.ceil(rate / costs.most(tokens, 64)))
    for more in count():
        replicas = least + math.ceil(more * least / 20)  # of hundreds, one does not matter
        if Simulation(Plan(replicas, replicas), costs, made).run().p99 <= p99:
            return replicas
    raise AssertionError


def tables(loaded: LoadedModel, costs: Costs) -> Iterator[str]:
    """What operators ask."""
    tokens = statistics.fmean(request.tokens for request in traffic(loaded, 2000, 1.0, seed=1))
    yield "| rows of a full batch | time of a step | requests a second of one replica |"
    yield "|---|---|---|"
    for rows in ROWS:
        step = 1e3 * costs.step(rows)
        yield f"| {rows} | {step:.1f} ms | {costs.most(tokens, rows):,.0f} |"
    yield ""
    yield "| requests a second | " + " | ".join(f"p99 of {p99:g} s" for p99 in P99S) + " |"
    yield "|---" * (1 + len(P99S)) + "|"
    for rate in RATES:
        cells = [f"{replicas_for(loaded, costs, rate, p99)} replicas" for p99 in P99S]
        yield f"| {rate:,} | {' | '.join(cells)} |"
    yield ""
    yield "| replicas, each at 60 % of what it can do | p99 | p99 around the loss of one for 30 s |"
    yield "|---|---|---|"
    for replicas in (2, 3, 4, 8):
        rate = 0.6 * replicas * costs.most(tokens, 64)
        made = traffic(loaded, round(90 * rate), rate, seed=2)
        whole = Simulation(Plan(replicas, replicas), costs, made).run()
        plan = Plan(replicas, replicas, lost_at=30.0, back_at=60.0)
        lossy = Simulation(plan, costs, made).run()
        yield f"| {replicas} | {1e3 * whole.p99:,.0f} ms | {1e3 * lossy.p99:,.0f} ms |"


def check(url: str, loaded: LoadedModel, costs: Costs, plan: Plan, rates: Sequence[float]) -> str:
    """The simulation beside a deployment, at the same arrivals."""
    lines = [
        "| requests a second | measured p50 / p99 | simulated p50 / p99 |",
        "|---|---|---|",
    ]
    for rate in rates:
        made = traffic(loaded, round(CHECK_SECONDS * rate), rate, seed=3)
        measured = asyncio.run(call(url, made, exact=True))
        simulated = Simulation(plan, costs, made).run()
        cells = [f"{1e3 * f.p50:,.0f} / {1e3 * f.p99:,.0f} ms" for f in (measured, simulated)]
        lines.append(f"| {rate:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def overhead(url: str, loaded: LoadedModel, costs: Costs) -> float:
    """Seconds that a request costs beside its steps: of one after the other, the median."""
    made = [replace(r, at=0.0) for r in traffic(loaded, ALONE, 1.0, seed=4)]
    left = []
    for request in made:
        seconds = asyncio.run(call(url, [request], exact=True)).p50
        left.append(seconds - costs.join(1) - request.tokens * costs.step(1))
    return max(0.0, statistics.median(left))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    parser.add_argument("--check", metavar="URL", help="a deployment with the shipped model")
    parser.add_argument("--replicas", type=int, default=2, help="that it has (%(default)s)")
    parser.add_argument("--cores", type=int, default=1, help="that they share (%(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=[5.0, 10.0, 20.0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_model(DEFAULT_MODEL, "cpu")
    words = [line.split("\t")[0] for line in SAMPLE.read_text().splitlines()]
    costs = measure(loaded, words)
    if options.check:
        costs = replace(costs, request=overhead(options.check, loaded, costs))
    print(json.dumps(asdict(costs)))
    if options.check:
        plan = Plan(options.replicas, options.cores)
        print(check(options.check, loaded, costs, plan, options.rates))
    print("\n".join(tables(loaded, costs)))


if __name__ == "__main__":
    main()
