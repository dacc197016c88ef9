"""Iteration-level (continuous) batching: one decoder position for all live rows a step.

The idea is Orca's (Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative
Models", OSDI 2022): sequences join and leave between steps instead of waiting for a batch to end.

`step()` is schedule -> run -> pick -> emit. One thread calls it; nothing here locks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import EngineConfig
from model.decoding import ProcessorBatch, finish_reason
from model.loader import LoadedModel
from model.sampler import pick
from model.scheduler import Scheduler
from model.sequence import (
    Candidate,
    Event,
    FailureEvent,
    Forward,
    ForwardEvent,
    Sequence,
    TokenEvent,
)


class GenerationError(RuntimeError):
    """One sequence or pass could not be computed."""


@dataclass(frozen=True)
class StepTrace:
    """What one step did.

    Attributes:
        step: counted from 0.
        rows: sequences decoded side by side.
        joined: those among them that came in with this step.
        left: those that ended with it.
        forwards: teacher-forced passes run.
    """

    step: int
    rows: tuple[Sequence, ...]
    joined: tuple[Sequence, ...]
    left: tuple[Sequence, ...]
    forwards: int


class Engine:
    """Decodes many sequences side by side and answers teacher-forced passes in between.

    Args:
        model: what to run.
        config: limits.
        on_step: told of every step, from the engine's thread.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        on_step: Callable[[StepTrace], None] | None = None,
    ) -> None:
        self.spec = model.spec
        self.config = config
        self.device = model.device
        self.stepper = model.stepper(config)
        self.scheduler = Scheduler(config)
        self._processors: ProcessorBatch | None = None
        self._on_step = on_step
        self._steps = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def waiting(self) -> int:
        """Sequences and passes that have not begun."""
        return self.scheduler.waiting

    @property
    def running(self) -> int:
        """Live rows."""
        return len(self.scheduler.rows)

    def submit(self, work: Sequence | Forward) -> None:
        """Queue work; its events come out of later steps.

        Raises:
            ValueError: it could never run within the engine's limits.
        """
        self.scheduler.submit(work)

    @torch.inference_mode()
    def cancel(self, work: Sequence | Forward) -> None:
        """Forget work at once, without an event; unknown or ended work is no error."""
        self.scheduler.cancel(work)
        if isinstance(work, Sequence) and work in self.scheduler.rows:
            self._remove([work])

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Admit what fits, run one chunk of passes, then one decoder position for all live rows."""
        plan = self.scheduler.schedule()
        events: list[Event] = []
        joined = self._join(plan.joining, events)
        if plan.forwards:
            events.extend(self._run_forwards(plan.forwards))
        rows = tuple(self.scheduler.rows)
        left = self._decode(rows, events) if rows else ()
        trace = StepTrace(self._steps, rows, joined, left, len(plan.forwards))
        self._steps += 1
        if self._on_step:
            self._on_step(trace)
        return events

    def run(self) -> Iterable[Event]:
        """Step until nothing is left: for use without a service."""
        while self.has_work:
            yield from self.step()

    # --- sequences -----------------------------------------------------------------------------

    def _join(self, joining: tuple[Sequence, ...], events: list[Event]) -> tuple[Sequence, ...]:
        if not joining:
            return ()
        self._processors = None
        try:
            self.stepper.join(joining)
        except Exception as error:  # noqa: BLE001  whatever it was, the rows that live go on
            return self._fail(joining, error, events)
        return joining

    def _decode(self, rows: tuple[Sequence, ...], events: list[Event]) -> tuple[Sequence, ...]:
        """One position for all rows; the ones that ended with it."""
        try:
            logits = self.stepper.step(rows)  # [rows, vocab]
        except Exception as error:  # noqa: BLE001  those who wait must still be served
            self._fail(rows, error, events)
            return rows
        if self._processors is None:
            self._processors = ProcessorBatch([row.decoding for row in rows], self.device)
        tokens = pick(self._processors(logits), rows)
        finite = logits.amax(dim=-1).isfinite().tolist()  # a NaN anywhere in a row shows here
        reports = Reports(logits, tokens, rows)
        left = []
        for i, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            event = self._commit(row, token, reports, i) if finite[i] else _not_finite(row)
            events.append(event)
            if isinstance(event, FailureEvent) or event.finish_reason:
                left.append(row)
        self._remove(left)
        return tuple(left)

    def _commit(self, row: Sequence, token: int, reports: Reports, i: int) -> TokenEvent:
        row.tokens.append(token)
        row.finish_reason = finish_reason(row, self.spec)
        return TokenEvent(
            sequence=row,
            index=len(row.tokens) - 1,
            token=token,
            logprob=reports.logprob(i),
            top_tokens=reports.top_tokens(i),
            finish_reason=row.finish_reason,
        )

    def _fail(
        self, rows: tuple[Sequence, ...], error: Exception, events: list[Event]
    ) -> tuple[Sequence, ...]:
        events.extend(FailureEvent(row, error) for row in rows)
        self._remove(rows)
        return ()

    def _remove(self, gone: Iterable[Sequence]) -> None:
        """Take rows out, from the tensors too; the last rows fill the holes."""
        leaving = set(map(id, gone))
        if not leaving:
            return
        rows = self.scheduler.rows
        kept = fill_holes(len(rows), {i for i, row in enumerate(rows) if id(row) in leaving})
        self.stepper.keep(kept)
        self.scheduler.rows = [rows[i] for i in kept]
        self._processors = None

    # --- teacher-forced passes -----------------------------------------------------------------

    def _run_forwards(self, forwards: tuple[Forward, ...]) -> list[Event]:
        try:
            return [
                ForwardEvent(forward, *_answer(logits.float(), forward.top_k))
                for forward, logits in zip(forwards, self.stepper.forward(forwards), strict=True)
            ]
        except Exception as error:  # noqa: BLE001  decoding goes on beside a pass that failed
            return [FailureEvent(forward, error) for forward in forwards]


def _answer(logits: Tensor, top_k: int | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What a pass reports of ``[positions, vocab]`` logits, on the CPU."""
    if top_k is None:
        return logits.cpu(), None, None
    values, ids = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    logprobs = values - logits.logsumexp(dim=-1, keepdim=True)
    return values.cpu(), ids.cpu(), logprobs.cpu()


