"""One engine thread per model, and the way from a request to it and back.

Only the engine thread calls the engine. The event loop hands it commands through a queue (on which
it blocks when there is nothing to do); it hands all events of a step back with one
`call_soon_threadsafe`. Everything else in this file runs on the event loop and needs no lock.

A request's work is followed by a `Ticket`. Requests that want whole answers wait for
`Ticket.result()` and are woken once; a request that forwards tokens iterates over `Ticket.steps()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from queue import Empty, SimpleQueue
from typing import Literal, Protocol

from model.cache import EncoderCache
from model.faults import GenerationError
from model.sequence import Event, FailureEvent, ForwardEvent, TokenEvent
from seqserve.errors import (
    DeadlineError,
    GenerationFailedError,
    InvalidRequestError,
    SeqserveError,
    UnavailableError,
)
from service.admission import Admission, Work
from service.places import place_of
from service.rates import RestartBudget

logger = logging.getLogger(__name__)

LAST_STEP_SECONDS = 5.0
"""How long `Runner.stop` waits for the engine's last step to end."""


class EngineLike(Protocol):
    """What the runner needs of `model.engine.Engine`."""

    @property
    def encoder_cache(self) -> EncoderCache | None: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def waiting(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def begun(self) -> Sequence[Work]: ...
    def submit(self, work: Work) -> None: ...
    def cancel(self, work: Work) -> None: ...
    def step(self) -> list[Event]: ...


@dataclass(frozen=True)
class _Command:
    kind: Literal["submit", "cancel", "stop"]
    works: tuple[Work, ...] = ()


@dataclass(frozen=True)
class _Step:
    """What one step brought.

    Attributes:
        began: when it started.
        begun: works that it took out of the queue.
        events: what came of these and of others.
    """

    began: float
    begun: Sequence[Work]
    events: list[Event]


class Ticket:
    """A request's works and what has come of them so far. Lives on the event loop.

    Attributes:
        unfinished: works without their last event.
        submitted, began, ended: times (`time.perf_counter`); `began` is the start of the step that
            took the first work out of the queue, `ended` the arrival of the last event.
        works: all of them.
        first_token: when the first token arrived.
        generated: tokens that arrived.
        longest: tokens of the sequence that has most.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works
        self.unfinished: set[Work] = set(works)
        self.first_token: float | None = None
        self.generated = 0
        self.longest = 0
        self.submitted = time.perf_counter()
        self.began: float | None = None
        self.ended: float | None = None
        self._events: deque[Event] = deque()
        self._error: SeqserveError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._eager = False

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self._error is not None or not self.unfinished

    async def result(self) -> list[Event]:
        """All events in order, once everything has ended.

        Raises:
            SeqserveError: a work failed, or the deadline passed, or the engine broke down.
        """
        while not self.over:
            await self._wait(eager=False)
        if self._error:
            raise self._error
        return list(self._events)

    async def steps(self) -> AsyncIterator[list[Event]]:
        """The events of each step as it ends.

        Raises:
            SeqserveError: as in `result`, after what came before.
        """
        while True:
            if self._events:
                events = list(self._events)
                self._events.clear()
                yield events
            elif self._error:
                raise self._error
            elif not self.unfinished:
                return
            else:
                await self._wait(eager=True)

    def begin(self, when: float) -> None:
        """The engine has taken a work out of its queue; the first time counts."""
        if self.began is None:
            self.began = when

    def push(self, event: Event) -> None:
        """Take an event in; wake the request if it wants to know."""
        if isinstance(event, FailureEvent):
            self.fail(GenerationFailedError(reason(event.error)))
            return
        self._events.append(event)
        if isinstance(event, TokenEvent):
            self._count(event)
        if is_last(event):
            self.unfinished.discard(work_of(event))
        if self.over:
            self.ended = time.perf_counter()
        if self._eager or self.over:
            self._wake()

    def fail(self, error: SeqserveError) -> None:
        """End the ticket with an error; the first one counts."""
        if not self.over:
            self._error = error
            self._wake()

    def _count(self, event: TokenEvent) -> None:
        if self.first_token is None:
            self.first_token = time.perf_counter()
        self.generated += 1
        self.longest = max(self.longest, event.index + 1)

    async def _wait(self, eager: bool) -> None:
        self._eager = eager
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)


def reason(error: Exception) -> str:
    """What a caller is told of an input that failed: no words that were not meant for callers."""
    if isinstance(error, GenerationError):
        return f"the model failed on this input: {error}"
    return "the model failed on this input; the server's log has the details"


def too_late(seconds: float) -> DeadlineError:
    """What a request fails with that has had so much time."""
    return DeadlineError(f"not done within the timeout of {seconds:g} seconds")


def work_of(event: Event) -> Work:
    """Whose event it is."""
    if isinstance(event, FailureEvent):
        return event.work
    return event.forward if isinstance(event, ForwardEvent) else event.sequence


def is_last(event: Event) -> bool:
    """Whether nothing comes after it for the same work."""
    return not isinstance(event, TokenEvent) or event.finish_reason is not None


class Runner:
    """Runs one engine in its own thread, and another one when it breaks down.

    Args:
        make_engine: called in the engine's thread; nobody else may touch what it makes.
        admission: who may enter the queue.
        name: of the model, for messages and the thread.
        budget: of restarts.
        on_end: told why, when the engine has broken down for good.

    Attributes:
        engine: None while it is being made.
        broken: whether it has broken down for good.
        restarts: how often a new engine was begun.
    """

    def __init__(
        self,
        make_engine: Callable[[], EngineLike],
        admission: Admission,
        name: str,
        budget: RestartBudget,
        on_end: Callable[[str], None],
    ) -> None:
        self.engine: EngineLike | None = None
        self.admission = admission
        self.name = name
        self.broken = False
        self.draining = False
        self.restarts = 0
        self._make_engine = make_engine
        self._budget = budget
        self._on_end = on_end
        self._owners: dict[Work, Ticket] = {}
        self._requests = count(1)
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = asyncio.Event()  # of the thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: asyncio.Future[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    # --- event loop ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine thread and wait for its engine; events arrive on the running loop.

        Raises:
            Exception: what making the engine raised.
        """
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        self._begin()
        try:
            await self._started
        except asyncio.CancelledError:
            self._commands.put(_Command("stop"))
            raise

    def _begin(self) -> None:
        """A thread with an engine and a command queue of its own: nothing old reaches it."""
        self._commands = SimpleQueue()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run,
            args=(self._commands, self._ended),
            name=f"engine-{self.name}",
            daemon=True,
        )
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether work is accepted."""
        return self.engine is not None and not self.draining

    @property
    def encoder_cache(self) -> EncoderCache | None:
        """Sources encoded lately, where there is an engine that can make use of them."""
        return self.engine.encoder_cache if self.engine else None

    @property
    def waiting(self) -> int:
        """Sequences and passes that have not begun."""
        return self.engine.waiting if self.engine else 0

    @property
    def running(self) -> int:
        """Live rows."""
        return self.engine.running if self.engine else 0

    @property
    def outstanding(self) -> int:
        """Works accepted and not yet answered."""
        return len(self._owners)

    @property
    def oldest_waiting(self) -> float:
        """Seconds that the oldest request of which nothing has been computed has waited."""
        waiting = (t for t in self._owners.values() if t.began is None and not t.over)
        oldest = next(waiting, None)  # owners are in the order of submission
        return time.perf_counter() - oldest.submitted if oldest else 0.0

    @asynccontextmanager
    async def submitted(
        self, works: Sequence[Work], seconds: float, since: float | None = None
    ) -> AsyncIterator[Ticket]:
        """Run works; whatever is unfinished when the block is left is cancelled.

        Args:
            seconds: until the ticket fails with `DeadlineError`.
            since: when these began (`time.perf_counter`); now, without it.

        Raises:
            DeadlineError: they are over already.
            UnavailableError: draining, broken down or being restarted.
            OverloadedError, InvalidRequestError: they do not all fit into the queue.
        """
        left = seconds if since is None else since + seconds - time.perf_counter()
        if left <= 0.0:
            raise too_late(seconds)
        ticket = self._admit(works)
        assert self._loop
        deadline = self._loop.call_later(left, self._expire, ticket, seconds)
        try:
            yield ticket
        finally:
            deadline.cancel()
            self._release(ticket)

    def _admit(self, works: Sequence[Work]) -> Ticket:
        if self.broken:
            raise UnavailableError(f"model {self.name} has failed and takes no more requests")
        if self.draining:
            raise UnavailableError("the server is shutting down")
        if self.engine is None:
            raise UnavailableError(f"model {self.name} is being restarted", retry_after=1)
        self.admission.enter(works)
        ticket = Ticket(works)
        if works:
            request = next(self._requests)
            for work in works:
                work.request = request  # requests take turns in the engine's queue
            self._owners.update(dict.fromkeys(works, ticket))
            self._idle.clear()
            self._commands.put(_Command("submit", tuple(works)))
        return ticket

    def _expire(self, ticket: Ticket, seconds: float) -> None:
        ticket.fail(too_late(seconds))
        self._release(ticket)

    def _release(self, ticket: Ticket) -> None:
        """Free the rows of what is unfinished."""
        left = tuple(work for work in ticket.unfinished if work in self._owners)
        if left:
            self._forget(left)
            self._commands.put(_Command("cancel", left))

    def _forget(self, works: Sequence[Work], finished: bool = False) -> None:
        """Works that have an owner lose it."""
        self.admission.leave(works, finished)
        for work in works:
            del self._owners[work]
        if not self._owners:
            self._idle.set()

    def _deliver(self, step: _Step) -> None:
        """Hand the events of a step out. Events of cancelled works have no owner any more."""
        for work in step.begun:
            if owner := self._owners.get(work):
                owner.begin(step.began)
        for event in step.events:
            ticket = self._owners.get(work_of(event))
            if ticket is None:
                continue
            if isinstance(event, FailureEvent) and not isinstance(event.error, GenerationError):
                self._log("model %s failed on an input", event.error)
            ticket.push(event)
            if is_last(event):
                self._forget([work_of(event)], finished=True)

    def _refuse(self, work: Work, error: ValueError) -> None:
        if ticket := self._owners.get(work):
            ticket.fail(InvalidRequestError(str(error)))
            self._forget([work])

    def _came_up(self, engine: EngineLike) -> None:
        self.engine = engine
        assert self._started
        if not self._started.done():
            self._started.set_result(None)

    def _break_down(self, error: BaseException) -> None:
        """The engine raised: nothing of it can be trusted any more."""
        assert self._started
        if not self._started.done():  # it never ran: for whoever started it to deal with
            self._started.set_exception(error)
            return
        self._log("engine of model %s failed", error)
        error.with_traceback(None)  # which keeps the engine's tensors alive
        self.engine = None
        self._fail_all(GenerationFailedError("the model failed while it ran this request"))
        if self.draining:
            return
        if self._budget.take(time.monotonic()):
            self.restarts += 1
            logger.warning("engine of model %s starts again", self.name)
            self._begin()
            return
        self.broken = True
        after = f" after {self.restarts} restarts" if self.restarts else ""
        self._on_end(f"the engine of model {self.name} has failed{after}")

    def _log(self, what: str, error: BaseException) -> None:
        """Its message, which may hold a caller's text, is for level debug alone."""
        logger.error(f"{what}: %s", self.name, place_of(error))
        logger.debug(what, self.name, exc_info=error)

    def _fail_all(self, error: SeqserveError) -> None:
        for ticket in set(self._owners.values()):
            ticket.fail(error)
        self._forget(list(self._owners))

    async def drain(self, grace: float) -> bool:
        """Accept nothing more and wait for what runs; False if the grace period was too short."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), grace)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """End the thread; what is left fails. One that hangs in a step is left behind."""
        self.draining = True
        self._fail_all(UnavailableError("the server is shutting down"))
        self._commands.put(_Command("stop"))
        if self._thread is None:
            return
        try:
            await asyncio.wait_for(self._ended.wait(), LAST_STEP_SECONDS)
        except TimeoutError:
            logger.error("engine of model %s hangs in a step: not waiting for it", self.name)
            return
        self._thread.join()  # it has nothing left to do

    # --- engine thread ---------------------------------------------------------------------------

    def _run(self, commands: SimpleQueue[_Command], ended: asyncio.Event) -> None:
        try:
            engine = self._make_engine()
            self._call(self._came_up, engine)
            while self._obey(engine, commands):
                began = time.perf_counter()
                events = engine.step()
                if events or engine.begun:
                    self._call(self._deliver, _Step(began, engine.begun, events))
        except BaseException as error:  # noqa: BLE001  who waits must hear of it, whatever it was
            self._call(self._break_down, error)
        finally:
            self._call(ended.set)

    def _obey(self, engine: EngineLike, commands: SimpleQueue[_Command]) -> bool:
        """Carry out what was commanded, waiting if there is nothing else to do; False: stop."""
        while True:
            try:
                command = commands.get(block=not engine.has_work)
            except Empty:
                return True
            if command.kind == "stop":
                return False
            for work in command.works:
                self._submit(engine, work) if command.kind == "submit" else engine.cancel(work)

    def _submit(self, engine: EngineLike, work: Work) -> None:
        try:
            engine.submit(work)
        except ValueError as error:
            self._call(self._refuse, work, error)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            self._loop.call_soon_threadsafe(function, *args)
