"""Any history of submitting, cancelling, stepping, failing and running out of memory.

The engine and its scheduler are real; the stepper is a small one whose logits follow from a row's
own source and target, so that a row is known to have been mixed up with another one. Tokens are
guessed ahead, rightly and wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

from model.config import EngineConfig, ModelSpec
from model.engine import Engine, StepTrace
from model.faults import DOES_NOT_FIT
from model.loader import LoadedModel
from model.lookahead import imagined
from model.sequence import (
    AttentionMaps,
    Decoding,
    FailureEvent,
    Forward,
    ForwardEvent,
    TokenEvent,
)
from model.sequence import Sequence as Row
from tests.guesses import Guesses

VOCAB = 13
EOS = 2
WELL, SICK, NOT_FINITE, NEVER_JOINS = 4, 5, 6, 7
"""First id of a source: what becomes of its rows."""

FAULTY_TOKEN = 3
"""At how many tokens a faulty row fails."""

PLENTY = 100

SPEC = ModelSpec(
    family="fake",
    src_vocab_size=VOCAB,
    tgt_vocab_size=VOCAB,
    pad_id=0,
    decoder_start_ids=(1,),
    eos_ids=(EOS,),
    unk_id=None,
    max_src=64,
    max_tgt=64,
    default_max_new_tokens=8,
)


@dataclass
class SmallStepper:
    """Remembers each row's target, as a cache does, and what the engine said of it.

    Attributes:
        memory: rows that fit.
        cached: target ids of each live row.
        begun: what a pass over guesses may add to them.
    """

    memory: int = PLENTY
    cached: list[list[int]] = field(default_factory=list)
    begun: list[list[int]] = field(default_factory=list)
    encoder_cache: None = None

    def expect(self, joining: Sequence[Row], soon: Sequence[Row]) -> None:
        pass

    def join(self, rows: Sequence[Row]) -> None:
        if any(row.src[0] == NEVER_JOINS for row in rows):
            raise RuntimeError("cannot be encoded")
        self._fit(len(self.cached) + len(rows))
        self.cached += [row.target[:-1] for row in rows]

    def step(self, rows: Sequence[Row], first: int = 0) -> Tensor:
        self._fit(len(self.cached))
        self._check(rows)
        for place, row in enumerate(rows, start=first):
            self.cached[place].append(row.last_token)
            assert self.cached[place] == row.target, "a row goes on from another one's cache"
        return torch.stack([logits_of(row.src, row.target) for row in rows])

    def verify(self, rows: Sequence[Row], drafts: Sequence[Sequence[int]]) -> Tensor:
        self.begun = [[row.last_token, *draft] for row, draft in zip(rows, drafts, strict=True)]
        positions = imagined(rows, drafts)
        self._fit(len(self.cached))
        self._check(positions)
        return torch.stack([logits_of(row.src, row.target) for row in positions])

    def accept(self, kept: Sequence[int]) -> None:
        for ids, begun, count in zip(self.cached, self.begun, kept, strict=True):
            ids += begun[:count]

    def _check(self, rows: Sequence[Row]) -> None:
        if any(row.src[0] == SICK and len(row.tokens) == FAULTY_TOKEN for row in rows):
            raise RuntimeError("sick")

    def keep(self, rows: Sequence[int]) -> None:
        self.cached = [list(self.cached[row]) for row in rows]

    def better_order(self) -> list[int] | None:
        return None

    def release(self) -> None:
        assert not self.cached

    def forward(self, passes: Sequence[Forward]) -> list[ForwardEvent]:
        if any(work.src[0] == SICK for work in passes):
            raise RuntimeError("sick")
        return [ForwardEvent(work, logits_of(work.src, work.tgt)[None]) for work in passes]

    def attention(self, passes: Sequence[Forward]) -> list[AttentionMaps]:
        raise NotImplementedError

    def _fit(self, rows: int) -> None:
        if rows > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory")


def logits_of(src: Sequence[int], target: Sequence[int]) -> Tensor:
    """``[vocab]`` that differ from token to token, and with every id and its place."""
    state = sum(place * id for place, id in enumerate([*src, *target], start=1))
    logits = (torch.arange(VOCAB) * (state % 11 + 1) * 0.618 + state * 0.3) % 1.0 * 4
    if src[0] == NOT_FINITE and len(target) == FAULTY_TOKEN + 1:
        logits[3] = torch.nan
    return logits


def small_engine(stepper: SmallStepper, config: EngineConfig, traces: list[StepTrace]) -> Engine:
    model = LoadedModel(
        directory=Path(),
        spec=SPEC,
        network=nn.Module(),
        source_tokenizer=None,
        target_tokenizer=None,
        parameters=0,
        dtype=torch.float32,
        device=torch.device("cpu"),
        stepper=lambda _: stepper,
    )
    return Engine(model, config, traces.append)


def alone(row: Row) -> list[int]:
    """What a row says by itself."""
    again = Row(row.src, row.prefix, row.decoding)
    engine = small_engine(SmallStepper(), EngineConfig(), [])
    engine.submit(again)
    list(engine.run())
    return again.tokens


def size(row: Row) -> tuple[int, int]:
    """By which a request's works are told apart where they wait."""
    return row.request, row.reserved_tokens


