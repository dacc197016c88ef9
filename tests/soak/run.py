"""A soak: a server under mixed traffic, then every answer held against the one computed alone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from seqserve.schemas import InfoResponse, ModelInfo
from tests.e2e.conftest import SEQSERVE, Server
from tests.soak.alone import Judge, Oracle
from tests.soak.ledger import ROUNDING_ALLOWED, Ledger, footprint_faults, idle_faults
from tests.soak.process import MIB, Footprint
from tests.soak.restarts import Interrupted, restarts
from tests.soak.serving import (
    ENCODER_CACHE,
    NO_ENCODER_CACHE,
    PLACES,
    address,
    arguments,
    info_of,
    started,
)
from tests.soak.traffic import Call, Question, Traffic
from tests.soak.wire import Caller, make_all

logger = logging.getLogger(__name__)

QUARTER = 0.25
"""Of the requests: one warms up; then memory is compared between the next and the last."""

WARM_UP = 4000
"""Requests, at least, until a process has seen the shapes, and its allocator has what it needs."""

SETTLING = 10.0
"""Seconds for the last rows of callers who left to go, and for their sockets."""

EVERY_PLACE = "every place"
"""The kind of a request that needs all places in a queue."""

GLANCE = 0.05
"""Seconds between two looks."""

QUICK = 60.0
"""Seconds in which a server without work ends; its grace period is longer."""


@dataclass
class Compared:
    """Answers held against those computed alone.

    Attributes:
        answers: how many, of how many different questions.
        alone: inputs that were computed alone.
        rounding: what differed by rounding, with how often.
        wrong: what differed otherwise.
    """

    answers: int = 0
    questions: int = 0
    alone: int = 0
    rounding: list[tuple[str, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def rounding_cases(self) -> int:
        return sum(times for _, times in self.rounding)

    @property
    def faults(self) -> list[str]:
        """Promises that these figures break."""
        found = [f"not the answer alone: {fault}" for fault in self.wrong]
        if self.rounding_cases > ROUNDING_ALLOWED * self.answers:
            found.append(f"{self.rounding_cases} of {self.answers} answers differ by rounding")
        return found


@dataclass
class Report:
    """All figures of a soak.

    Attributes:
        start, warm, end: footprints of the idle server: when it was ready, after the second quarter
            of the requests, after the last one. Memory is the most of the second and of the last
            quarter: an allocator gives some back now and then.
        ending: seconds that the idle server took to end on SIGTERM.
        busiest: most rows in one step, of each model.
        left_over: rows in use and inputs waiting at the end.
    """

    seed: int
    requests: int
    models: list[str]
    ledger: Ledger
    start: Footprint
    warm: Footprint
    end: Footprint
    seconds: float
    ending: float
    busiest: dict[str, int]
    left_over: list[str]
    compared: Compared = field(default_factory=Compared)
    terminated: Interrupted = field(default_factory=Interrupted)
    killed: Interrupted = field(default_factory=Interrupted)

    @property
    def warmed_up(self) -> bool:
        """Whether the first quarter was long enough to judge memory by."""
        return QUARTER * self.requests >= WARM_UP

    @property
    def broken(self) -> list[str]:
        """Every promise that was broken; empty if all held."""
        return [
            *self.ledger.broken,
            *footprint_faults(self.start, self.warm, self.end, warm=self.warmed_up),
            *self.compared.faults,
            *(f"SIGTERM: {fault}" for fault in self.terminated.broken),
            *(f"SIGKILL: {fault}" for fault in self.killed.broken),
        ]


async def soak(models: dict[str, Path], requests: int, seed: int) -> Report:
    """Run all of it."""
    soaked = arguments(models, ENCODER_CACHE)
    judge = Judge(models)
    report = await under_traffic(soaked, requests, seed)
    with started(*arguments(models, NO_ENCODER_CACHE)) as server:
        report.compared = await compare(report.ledger, Oracle(*address(server)), judge)
    report.killed, report.terminated = await restarts(soaked, seed, judge)
    return report


# --- the traffic ---------------------------------------------------------------------------------


async def under_traffic(
    words: Sequence[str], requests: int, seed: int, program: tuple[str, ...] = SEQSERVE
) -> Report:
    """The requests themselves, and what the server is like behind them.

    Args:
        words: arguments of the command line.
        program: what Python runs.
    """
    with started(*words, program=program) as server:
        pid, info, ledger = server.process.pid, info_of(server), Ledger()
        traffic = Traffic(seed, requests, info.models, info.limits)
        start, prints, done, began = (
            Footprint.of(pid),
            list[tuple[int, Footprint]](),
            0,
            time.monotonic(),
        )
        for wave in traffic.waves():
            for call, reply in await make_all(*address(server), wave):
                ledger.take(call, reply)
            await _settle(server, ledger)
            done += len(wave.calls)
            prints.append((done, Footprint.of(pid)))
            logger.info("%d of %d requests, %.1f MiB", done, requests, prints[-1][1].rss / MIB)
        seconds = time.monotonic() - began
        warm = _most(_quarter(prints, 2, requests) or [prints[0][1]])
        end = _most(_quarter(prints, 4, requests))
        end = replace(end, files=await _settled_files(pid, warm.files))
        info = info_of(server)
        busiest = {m.name: m.batches.max_rows if m.batches else 0 for m in info.models}
        await _fill_the_queue(server, ledger, info.models)
        return Report(
            seed,
            requests,
            [model.name for model in info.models],
            ledger,
            start,
            warm,
            end,
            seconds,
            await _end(server, ledger),
            busiest,
            idle_faults(info),
        )


async def _until(settled: Callable[[], bool]) -> None:
    """Look at another process until it has settled, or time is up."""
    for _ in range(round(SETTLING / GLANCE)):
        if settled():
            return
        await asyncio.sleep(GLANCE)


async def _settle(server: Server, ledger: Ledger) -> None:
    """Wait until the server has nothing in hand."""
    info: InfoResponse | None = None

    def idle() -> bool:
        nonlocal info
        info = info_of(server)
        return not idle_faults(info)

    await _until(idle)
    assert info
    ledger.broken += idle_faults(info)


def _quarter(
    prints: Sequence[tuple[int, Footprint]], number: int, requests: int
) -> list[Footprint]:
    """Those taken in a quarter of the requests, counted from 1."""
    first, last = (QUARTER * n * requests for n in (number - 1, number))
    return [each for done, each in prints if first < done <= last]


def _most(prints: Sequence[Footprint]) -> Footprint:
    """The last of them, with the most memory of all."""
    return replace(prints[-1], rss=max(each.rss for each in prints))


async def _settled_files(pid: int, before: int) -> int:
    """Open files, once the sockets of the last callers are closed."""
    await _until(lambda: Footprint.of(pid).files <= before)
    return Footprint.of(pid).files


async def _fill_the_queue(server: Server, ledger: Ledger, models: Sequence[ModelInfo]) -> None:
    """A request that needs every place in a model's queue is served: none is taken for ever."""
    caller = Caller(*address(server))
    for number, model in enumerate(models):
        body = {
            "model": model.name,
            "inputs": ["all"] * PLACES,
            "parameters": {"max_new_tokens": 1},
        }
        question = Question(EVERY_PLACE, "/generate", body)
        call = Call(
            -1 - number,
            question.kind,
            "POST",
            question.path,
            frozenset({200}),
            question.encoded,
            question=question,
        )
        ledger.take(call, await caller.make(call))
    caller.close()


