"""Iteration-level (continuous) batching: one decoder position for all live rows a step, or more
where a row's next tokens can be guessed (`model.lookahead`).

The idea is Orca's (Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative
Models", OSDI 2022): sequences join and leave between steps instead of waiting for a batch to end.

`step()` is schedule -> run -> pick -> emit. One thread calls it; nothing here locks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from model.beam import BeamSearch, Told, places_of_children
from model.cache import EncoderCache
from model.config import EngineConfig
from model.decoding import History, ProcessorBatch, finish_reason
from model.faults import (
    GenerationError,
    for_caller,
    is_fatal,
    is_out_of_memory,
    isolated,
    release_memory,
)
from model.loader import LoadedModel
from model.lookahead import Draft, Lookahead, Verifier, imagined
from model.sampler import log_probabilities
from model.scheduler import Scheduler
from model.sequence import (
    Event,
    FailureEvent,
    FinishReason,
    Forward,
    ForwardEvent,
    Sequence,
    TokenEvent,
)
from model.step import ALL_BANNED, Step, rows_told
from model.timing import Phase, Stopwatch

EXPECTED = 512
"""Source tokens of those that wait which the stepper is told of when others join: as many as are
encoded quickly side by side."""


@dataclass(frozen=True)
class Padding:
    """How much of a padded batch is real.

    Attributes:
        live: tokens of the rows.
        places: rows times the longest.
    """

    live: int = 0
    places: int = 0

    @classmethod
    def of(cls, lengths: list[int]) -> Padding:
        """Of rows that are padded to the longest."""
        return cls(sum(lengths), len(lengths) * max(lengths)) if lengths else cls()


@dataclass(frozen=True)
class StepTrace:
    """What one step did.

    Attributes:
        step: counted from 0.
        rows: sequences decoded side by side.
        joined: those among them that came in with this step.
        left: those that ended with it.
        forwards: teacher-forced passes run.
        sources: tokens of the sources that joined, as if each were encoded.
        targets: decoder positions of the rows, which the cache holds.
        seconds: from its beginning to its end.
        phases: seconds of each phase that it had.
        put_back: sequences that wait again because memory ran out.
        guessed: tokens that were guessed ahead and run.
        foretold: those among them that were right.
    """

    step: int
    rows: tuple[Sequence, ...]
    joined: tuple[Sequence, ...]
    left: tuple[Sequence, ...]
    forwards: int
    sources: Padding = Padding()
    targets: Padding = Padding()
    seconds: float = 0.0
    phases: Mapping[Phase, float] = field(default_factory=dict)
    put_back: tuple[Sequence, ...] = ()
    guessed: int = 0
    foretold: int = 0


class Engine:
    """Decodes many sequences side by side and answers teacher-forced passes in between.

    Args:
        model: what to run.
        config: limits.
        on_step: told of every step, from the engine's thread.

    Attributes:
        begun: what the last step took out of the queues, be it that memory put it back there.
        lookahead: what guesses tokens ahead; None where nothing does.
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
        self.lookahead = Lookahead.of(model, config)
        self._processors: ProcessorBatch | None = None
        self._searches: dict[Sequence, BeamSearch] = {}
        self._paused: dict[Sequence, BeamSearch] = {}  # of sequences that were put back
        self._put_back: list[Sequence] = []  # in this step
        self._guessed = self._foretold = 0  # in this step
        self.begun: tuple[Sequence | Forward, ...] = ()
        self._on_step = on_step
        self._steps = 0
        self._watch = Stopwatch(model.device)

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

    @property
    def encoder_cache(self) -> EncoderCache | None:
        """Sources encoded lately, where the model can make use of them."""
        return self.stepper.encoder_cache

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
        if isinstance(work, Forward):
            return
        self._paused.pop(work, None)
        if work in self._searches or work in self.scheduler.rows:
            self._remove([work])

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Admit what fits, run one chunk of passes, then one position or more for all live rows."""
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        self.begun = (*plan.joining, *plan.forwards)
        events: list[Event] = []
        self._watch.start()
        self._put_back = []
        self._guessed = self._foretold = 0
        joined = self._join(plan.joining, events)
        if plan.forwards:
            events.extend(self._run_forwards(plan.forwards))
            self._watch.lap("forward")
        self._arrange()
        rows = tuple(self.scheduler.rows)
        targets = Padding.of([len(row.prefix) + len(row.tokens) for row in rows])
        left = self._decode(rows, events) if rows else ()
        trace = StepTrace(
            self._steps,
            rows,
            joined,
            left,
            len(plan.forwards),
            sources=Padding.of([len(sequence.src) for sequence in joined]),
            targets=targets,
            seconds=time.perf_counter() - began,
            phases=self._watch.seconds(),
            put_back=tuple(self._put_back),
            guessed=self._guessed,
            foretold=self._foretold,
        )
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
        """Take sequences in; those that did."""
        if not joining:
            return ()
        joined: list[Sequence] = []
        waiting: list[Sequence] = []
        self.stepper.expect(joining, self.scheduler.next_ones(EXPECTED))
        for part, failure in isolated(self._take_in, joining):
            if failure is None:
                joined.extend(part)
            elif is_out_of_memory(failure) and self.scheduler.rows:
                waiting.extend(part)  # beside fewer rows it may fit
            else:
                [sequence] = part
                self._paused.pop(sequence, None)
                events.append(FailureEvent(sequence, for_caller(failure)))
        if waiting:
            self._wait_again(waiting, row_limit=len(self.scheduler.rows))
        return tuple(joined)

    def _take_in(self, joining: Sequence_[Sequence]) -> None:
        """Turn sequences into live rows, all or none."""
        searches: dict[Sequence, BeamSearch] = {}
        rows: list[Sequence] = []
        for sequence in joining:
            if sequence.decoding.num_beams > 1:
                paused = self._paused.get(sequence)
                searches[sequence] = paused or self._new_search(sequence)
                rows.extend(searches[sequence].rows)
            else:
                rows.append(sequence)
        self.stepper.join(rows)
        self.scheduler.rows.extend(rows)
        self._searches.update(searches)
        self._processors = None
        self._watch.lap("encode")
        for sequence in searches:
            self._paused.pop(sequence, None)

    def _decode(self, rows: tuple[Sequence, ...], events: list[Event]) -> tuple[Sequence, ...]:
        """One step for all rows; the sequences that ended with it."""
        try:
            step = self._run_ahead(rows) or self._run(rows)
        except Exception as error:
            if is_fatal(error):
                raise
            failure = error
        else:
            return self._carry_on(rows, step, events)
        everyone = self._sequences(rows)
        if is_out_of_memory(failure) and len(everyone) > 1:
            failure.with_traceback(None)  # which keeps the attempt's tensors alive
            self._start_again(everyone)
            return ()
        self._fail(everyone, for_caller(failure), events)
        return everyone

    def _run_ahead(self, rows: tuple[Sequence, ...]) -> Step | None:
        """As `_run`, with the tokens guessed ahead; None where there are none, or it fails."""
        stepper = self.stepper
        if self.lookahead is None or not isinstance(stepper, Verifier):
            return None
        drafts = self.lookahead.drafts(rows)
        if not any(drafts):
            return None
        try:
            return self._verify(stepper, rows, drafts)
        except Exception as error:
            if is_fatal(error):
                raise
        stepper.accept([0] * len(rows))  # single positions show whose fault it was
        return None

    def _verify(self, stepper: Verifier, rows: tuple[Sequence, ...], drafts: list[Draft]) -> Step:
        positions = imagined(rows, drafts)
        logits = stepper.verify(rows, drafts).float()
        self._watch.lap("decode")
        scores = self._scores(positions, self._compared(positions, logits))
        step = Step(positions, logits, scores, {}, drafts)
        self._watch.lap("sample")
        return step

    def _run(self, rows: tuple[Sequence, ...]) -> Step:
        """What the model says of all rows; those it cannot run are told by the step's faults.

        Raises:
            Exception: no row is to blame; memory ran out.
        """

        def logits_of(places: Sequence_[int]) -> Tensor:
            part = rows[places[0] : places[-1] + 1]
            return self.stepper.step(part, places[0]).float()

        def scores_of(places: Sequence_[int]) -> Tensor:
            if len(places) == len(rows):
                return self._scores(rows, compared)
            part = slice(places[0], places[-1] + 1)
            return self._scores(rows[part], compared[part])

        faults: dict[int, Exception] = {}
        logits = self._apart(logits_of, len(rows), faults)
        self._watch.lap("decode")
        compared = self._compared(rows, logits)
        scores = self._apart(scores_of, len(rows), faults)
        step = Step(rows, logits, scores, faults, [()] * len(rows))
        self._watch.lap("sample")
        return step

    def _apart(
        self,
        run: Callable[[Sequence_[int]], Tensor],
        rows: int,
        faults: dict[int, Exception],
    ) -> Tensor:
        """``[rows, vocab]`` of what `run` gives for places; NaN, and an entry, where it fails."""

        def is_nobodys(error: Exception) -> bool:
            return is_fatal(error) or is_out_of_memory(error)

        found: list[Tensor] = []
        for part, result in isolated(run, range(rows), is_nobodys):
            if isinstance(result, Exception):
                faults[part[0]] = result
                nothing = torch.full((1, self.spec.tgt_vocab_size), torch.nan, device=self.device)
                found.append(nothing)
            else:
                found.append(result)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _carry_on(
        self, rows: tuple[Sequence, ...], step: Step, events: list[Event]
    ) -> tuple[Sequence, ...]:
        """Give all rows their tokens; the sequences that ended with it."""
        ended: dict[Sequence, set[int]] = {}  # sequence -> its rows
        kept = [1] * len(rows)
        for i, row in enumerate(rows):
            if row.decoding.num_beams > 1:
                continue
            before = len(row.tokens)
            if _ends(row, events, partial(self._commit, row, step.positions(i), step, events)):
                ended[row] = {i}
            kept[i] = len(row.tokens) - before
        order, grown = list(range(len(rows))), list(rows)
        places = {id(row): i for i, row in enumerate(rows)} if self._searches else {}
        for sequence, search in self._searches.items():
            at = [places[id(row)] for row in search.rows]
            first = [step.positions(i)[0] for i in at]
            if _ends(sequence, events, partial(self._advance, search, first, step, events)):
                ended[sequence] = set(at)
                continue
            children = places_of_children(at, step.parents)
            for place, parent, row in zip(children, step.parents, search.rows, strict=True):
                order[place], grown[place] = at[parent], row
        for sequence in ended:
            self._searches.pop(sequence, None)
        self._accept(step, kept)
        self._settle(order, grown, set().union(*ended.values()))
        return tuple(ended)

    def _accept(self, step: Step, kept: list[int]) -> None:
        """Have the stepper hold the positions of what each row has said."""
        if step.guessed and isinstance(self.stepper, Verifier):
            self.stepper.accept(kept)
            self._guessed = step.guessed
            self._foretold = sum(count - 1 for count in kept if count)

    def _compared(self, rows: tuple[Sequence, ...], logits: Tensor) -> Tensor:
        """Logits ``[rows, vocab]``; log-probabilities in rows of searches, which compare these.

        Logits that nobody is told of may be overwritten.
        """
        if not self._searches:
            return logits
        searched = [row.decoding.num_beams > 1 for row in rows]
        if all(searched) and not rows_told(rows):
            return log_probabilities(logits)
        found = logits.log_softmax(dim=-1)
        if not all(searched):
            mask = torch.tensor(searched).to(self.device)[:, None]
            found = torch.where(mask, found, logits)
        return found

    def _scores(self, rows: tuple[Sequence, ...], compared: Tensor) -> Tensor:
        """What tokens are picked from ``[rows, vocab]``, for all live rows or other ones."""
        history = History(rows, self.spec, self.device)
        spare = bool(self._searches) or not rows_told(rows)
        return self._processors_of(rows)(compared, history, spare)

    def _processors_of(self, rows: tuple[Sequence, ...]) -> ProcessorBatch:
        if len(rows) != len(self.scheduler.rows):
            return ProcessorBatch([row.decoding for row in rows], self.spec, self.device)
        if self._processors is None:
            decodings = [row.decoding for row in rows]
            self._processors = ProcessorBatch(decodings, self.spec, self.device)
        return self._processors

    def _commit(
        self, row: Sequence, positions: Iterable[int], step: Step, events: list[Event]
    ) -> bool:
        """Give a row its token, and more for as long as guesses were right; True if it ends."""
        for i in positions:
            if step.rows[i].tokens[-1:] != row.tokens[-1:]:
                return False  # the row did not say what was guessed
            if error := step.fault(i):
                events.append(FailureEvent(row, error))
                return True
            row.tokens.append(step.tokens[i])
            row.finish_reason = self._finish_reason(row)
            told = step.told(i, step.tokens[i])
            events.append(_token_event(row, len(row.tokens) - 1, step.tokens[i], told))
            if row.finish_reason is not None:
                return True
        return False

    def _advance(self, search: BeamSearch, at: list[int], step: Step, events: list[Event]) -> bool:
        """Take a beam search one step on; True if it ends with it."""
        sequence = search.sequence
        if error := next(filter(None, (step.fault(i, any_token=True) for i in at)), None):
            events.append(FailureEvent(sequence, error))
            return True
        step.parents = search.advance(
            step.scores, at, lambda beam, token: step.told(at[beam], token)
        )
        if not search.over:
            for index in range(len(sequence.tokens), search.agreed):
                sequence.tokens.append(search.rows[0].tokens[index])
                told = search.told[0].at(index)
                events.append(_token_event(sequence, index, sequence.tokens[index], told))
            return False
        hypotheses = search.hypotheses()
        if not hypotheses:
            events.append(FailureEvent(sequence, GenerationError(ALL_BANNED)))
            return True
        best = hypotheses[0]
        told = Told(best.logprobs, best.top_tokens)
        *certain, last = (
            _token_event(sequence, index, best.tokens[index], told.at(index))
            for index in range(len(sequence.tokens), len(best.tokens))
        )
        sequence.tokens.extend(best.tokens[len(sequence.tokens) :])
        sequence.finish_reason = best.finish_reason
        last = replace(
            last,
            finish_reason=best.finish_reason,
            hypotheses=hypotheses,
            beam_steps=tuple(search.steps),
        )
        events.extend([*certain, last])
        return True

    def _new_search(self, sequence: Sequence) -> BeamSearch:
        return BeamSearch(sequence, self._finish_reason, len(self.spec.eos_ids))

    def _finish_reason(self, row: Sequence) -> FinishReason | None:
        return finish_reason(row, self.spec)

    # --- rows ----------------------------------------------------------------------------------

    def _fail(self, sequences: tuple[Sequence, ...], error: Exception, events: list[Event]) -> None:
        events.extend(FailureEvent(sequence, error) for sequence in sequences)
        self._remove(sequences)

    def _sequences(self, rows: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
        """Whose rows they are, each once."""
        plain = [row for row in rows if row.decoding.num_beams == 1]
        return (*plain, *self._searches)

    def _remove(self, gone: Iterable[Sequence]) -> None:
        """Take sequences out, from the tensors too."""
        leaving: set[int] = set()
        for sequence in gone:
            search = self._searches.pop(sequence, None)
            leaving.update(map(id, search.rows if search else [sequence]))
        rows = self.scheduler.rows
        holes = {i for i, row in enumerate(rows) if id(row) in leaving}
        self._settle(list(range(len(rows))), rows, holes)

    def _settle(self, order: list[int], rows: list[Sequence], holes: set[int]) -> None:
        """Let rows go on from others and fill holes with the last ones, in one rearrangement.

        Args:
            order: for each row, the row whose tensors it goes on from.
            rows: the rows themselves.
            holes: rows that have ended.
        """
        kept = fill_holes(len(rows), holes)
        self.scheduler.rows = [rows[i] for i in kept]
        if holes:
            self._processors = None
            self.scheduler.left(len(holes))
        if not holes and order == kept:
            return
        try:
            self.stepper.keep([order[i] for i in kept])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._start_again(self._sequences(tuple(self.scheduler.rows)))

    def _arrange(self) -> None:
        """Move rows to where a step reads least, if the stepper finds that worth it."""
        order = self.stepper.better_order()
        if order is not None:
            self._processors = None
            self._settle(order, [self.scheduler.rows[row] for row in order], holes=set())

    def _start_again(self, everyone: tuple[Sequence, ...]) -> None:
        """Memory ran out: return it all, and go on with half the rows from the tokens so far.

        Nobody sees it in an answer: what was generated is replayed as a prefix, and random
        numbers depend on the step alone.
        """
        half = len(self.scheduler.rows) // 2
        self.scheduler.rows = []
        self._processors = None
        self._paused |= self._searches
        self._searches = {}
        self.stepper.keep([])
        self.stepper.release()
        # The youngest, which have the least to replay, wait longest.
        eldest_first = sorted(everyone, key=lambda sequence: -len(sequence.tokens))
        self._wait_again(eldest_first, row_limit=half)

    def _wait_again(self, sequences: list[Sequence], row_limit: int) -> None:
        self.scheduler.put_back(sequences, row_limit)
        self._put_back.extend(sequences)
        release_memory(self.device)

    # --- teacher-forced passes -----------------------------------------------------------------

    def _run_forwards(self, forwards: tuple[Forward, ...]) -> list[Event]:
        looking = [forward for forward in forwards if forward.attention]
        scoring = [forward for forward in forwards if not forward.attention]
        events: list[Event] = []
        for run, group in ((self._attention, looking), (self._logits, scoring)):
            for part, answers in isolated(run, group) if group else ():
                if isinstance(answers, Exception):
                    events.extend(FailureEvent(forward, for_caller(answers)) for forward in part)
                else:
                    events.extend(answers)
        return events

    def _logits(self, forwards: Sequence_[Forward]) -> list[Event]:
        return [*self.stepper.forward(forwards)]

    def _attention(self, forwards: Sequence_[Forward]) -> list[Event]:
        maps = self.stepper.attention(forwards)
        nothing = torch.empty(0)
        return [
            ForwardEvent(forward, nothing, attention=attention)
            for forward, attention in zip(forwards, maps, strict=True)
        ]


def _ends(sequence: Sequence, events: list[Event], carry_on: Callable[[], bool]) -> bool:
    """Whether a sequence ends when it is carried on; an error in it ends that sequence alone."""
    try:
        return carry_on()
    except Exception as error:  # noqa: BLE001  whatever its stop check raised, others go on
        events.append(FailureEvent(sequence, error))
        return True


def _token_event(sequence: Sequence, index: int, token: int, told: Told) -> TokenEvent:
    return TokenEvent(
        sequence=sequence,
        index=index,
        token=token,
        logprob=told.logprobs[0] if told.logprobs else None,
        top_tokens=told.top_tokens[0] if told.top_tokens else (),
        finish_reason=sequence.finish_reason,
    )


def fill_holes(rows: int, gone: set[int]) -> list[int]:
    """The rows that stay, the last ones moved into the holes, so that few rows are copied.

    >>> fill_holes(5, {1})
    [0, 4, 2, 3]
    """
    kept = rows - len(gone)
    movers = [row for row in range(rows - 1, kept - 1, -1) if row not in gone]
    return [movers.pop(0) if row in gone else row for row in range(kept)]
