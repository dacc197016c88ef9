"""Replicas in numbers: a discrete-event simulation of requests, routing and decoding steps.

What it knows of the real thing: requests come at given times and want so many tokens each; a router
hands each to the less busy of two replicas drawn at random, as Ray's does; a replica decodes up to
`max_rows` of them side by side, a token of each a step, and takes others in between steps. A step
takes as long as `StepTime` says. What is not in it: padding, lengths of sources, memory.

Replicas have a core each, or share some cores evenly, which is a queue of processor sharing.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from benchmarks.load import target_length

RETRY = 1.0
"""Seconds after which a request that was lost, or found no replica, is sent again: what the server
tells callers to wait."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: `base + row * rows + source * sources that join`."""

    base: float
    row: float
    source: float = 0.0

    def of(self, rows: int, joining: int = 0) -> float:
        return self.base + self.row * rows + self.source * joining

    def most(self, max_rows: int, tokens: float) -> float:
        """Requests a second of a replica that always has full rows.

        Args:
            tokens: of a request, on average.
        """
        return 1.0 / (self.of(max_rows) * tokens / max_rows + self.source)


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes (seconds), and how many tokens it wants."""

    at: float
    tokens: int


@dataclass(frozen=True)
class Loss:
    """A replica ends, with what it has begun.

    Attributes:
        back: seconds until another one takes its place.
    """

    at: float
    back: float


@dataclass(frozen=True)
class Cores:
    """From a time on, so many cores are shared."""

    at: float
    number: float


@dataclass(frozen=True)
class Cluster:
    """What serves.

    Attributes:
        elsewhere: seconds of work a request before it reaches a replica: callers and proxies.
        cores: that all work shares; without end, each replica and each request in a proxy has one.
    """

    step: StepTime
    replicas: int = 1
    max_rows: int = 64
    elsewhere: float = 0.0
    cores: float = math.inf


@dataclass
class Outcome:
    """What became of a request.

    Attributes:
        at: when it came, in seconds.
        seconds: until it was answered, retries included.
    """

    at: float
    seconds: float


@dataclass
class _Request:
    arrival: Arrival
    left_at: int = 0  # the step of its replica after which it has all its tokens


@dataclass(eq=False)
class _Replica:
    lost: bool = False
    steps: int = 0
    stepping: bool = False
    waiting: deque[_Request] = field(default_factory=deque)
    rows: list[tuple[int, int, _Request]] = field(default_factory=list)  # heap: soonest to leave

    @property
    def busy(self) -> int:
        """Requests under way, which is what the router goes by."""
        return len(self.waiting) + len(self.rows)


Change = Loss | Cores
Task = _Request | _Replica
"""What takes a core: callers and proxies that handle a request, or a replica that makes a step."""


class Shared:
    """Tasks that share cores evenly.

    A clock that runs at the speed of each task orders them all: a task that comes when it shows v
    and needs w seconds of a core ends when it shows v + w.
    """

    def __init__(self, cores: float) -> None:
        self.cores = cores
        self._shown = 0.0
        self._now = 0.0
        self._tasks: list[tuple[float, int, Task]] = []
        self._order = count()

    @property
    def _speed(self) -> float:
        return min(1.0, self.cores / max(1, len(self._tasks)))

    @property
    def next_end(self) -> float:
        """When the next task ends, if nothing else comes."""
        if not self._tasks:
            return math.inf
        return self._now + (self._tasks[0][0] - self._shown) / self._speed

    def advance(self, now: float) -> None:
        """Let time pass."""
        self._shown += (now - self._now) * self._speed
        self._now = now

    def start(self, seconds: float, task: Task) -> None:
        heapq.heappush(self._tasks, (self._shown + seconds, next(self._order), task))

    def pop(self) -> Task:
        """The task that ends now."""
        ends, _, task = heapq.heappop(self._tasks)
        self._shown = ends
        return task


class Simulation:
    """One run: `Simulation(cluster, seed).run(arrivals)`.

    Attributes:
        step_seconds: of a core that all steps took.
    """

    def __init__(self, cluster: Cluster, seed: int = 0) -> None:
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._up = [_Replica() for _ in range(cluster.replicas)]
        self._cores = Shared(cluster.cores)
        self._events: list[tuple[float, int, _Request | Change | _Replica]] = []
        self._order = count()
        self._now = 0.0
        self._outcomes: list[Outcome] = []
        self.step_seconds = 0.0

    def run(self, arrivals: Sequence[Arrival], changes: Sequence[Change] = ()) -> list[Outcome]:
        """Until all requests are answered, in the order of their answers."""
        for arrival in arrivals:
            self._later(arrival.at, _Request(arrival))
        for change in changes:
            self._later(change.at, change)
        while len(self._outcomes) < len(arrivals):
            event_at = self._events[0][0] if self._events else math.inf
            self._now = min(event_at, self._cores.next_end)
            self._cores.advance(self._now)
            if event_at <= self._now:
                self._happen(heapq.heappop(self._events)[2])
            else:
                self._end(self._cores.pop())
        return self._outcomes

    def _later(self, at: float, event: _Request | Change | _Replica) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    def _happen(self, event: _Request | Change | _Replica) -> None:
        match event:
            case _Request():
                self._cores.start(self._cluster.elsewhere, event)
            case Loss():
                self._lose(event)
            case Cores():
                self._cores.cores = event.number
            case _Replica():
                self._up.append(event)

    def _end(self, task: Task) -> None:
        if isinstance(task, _Request):
            self._route(task)
        elif not task.lost:
            self._leave(task)
            self._begin_step(task)

    def _route(self, request: _Request) -> None:
        if not self._up:
            self._later(self._now + RETRY, request)
            return
        drawn = self._rng.sample(self._up, min(2, len(self._up)))
        replica = min(drawn, key=lambda each: each.busy)
        replica.waiting.append(request)
        if not replica.stepping:
            self._begin_step(replica)

    def _begin_step(self, replica: _Replica) -> None:
        joining = min(len(replica.waiting), self._cluster.max_rows - len(replica.rows))
        for _ in range(joining):
            request = replica.waiting.popleft()
            request.left_at = replica.steps + request.arrival.tokens
            heapq.heappush(replica.rows, (request.left_at, next(self._order), request))
        replica.stepping = bool(replica.rows)
        if replica.rows:
            seconds = self._cluster.step.of(len(replica.rows), joining)
            self.step_seconds += seconds
            self._cores.start(seconds, replica)

    def _leave(self, replica: _Replica) -> None:
        replica.steps += 1
        while replica.rows and replica.rows[0][0] <= replica.steps:
            arrival = heapq.heappop(replica.rows)[2].arrival
            self._outcomes.append(Outcome(arrival.at, self._now - arrival.at))

    def _lose(self, loss: Loss) -> None:
        if not self._up:
            return
        replica = self._up.pop(0)
        replica.lost = True
        for request in [*replica.waiting, *(row[2] for row in replica.rows)]:
            self._later(self._now + RETRY, request)
        self._later(self._now + loss.back, _Replica())


def poisson(rate: float, seconds: float, seed: int = 0) -> list[Arrival]:
    """Requests as they come by chance, with the targets of `benchmarks.load`."""
    return list(_poisson(rate, seconds, random.Random(seed)))


def _poisson(rate: float, seconds: float, rng: random.Random) -> Iterator[Arrival]:
    at = rng.expovariate(rate)
    while at < seconds:
        yield Arrival(at, target_length(rng))
        at += rng.expovariate(rate)


def percentile(seconds: Sequence[float], share: float) -> float:
    """The smallest of these that `share` of them, in percent, do not exceed."""
    return sorted(seconds)[math.ceil(share / 100 * len(seconds)) - 1]
