"""The book of a soak: what every call came to, and every promise that was broken."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from seqserve.errors import ERRORS
from seqserve.schemas import InfoResponse
from tests.soak.answers import UnreadableError, events, parts, with_the_seed_drawn
from tests.soak.process import Footprint
from tests.soak.traffic import Call, Question
from tests.soak.wire import Reply

LEFT = "left"
"""Stands where a status would: the caller did not wait for one."""

GROWTH_ALLOWED = 0.05
"""Of the memory in use after warm-up."""

WORKERS_ALLOWED = min(32, (os.cpu_count() or 1) + 4)
"""Threads of Python's own pool, which come one by one as they are needed."""

ROUNDING_ALLOWED = 0.001
"""Of the answers compared."""

ENVELOPE = {"error", "error_type", "param", "request_id"}


@dataclass
class Tally:
    """Calls of one kind: how many came to which status, and their seconds."""

    statuses: Counter[int | str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)


@dataclass
class Answered:
    """A question, and the different answers that it got, each with how often."""

    question: Question
    answers: dict[str, list[Any]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


@dataclass
class Ledger:
    """Takes calls and what became of them.

    Attributes:
        broken: promises that were broken, in words.
        late: seconds by which answers of status 504 came after their deadline.
        questions: those with an answer to compare, by key.
    """

    kinds: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    broken: list[str] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    questions: dict[str, Answered] = field(default_factory=dict)

    def take(self, call: Call, reply: Reply) -> None:
        """Enter a call, and hold it against what was promised."""
        outcome: int | str = LEFT
        try:
            if reply.fate != LEFT:
                outcome = _status(call, reply)
                _check(call, reply, outcome)
        except BrokenPromiseError as error:
            outcome = error.outcome
            self.broken.append(f"call {call.number} ({call.kind}, {call.path}): {error}")
        tally = self.kinds[call.kind]
        tally.statuses[outcome] += 1
        tally.seconds.append(reply.seconds)
        if outcome == 504 and call.timeout is not None:
            self.late.append(reply.seconds - call.timeout)
        if outcome == 200 and call.question:
            self._keep(call, reply)

    def _keep(self, call: Call, reply: Reply) -> None:
        question = call.question
        assert question
        try:
            answer = parts(question, reply)
        except UnreadableError as error:
            self.broken.append(f"call {call.number} ({call.kind}, {call.path}): {error}")
            return
        if not call.compared:
            return
        question = with_the_seed_drawn(question, answer)
        entry = self.questions.setdefault(question.key, Answered(question))
        digest = hashlib.sha256(json.dumps(answer).encode()).hexdigest()
        entry.answers.setdefault(digest, answer)
        entry.counts[digest] += 1

    def total(self, outcome: int | str | None = None) -> int:
        """Calls that came to a status; None: all of them."""
        tallies = self.kinds.values()
        return sum(t.statuses.total() if outcome is None else t.statuses[outcome] for t in tallies)

    @property
    def seconds(self) -> list[float]:
        """Of all calls that were answered with 200 or refused."""
        return [s for kind, t in self.kinds.items() if LEFT not in kind for s in t.seconds]


class BrokenPromiseError(Exception):
    """What the server did with a call is not what it promises.

    Args:
        outcome: status, or fate, that the call came to.
    """

    def __init__(self, message: str, outcome: int | str) -> None:
        super().__init__(message)
        self.outcome = outcome


def _status(call: Call, reply: Reply) -> int:
    """The status, also of an error that came as the last event of a stream."""
    if reply.fate != "answered" or reply.status is None:
        raise BrokenPromiseError(
            f"{reply.fate} after {reply.seconds:.1f} s {reply.reason}".rstrip(), reply.fate
        )
    if reply.status != 200 or not (call.question and call.question.streamed):
        return reply.status
    try:
        told = events(reply.body)
    except ValueError as error:
        raise BrokenPromiseError(str(error), "lost") from error
    if not told or "error" not in told[-1]:
        return 200
    return ERRORS[told[-1]["error_type"]].usual_status


def _check(call: Call, reply: Reply, status: int) -> None:
    if reply.surplus:
        raise BrokenPromiseError(f"more than one answer: {reply.surplus[:80]!r}", status)
    if (echo := reply.headers.get("x-request-id")) != call.request_id:
        raise BrokenPromiseError(f"the answer is that of {echo}", status)
    if status not in call.statuses:
        raise BrokenPromiseError(f"status {status}: {reply.body[:200]!r}", status)
    if status == 429 and not float(reply.headers.get("retry-after", 0)) > 0:
        raise BrokenPromiseError("status 429 without Retry-After", status)
    if reply.status != 200:
        _check_envelope(call, reply, status)


def _check_envelope(call: Call, reply: Reply, status: int) -> None:
    try:
        envelope = json.loads(reply.body)
        kind = ERRORS[envelope["error_type"]]
    except (ValueError, KeyError) as error:
        raise BrokenPromiseError(f"no envelope: {reply.body[:200]!r}", status) from error
    if envelope.keys() != ENVELOPE or envelope["request_id"] != call.request_id:
        raise BrokenPromiseError(f"another envelope: {envelope}", status)
    if status not in (kind.usual_status, 400):
        raise BrokenPromiseError(f"{envelope['error_type']} with status {status}", status)
    if call.param != envelope["param"] and status == reply.status and status in (404, 422):
        raise BrokenPromiseError(f"{envelope['param']} named, not {call.param}", status)


# --- the server as a whole -----------------------------------------------------------------------


def idle_faults(info: InfoResponse) -> list[str]:
    """What a server that nobody uses still has in hand."""
    return [
        f"model {model.name} has {model.running} rows in use and {model.waiting} waiting"
        for model in info.models
        if model.running or model.waiting
    ]


def growth(before: Footprint, end: Footprint) -> float:
    """Of the memory, as a share of what was in use before."""
    return end.rss / before.rss - 1


def footprint_faults(
    start: Footprint, before: Footprint, end: Footprint, *, warm: bool
) -> list[str]:
    """Where a process takes more than it did when it was ready, or some time later.

    Args:
        warm: whether it had its memory by then.
    """
    found = []
    if warm and growth(before, end) > GROWTH_ALLOWED:
        found.append(f"memory grew by {growth(before, end):.1%} after warm-up")
    if end.files > before.files:
        found.append(f"open files grew from {before.files} to {end.files}")
    if end.threads > start.threads + WORKERS_ALLOWED:
        found.append(f"threads grew from {start.threads} to {end.threads}")
    return found