def _not_finite(row: Sequence) -> FailureEvent:
    return FailureEvent(
        row, GenerationError(f"logits are not finite at token {len(row.tokens)} of the target")
    )


class Reports:
    """Log-probabilities of a step, computed for the rows that asked, and only if some did.

    Args:
        logits: ``[rows, vocab]``, raw.
        tokens: ``[rows]``, the picked ones.
    """

    def __init__(self, logits: Tensor, tokens: Tensor, rows: tuple[Sequence, ...]) -> None:
        asking = [i for i, row in enumerate(rows) if row.decoding.logprobs]
        self._place = {i: place for place, i in enumerate(asking)}
        self._counts = [rows[i].decoding.top_n_tokens for i in asking]
        if not asking:
            return
        logprobs = logits[asking].float().log_softmax(dim=-1)
        self._logprobs = logprobs.gather(1, tokens[asking][:, None])[:, 0].tolist()
        if widest := min(max(self._counts), logits.shape[-1]):
            values, ids = logprobs.topk(widest, dim=-1)
            self._top = list(zip(ids.tolist(), values.tolist(), strict=True))

    def logprob(self, row: int) -> float | None:
        place = self._place.get(row)
        return None if place is None else self._logprobs[place]

    def top_tokens(self, row: int) -> tuple[Candidate, ...]:
        """The row's likeliest tokens, falling."""
        place = self._place.get(row)
        count = 0 if place is None else self._counts[place]
        if place is None or not count:
            return ()
        ids, values = self._top[place]
        return tuple(Candidate(id, v) for id, v in zip(ids[:count], values[:count], strict=True))


def fill_holes(rows: int, gone: set[int]) -> list[int]:
    """The rows that stay, the last ones moved into the holes, so that few rows are copied.

    >>> fill_holes(5, {1})
    [0, 4, 2, 3]
    """
    kept = rows - len(gone)
    movers = [row for row in range(rows - 1, kept - 1, -1) if row not in gone]
    return [movers.pop(0) if row in gone else row for row in range(kept)]
