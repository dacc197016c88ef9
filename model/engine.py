"""Iteration-level (continuous) batching: one decoder position for all live rows a step.

The idea is Orca's (Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative
Models", OSDI 2022): sequences join and leave between steps instead of waiting for a batch to end.

`step()` is schedule -> run -> pick -> emit. One thread calls it; nothing here locks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from model.beam import BeamSearch, Told
from model.cache import EncoderCache
from model.config import EngineConfig
from model.decoding import History, ProcessorBatch, finish_reason
from model.loader import LoadedModel
from model.sampler import pick
from model.scheduler import Scheduler
from model.sequence import (
    Candidate,
    Event,
    FailureEvent,
    FinishReason,
    Forward,
    ForwardEvent,
    Hypothesis,
    Sequence,
    TokenEvent,
)

ALL_BANNED = "the decoding parameters ban every token"


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
        self._searches: dict[Sequence, BeamSearch] = {}
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
        if work in self._searches or work in self.scheduler.rows:
            assert isinstance(work, Sequence)
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
        rows: list[Sequence] = []
        for sequence in joining:
            if sequence.decoding.num_beams > 1:
                search = BeamSearch(sequence, self._finish_reason)
                self._searches[sequence] = search
                rows.extend(search.rows)
            else:
                rows.append(sequence)
        self.scheduler.rows.extend(rows)
        self._processors = None
        try:
            self.stepper.join(rows)
        except Exception as error:  # noqa: BLE001  whatever it was, the rows that live go on
            self._fail(joining, error, events)
            return ()
        return joining

    def _decode(self, rows: tuple[Sequence, ...], events: list[Event]) -> tuple[Sequence, ...]:
        """One position for all rows; the sequences that ended with it."""
        try:
            logits = self.stepper.step(rows).float()  # [rows, vocab]
            step = Step(rows, logits, self._scores(rows, logits))
        except Exception as error:  # noqa: BLE001  those who wait must still be served
            everyone = self._sequences(rows)
            self._fail(everyone, error, events)
            return everyone
        ended: dict[Sequence, set[int]] = {}  # sequence -> its rows
        for i, row in enumerate(rows):
            if row.decoding.num_beams > 1:
                continue
            if _ends(row, events, partial(self._commit, row, i, step, events)):
                ended[row] = {i}
        order, grown = list(range(len(rows))), list(rows)
        places = {id(row): i for i, row in enumerate(rows)} if self._searches else {}
        for sequence, search in self._searches.items():
            at = [places[id(row)] for row in search.rows]
            if _ends(sequence, events, partial(self._advance, search, at, step, events)):
                ended[sequence] = set(at)
                continue
            for place, parent, row in zip(at, step.parents, search.rows, strict=True):
                order[place], grown[place] = at[parent], row
        self._settle(order, grown, set().union(*ended.values()))
        for sequence in ended:
            self._searches.pop(sequence, None)
        return tuple(ended)

    def _scores(self, rows: tuple[Sequence, ...], logits: Tensor) -> Tensor:
        """What tokens are picked from ``[rows, vocab]``."""
        if self._processors is None:
            decodings = [row.decoding for row in rows]
            self._processors = ProcessorBatch(decodings, self.spec, self.device)
        if self._searches:  # hypotheses are compared by their probabilities
            searched = torch.tensor([row.decoding.num_beams > 1 for row in rows])
            searched = searched.to(self.device)[:, None]
            logits = torch.where(searched, logits.log_softmax(dim=-1), logits)
        return self._processors(logits, History(rows, self.spec, self.device))

    def _commit(self, row: Sequence, i: int, step: Step, events: list[Event]) -> bool:
        """Give a row its token; True if it ends with it."""
        if error := step.fault(i):
            events.append(FailureEvent(row, error))
            return True
        row.tokens.append(step.tokens[i])
        row.finish_reason = self._finish_reason(row)
        told = step.told(i, step.tokens[i])
        events.append(_token_event(row, len(row.tokens) - 1, step.tokens[i], told))
        return row.finish_reason is not None

    def _advance(self, search: BeamSearch, at: list[int], step: Step, events: list[Event]) -> bool:
        """Take a beam search one step on; True if it ends with it."""
        sequence = search.sequence
        if error := next(filter(None, (step.fault(i, any_token=True) for i in at)), None):
            events.append(FailureEvent(sequence, error))
            return True
        step.parents = search.advance(
            step.scores[at].cpu(), lambda beam, token: step.told(at[beam], token)
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
        for index in range(len(sequence.tokens), len(best.tokens)):
            sequence.tokens.append(best.tokens[index])
            told = Told(best.logprobs, best.top_tokens).at(index)
            if index == len(best.tokens) - 1:
                sequence.finish_reason = best.finish_reason
            events.append(_token_event(sequence, index, best.tokens[index], told, hypotheses))
        return True

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
        if holes or order != kept:
            self.stepper.keep([order[i] for i in kept])
        if holes:
            self._processors = None
        self.scheduler.rows = [rows[i] for i in kept]

    # --- teacher-forced passes -----------------------------------------------------------------

    def _run_forwards(self, forwards: tuple[Forward, ...]) -> list[Event]:
        looking = [forward for forward in forwards if forward.attention]
        scoring = [forward for forward in forwards if not forward.attention]
        events: list[Event] = []
        for run, group in ((self._attention, looking), (self._logits, scoring)):
            try:
                events.extend(run(group))
            except Exception as error:  # noqa: BLE001  decoding goes on beside a pass that failed
                events.extend(FailureEvent(forward, error) for forward in group)
        return events

    def _logits(self, forwards: list[Forward]) -> list[Event]:
        if not forwards:
            return []
        return [*self.stepper.forward(forwards)]

    def _attention(self, forwards: list[Forward]) -> list[Event]:
        if not forwards:
            return []
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


def _token_event(
    sequence: Sequence,
    index: int,
    token: int,
    told: Told,
    hypotheses: tuple[Hypothesis, ...] = (),
) -> TokenEvent:
    return TokenEvent(
        sequence=sequence,
        index=index,
        token=token,
        logprob=told.logprobs[0] if told.logprobs else None,
        top_tokens=told.top_tokens[0] if told.top_tokens else (),
        finish_reason=sequence.finish_reason,
        hypotheses=hypotheses if sequence.finish_reason else (),
    )


class Step:
    """What one step computed for its rows, read back once.

    Args:
        rows: those decoded.
        logits: ``[rows, vocab]``, raw, float32.
        scores: ``[rows, vocab]`` to pick from.

    Attributes:
        tokens: each row's pick.
        parents: of the search that was advanced last, for each of its rows.
    """

    def __init__(self, rows: tuple[Sequence, ...], logits: Tensor, scores: Tensor) -> None:
        self.scores = scores
        self.parents: list[int] = []
        picked = pick(scores, rows)
        self.tokens: list[int] = picked.tolist()
        self._finite = logits.amax(dim=-1).isfinite().tolist()  # a NaN anywhere shows here
        self._allowed = (scores.amax(dim=-1) > -torch.inf).tolist()
        asking = [i for i, row in enumerate(rows) if row.decoding.logprobs]
        self._place = {i: place for place, i in enumerate(asking)}
        if not asking:
            return
        self._logprobs = logits[asking].log_softmax(dim=-1)  # [asking, vocab]
        self._picked = self._logprobs.gather(1, picked[asking][:, None])[:, 0].tolist()
        self._counts = [rows[i].decoding.top_n_tokens for i in asking]
        if widest := min(max(self._counts), logits.shape[-1]):
            values, ids = self._logprobs.topk(widest, dim=-1)
            self._top = list(zip(ids.tolist(), values.tolist(), strict=True))

    def fault(self, row: int, any_token: bool = False) -> GenerationError | None:
        """Why a row cannot go on.

        Args:
            any_token: whether the row may find no token allowed.
        """
        if not self._finite[row]:
            return GenerationError("the model's logits are not finite")
        if not self._allowed[row] and not any_token:
            return GenerationError(ALL_BANNED)
        return None

    def told(self, row: int, token: int) -> Told:
        """What is reported of a row that takes a token, where it asked."""
        place = self._place.get(row)
        if place is None:
            return Told()
        picked = token == self.tokens[row]
        logprob = self._picked[place] if picked else float(self._logprobs[place, token])
        if not (count := self._counts[place]):
            return Told((logprob,))
        ids, values = self._top[place]
        top = zip(ids[:count], values[:count], strict=True)
        return Told((logprob,), (tuple(Candidate(id, value) for id, value in top),))


def fill_holes(rows: int, gone: set[int]) -> list[int]:
    """The rows that stay, the last ones moved into the holes, so that few rows are copied.

    >>> fill_holes(5, {1})
    [0, 4, 2, 3]
    """
    kept = rows - len(gone)
    movers = [row for row in range(rows - 1, kept - 1, -1) if row not in gone]
    return [movers.pop(0) if row in gone else row for row in range(kept)]