class Histories(RuleBasedStateMachine):
    """Rules are what callers and the machine may do; invariants hold after each of them."""

    @initialize(rows=st.integers(1, 6), encoder=st.integers(1, 40), cache=st.integers(120, 400))
    def begin(self, rows: int, encoder: int, cache: int) -> None:
        self.stepper = SmallStepper()
        self.traces: list[StepTrace] = []
        self.config = EngineConfig(
            max_rows=rows, max_encoder_tokens=encoder, max_cache_tokens=cache
        )
        self.engine = small_engine(self.stepper, self.config, self.traces)
        self.answers: dict[int, list[int]] = {}
        self.engine.lookahead = Guesses(self.answers, SPEC, seed=rows, wrong=0.3, most=3)
        self.least_memory = PLENTY
        self.submitted: list[Row | Forward] = []
        self.unfinished: list[Row | Forward] = []
        self.turns_missed: dict[int, int] = {}

    # --- what may happen -------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from([WELL] * 4 + [SICK, NOT_FINITE, NEVER_JOINS]),
        length=st.integers(1, 6),
        new=st.integers(1, 9),
        beams=st.sampled_from([1, 1, 1, 2, 3]),
        sample=st.booleans(),
        request=st.integers(1, 3),
        count=st.integers(1, 4),
    )
    def submit(
        self, kind: int, length: int, new: int, beams: int, sample: bool, request: int, count: int
    ) -> None:
        beams = min(beams, self.config.max_rows)
        for number in range(count):
            decoding = Decoding(
                new,
                sample=sample and beams == 1,
                seed=len(self.submitted),
                sequence_number=number,
                num_beams=beams,
            )
            src = [kind, *[8 + (number + i) % 4 for i in range(length)]]
            self._submit(Row(src, [1], decoding, request=request))

    @rule(kind=st.sampled_from([WELL, WELL, SICK]), request=st.integers(1, 3))
    def submit_pass(self, kind: int, request: int) -> None:
        self._submit(Forward([kind, 8], [1, 9], request=request))

    def _submit(self, work: Row | Forward) -> None:
        self.engine.submit(work)
        if isinstance(work, Row):
            self.answers[id(work)] = alone(work)
        self.submitted.append(work)
        self.unfinished.append(work)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        work = data.draw(st.sampled_from(self.submitted))  # it may have ended
        self.engine.cancel(work)
        if work in self.unfinished:
            self.unfinished.remove(work)

    @rule(rows=st.integers(1, 6))
    def memory_runs_short(self, rows: int) -> None:
        self.stepper.memory = rows
        self.least_memory = min(self.least_memory, rows)

    @rule()
    def memory_comes_back(self) -> None:
        self.stepper.memory = PLENTY

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            waiting = self._waiting()
            told = {id(w): len(w.tokens) for w in self.submitted if isinstance(w, Row)}
            for event in self.engine.step():
                if isinstance(event, TokenEvent):
                    assert event.sequence in self.unfinished, "nothing comes after the end"
                    assert event.index == told[id(event.sequence)], "each token is told once"
                    told[id(event.sequence)] += 1
                    if event.finish_reason:
                        self.unfinished.remove(event.sequence)
                        assert event.sequence.tokens == alone(event.sequence)
                elif isinstance(event, ForwardEvent):
                    self.unfinished.remove(event.forward)
                else:
                    self._failed(event)
            self._check_turns(waiting, bool(self.traces[-1].put_back))

    def _failed(self, event: FailureEvent) -> None:
        work = event.work
        self.unfinished.remove(work)
        if str(event.error) == DOES_NOT_FIT:
            assert isinstance(work, Row)
            assert work.decoding.num_beams > self.least_memory
        else:
            assert work.src[0] != WELL, f"it was not at fault: {event.error}"

    # --- what always holds -----------------------------------------------------------------------

    def _waiting(self) -> list[Row]:
        return list(self.engine.scheduler._sequences)

    def _check_turns(self, waiting: list[Row], put_back: bool) -> None:
        """Every request has its turn, and its works of one size keep their order."""
        still = set(self._waiting())
        taken = [row for row in waiting if row not in still]
        for row in taken:
            alike = [w for w in waiting if size(w) == size(row)]
            assert not still & set(alike[: alike.index(row)]), "an earlier one of its size waits"
        if put_back:
            self.turns_missed.clear()  # those had their turn before, and go first
        elif taken:
            served = {row.request for row in taken}
            for request in {row.request for row in waiting}:
                missed = 0 if request in served else self.turns_missed.get(request, 0) + 1
                self.turns_missed[request] = missed
                assert missed < 3, "there are three requests"

    @invariant()
    def nothing_is_lost_or_held_twice(self) -> None:
        engine = self.engine
        searched = {id(row) for search in engine._searches.values() for row in search.rows}
        plain = [row for row in engine.scheduler.rows if id(row) not in searched]
        held = [*plain, *engine._searches, *self._waiting(), *engine.scheduler._forwards]
        assert sorted(map(id, held)) == sorted(map(id, self.unfinished))
        assert engine.waiting == len(self._waiting()) + len(list(engine.scheduler._forwards))
        assert set(engine._paused) <= set(self._waiting())

    @invariant()
    def rows_and_their_cache_are_one(self) -> None:
        rows = self.engine.scheduler.rows
        assert self.stepper.cached == [row.target[:-1] for row in rows]
        assert len(rows) <= self.config.max_rows
        dear = max((row.reserved_tokens for row in rows), default=0)
        assert len(rows) * dear <= self.config.max_cache_tokens

    def teardown(self) -> None:
        """With memory again, everything ends and nothing is left."""
        self.stepper.memory = PLENTY
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.step(1)
            self.nothing_is_lost_or_held_twice()
        assert not self.unfinished
        assert not self.stepper.cached
        assert not self.engine._searches
        assert not self.engine._paused


Histories.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
TestHistories = Histories.TestCase