async def _end(server: Server, ledger: Ledger) -> float:
    """SIGTERM to an idle server; the seconds until it has ended."""
    began = time.monotonic()
    status = await asyncio.to_thread(server.stop)
    seconds = time.monotonic() - began
    if status:
        ledger.broken.append(f"exit status {status} behind SIGTERM")
    if seconds > QUICK:
        ledger.broken.append(f"without work, the server took {seconds:.1f} s to end")
    ledger.broken += [f"in the log: {line.strip()}" for line in server.log if _is_trouble(line)]
    return seconds


def _is_trouble(line: str) -> bool:
    return "ERROR" in line or "Traceback" in line


# --- the comparison ------------------------------------------------------------------------------


async def compare(ledger: Ledger, oracle: Oracle, judge: Judge) -> Compared:
    """Every answer of status 200 with the one computed alone."""
    compared = Compared(questions=len(ledger.questions))
    for key, entry in ledger.questions.items():
        alone = await oracle.answer(entry.question)
        for digest, served in entry.answers.items():
            times = entry.counts[digest]
            compared.answers += times
            verdict = judge.compare(entry.question, alone, served)
            if verdict.rounding:
                compared.rounding.append((f"{key}: {verdict.rounding}", times))
            if verdict.wrong:
                compared.wrong.append(f"{key}: {verdict.wrong}")
    compared.alone = oracle.asked
    return compared
