"""A server that is told to end, or killed, while callers are at it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.soak.alone import Judge
from tests.soak.ledger import Ledger
from tests.soak.serving import Server, address, info_of, started
from tests.soak.traffic import Call, Traffic
from tests.soak.wire import Caller, Reply

CALLERS = 24

UNDER_LOAD = 2 * CALLERS
"""Calls that have been answered when the signal comes."""

PROMPT = 10.0
"""Seconds within which a caller must know that its server was killed."""


@dataclass
class Interrupted:
    """What became of the calls around a signal.

    Attributes:
        before: calls that had their answer when it came.
        answered: calls under way that were answered all the same.
        refused: calls under way that got an error (status 503).
        lost: calls under way whose connection broke off.
        after: calls made after it, answered with 503 or not let in; each caller makes one at most.
        seconds: until the process had ended.
        again: questions answered by the restarted server, as before the signal.
    """

    before: int = 0
    answered: int = 0
    refused: int = 0
    lost: int = 0
    after: int = 0
    seconds: float = 0.0
    again: int = 0
    broken: list[str] = field(default_factory=list)


@dataclass
class Load:
    """Callers that go on until they are turned away.

    Attributes:
        under_way: set when `UNDER_LOAD` calls have been made, or no more will be.
    """

    host: str
    port: int
    calls: Iterator[Call]
    made: list[tuple[Call, Reply]] = field(default_factory=list)
    under_way: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        await asyncio.gather(*(self._work() for _ in range(CALLERS)))
        self.under_way.set()  # turned away before it could begin

    async def _work(self) -> None:
        caller = Caller(self.host, self.port)
        welcome = True
        while welcome:
            call = next(self.calls)
            reply = await caller.make(call)
            self.made.append((call, reply))
            if len(self.made) >= UNDER_LOAD:
                self.under_way.set()
            welcome = reply.status == 200
        caller.close()


async def interrupted(
    server: Server, traffic: Traffic, number: signal.Signals
) -> tuple[Interrupted, list[tuple[Call, Reply]]]:
    """Send a signal to a busy server; the calls that were answered before it."""
    load = Load(*address(server), traffic.plain_calls())
    callers = asyncio.create_task(load.run())
    await load.under_way.wait()
    moment = time.monotonic()
    server.process.send_signal(number)
    status = await asyncio.to_thread(server.wait)
    found = Interrupted(seconds=time.monotonic() - moment)
    await callers
    expected = 0 if number == signal.SIGTERM else -number
    if status != expected:
        found.broken.append(f"{number.name}: exit status {status}")
    for call, reply in load.made:
        enter(found, moment, call, reply, killed=number == signal.SIGKILL)
    before = [(c, r) for c, r in load.made if r.began + r.seconds < moment]
    return found, before


def enter(found: Interrupted, moment: float, call: Call, reply: Reply, killed: bool) -> None:
    """Count a call, and say where more was lost than may be."""
    fault = f"call {call.number} ({call.kind}): {reply.fate} {reply.status} {reply.reason}"
    if reply.began + reply.seconds < moment:
        found.before += 1
        fine = reply.status == 200
    elif reply.began > moment:
        found.after += 1
        fine = reply.fate == "lost" or reply.status in (200, 503)
    elif reply.fate == "answered":
        found.answered += reply.status == 200
        found.refused += reply.status == 503
        fine = reply.status in (200, 503)
    else:
        found.lost += 1
        fine = killed and reply.fate == "lost" and reply.began + reply.seconds < moment + PROMPT
    if not fine:
        found.broken.append(fault)


async def restarts(
    arguments: Sequence[str], seed: int, judge: Judge
) -> tuple[Interrupted, Interrupted]:
    """SIGKILL, a start on the same port, SIGTERM: what became of the calls around either signal."""
    with started(*arguments) as server:
        _, port = address(server)
        killed, before = await interrupted(server, _traffic(server, seed), signal.SIGKILL)
    with started(*arguments, "--port", str(port)) as server:
        await _ask_again(server, before, killed, judge)
        terminated, _ = await interrupted(server, _traffic(server, seed), signal.SIGTERM)
    return killed, terminated


async def _ask_again(
    server: Server, before: Sequence[tuple[Call, Reply]], found: Interrupted, judge: Judge
) -> None:
    """The restarted server answers what the killed one did."""
    ledger, caller = Ledger(), Caller(*address(server))
    for call, reply in before:
        again = await caller.make(call)
        for each in (reply, again):
            ledger.take(call, each)
        found.again += again.status == 200
    caller.close()
    found.broken += ledger.broken
    for entry in ledger.questions.values():
        first, *others = entry.answers.values()
        verdicts = [judge.compare(entry.question, first, other) for other in others]
        found.broken += [f"{entry.question.key}: {v.wrong}" for v in verdicts if v.wrong]


def _traffic(server: Server, seed: int) -> Traffic:
    info = info_of(server)
    return Traffic(seed, requests=0, models=info.models, limits=info.limits)
