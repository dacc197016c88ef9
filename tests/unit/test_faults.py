"""Whose fault it is; and a real model whose steps fail: nobody but the one at fault sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from model.cache import EncoderCache
from model.config import EngineConfig
from model.engine import Engine, StepTrace
from model.faults import (
    DOES_NOT_FIT,
    GenerationError,
    is_fatal,
    is_out_of_memory,
    isolated,
)
from model.loader import LoadedModel, load_model
from model.sequence import (
    AttentionMaps,
    Decoding,
    Event,
    FailureEvent,
    Forward,
    ForwardEvent,
    TokenEvent,
)
from model.sequence import Sequence as Row
from model.steppers import CachedStepper
from tests.builders import make_native_model

SICK = 9
"""The source whose rows fail."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_native_model(tmp_path_factory.mktemp("native")), device="cpu")


def nothing(rows: Sequence[Row]) -> None:
    """No fault."""


@dataclass
class FaultyStepper:
    """A stepper whose calls may fail half-way, after they have written to the caches.

    Attributes:
        on_join, on_step, on_forward: told the rows or passes of each call; may raise.
        memory: rows that fit into memory.
    """

    inner: CachedStepper
    on_join: Callable[[Sequence[Row]], None] = nothing
    on_step: Callable[[Sequence[Row]], None] = nothing
    on_forward: Callable[[Sequence[Forward]], None] = lambda passes: None
    memory: int = 1000
    live: int = 0

    @property
    def encoder_cache(self) -> EncoderCache:
        return self.inner.encoder_cache

    def expect(self, joining: Sequence[Row], soon: Sequence[Row]) -> None:
        pass

    def join(self, rows: Sequence[Row]) -> None:
        if self.live + len(rows) > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.on_join(rows)
        self.inner.join(rows)
        self.live += len(rows)

    def step(self, rows: Sequence[Row], first: int = 0) -> Tensor:
        if self.live > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        try:
            self.on_step(rows)
        except Exception:
            # What a kernel that fails late leaves behind: a position half written.
            lengths = self.inner.targets.pool.lengths
            self.inner.targets.next_positions(slice(first, first + len(rows)))
            for row in range(first, first + len(rows)):
                self.inner.targets.pool.tensor[:, :, row, :, lengths[row]] = torch.nan
            raise
        return self.inner.step(rows, first)

    def keep(self, rows: Sequence[int]) -> None:
        self.inner.keep(rows)
        self.live = len(rows)

    def better_order(self) -> list[int] | None:
        return self.inner.better_order()

    def release(self) -> None:
        self.inner.release()

    def forward(self, passes: Sequence[Forward]) -> list[Tensor]:
        self.on_forward(passes)
        return self.inner.forward(passes)

    def attention(self, passes: Sequence[Forward]) -> list[AttentionMaps]:
        self.on_forward(passes)
        return self.inner.attention(passes)


def faulty(model: LoadedModel, **config: int) -> tuple[Engine, FaultyStepper, list[StepTrace]]:
    """An engine, its stepper and what its steps did."""
    traces: list[StepTrace] = []
    steppers: list[FaultyStepper] = []

    def stepper(config: EngineConfig) -> FaultyStepper:
        inner = model.stepper(config)
        assert isinstance(inner, CachedStepper)
        steppers.append(FaultyStepper(inner))
        return steppers[-1]

    engine = Engine(replace(model, stepper=stepper), EngineConfig(**config), traces.append)
    return engine, steppers[0], traces


def some_rows() -> list[Row]:
    """Greedy, drawn and searched for."""
    return [
        Row([5, 8, 2], [1], Decoding(20)),
        Row([6, 2], [1, 7, 7], Decoding(25, sample=True, seed=3)),
        Row([SICK, 7, 7, 2], [1], Decoding(12)),
        Row([7, 9, 6, 2], [1], Decoding(15, num_beams=3)),
        Row([8, 2], [1], Decoding(9, sample=True, seed=4, temperature=1.3)),
        Row([5, 5, 5, 2], [1, 4], Decoding(18, repetition_penalty=1.2)),
    ]


def fresh(row: Row) -> Row:
    return Row(list(row.src), list(row.prefix), row.decoding)


def alone(model: LoadedModel, row: Row) -> list[int]:
    engine = Engine(model, EngineConfig())
    engine.submit(again := fresh(row))
    list(engine.run())
    return again.tokens


def run(engine: Engine, works: Sequence[Row | Forward]) -> list[Event]:
    for work in works:
        engine.submit(work)
    return list(engine.run())


def failures(events: Sequence[Event]) -> dict[int, Exception]:
    """Work -> its error."""
    return {id(event.work): event.error for event in events if isinstance(event, FailureEvent)}


def indices(events: Sequence[Event], row: Row) -> list[int]:
    """Of the tokens told of a row."""
    return [e.index for e in events if isinstance(e, TokenEvent) and e.sequence is row]


def out_of_memory_on_cpu() -> RuntimeError:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    return raised.value


# --- whose fault it is ---------------------------------------------------------------------------


def test_running_out_of_memory_is_told_from_other_errors() -> None:
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA"), out_of_memory_on_cpu()):
        assert is_out_of_memory(error)
        assert not is_fatal(error)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert is_fatal(torch.AcceleratorError("CUDA error: an illegal memory access"))


def test_only_items_at_fault_fail_and_the_order_stays() -> None:
    runs: list[Sequence[int]] = []

    def double(items: Sequence[int]) -> list[int]:
        runs.append(items)
        if {3, 6} & set(items):
            raise ValueError(items)
        return [2 * item for item in items]

    parts = isolated(double, range(8))
    assert [item for items, _ in parts for item in items] == list(range(8))
    bad = [items[0] for items, result in parts if isinstance(result, Exception)]
    good = [x for _, result in parts if isinstance(result, list) for x in result]
    assert (bad, good) == ([3, 6], [0, 2, 4, 8, 10, 14])
    assert len(runs) < 2 * 8


def test_an_error_that_is_nobody_s_is_raised_at_once() -> None:
    runs = []

    def lost(items: Sequence[int]) -> None:
        runs.append(items)
        raise torch.AcceleratorError("CUDA error: device lost")

    with pytest.raises(torch.AcceleratorError):
        isolated(lost, range(8))
    assert len(runs) == 1


# --- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_row_that_cannot_be_stepped_fails_alone(model: LoadedModel, at: int) -> None:
    rows = some_rows()
    expected = [alone(model, row) for row in rows]
    engine, stepper, _ = faulty(model)

    def sick(part: Sequence[Row]) -> None:
        if any(row.src[0] == SICK and len(row.tokens) == at for row in part):
            raise RuntimeError("sick")

    stepper.on_step = sick
    events = run(engine, rows)
    assert {id(rows[2])} == failures(events).keys()
    expected[2] = expected[2][:at]
    assert [row.tokens for row in rows] == expected


def test_a_beam_that_cannot_be_stepped_fails_its_search_alone(model: LoadedModel) -> None:
    rows = some_rows()
    expected = [alone(model, row) for row in rows]
    engine, stepper, _ = faulty(model)

    def sick(part: Sequence[Row]) -> None:
        if any(row.decoding.num_beams > 1 and len(row.tokens) == 3 for row in part):
            raise RuntimeError("sick")

    stepper.on_step = sick
    events = run(engine, rows)
    assert failures(events).keys() == {id(rows[3])}
    others = [0, 1, 2, 4, 5]
    assert [rows[i].tokens for i in others] == [expected[i] for i in others]


def test_parameters_that_cannot_be_applied_fail_their_row_alone(model: LoadedModel) -> None:
    rows = some_rows()
    expected = [alone(model, row) for row in rows]
    rows[2] = Row(rows[2].src, [1], Decoding(12, logit_bias=((10_000, 1.0),)))  # no such token
    engine, _, _ = faulty(model)
    events = run(engine, rows)
    assert failures(events).keys() == {id(rows[2])}
    others = [0, 1, 3, 4, 5]
    assert [rows[i].tokens for i in others] == [expected[i] for i in others]


def test_a_row_that_joins_where_a_failed_one_lay_sees_nothing_of_it(model: LoadedModel) -> None:
    engine, stepper, _ = faulty(model)
    long, late = Row([5, 2], [1], Decoding(30)), some_rows()[4]
    sick = Row([SICK, 2], [1] * 6, Decoding(30))  # the longest, when it fails
    expected = [alone(model, long), alone(model, late)]
    for row in (long, sick):
        engine.submit(row)
    for _ in range(4):
        engine.step()

    def fail(part: Sequence[Row]) -> None:
        if sick in part:
            raise RuntimeError("sick")

    stepper.on_step = fail
    assert failures(engine.step()).keys() == {id(sick)}
    run(engine, [late])
    assert [long.tokens, late.tokens] == expected


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [3, 4, 6])
@pytest.mark.parametrize("at", [0, 4])
def test_where_memory_runs_out_rows_wait_again_and_nobody_sees_it(
    model: LoadedModel, memory: int, at: int
) -> None:
    rows = some_rows()
    expected = [alone(model, row) for row in rows]
    engine, stepper, traces = faulty(model)
    for row in rows:
        engine.submit(row)
    events = [event for _ in range(at) for event in engine.step()]
    stepper.memory = memory
    events.extend(engine.run())
    assert not failures(events)
    assert [row.tokens for row in rows] == expected
    for row in rows:
        assert indices(events, row) == list(range(len(row.tokens))), "each token is told once"
    assert any(trace.put_back for trace in traces)
    assert engine.scheduler.rows == []
    assert not stepper.inner.targets.pool.tensor.any()


def test_memory_is_returned_before_the_next_attempt(model: LoadedModel) -> None:
    engine, stepper, traces = faulty(model)
    rows = some_rows()
    for row in rows:
        engine.submit(row)
    engine.step()
    assert stepper.encoder_cache.bytes
    stepper.memory = 4
    engine.step()
    assert set(traces[-1].put_back) == set(rows)
    assert stepper.inner.targets.pool.tensor.numel() == 0
    assert stepper.inner.sources.pool.tensor.numel() == 0
    assert stepper.encoder_cache.bytes == 0


def test_after_running_out_of_memory_the_rows_come_back_one_by_one(model: LoadedModel) -> None:
    engine, stepper, traces = faulty(model, max_rows=8)
    rows = [Row([5, n, 2], [1], Decoding(3 + n)) for n in range(4, 28)]
    stepper.memory = 5
    run(engine, rows)
    stepper.memory = 1000
    run(engine, [fresh(row) for row in rows])
    assert max(len(trace.rows) for trace in traces) == 8


def test_what_does_not_fit_even_alone_fails_with_a_clear_error(model: LoadedModel) -> None:
    engine, stepper, _ = faulty(model)
    wide, narrow = Row([5, 2], [1], Decoding(8, num_beams=4)), Row([6, 2], [1], Decoding(8))
    expected = alone(model, narrow)
    stepper.memory = 3
    events = run(engine, [wide, narrow])
    [error] = failures(events).values()
    assert isinstance(error, GenerationError)
    assert str(error) == DOES_NOT_FIT
    assert narrow.tokens == expected


def test_a_cancelled_sequence_that_waits_again_is_forgotten(model: LoadedModel) -> None:
    engine, stepper, _ = faulty(model)
    rows = some_rows()
    for row in rows:
        engine.submit(row)
    engine.step()
    stepper.memory = 2
    engine.step()
    for row in rows:
        engine.cancel(row)
    assert not engine.has_work
    assert not engine._paused


def test_moving_rows_may_run_out_of_memory_too(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = some_rows()
    expected = [alone(model, row) for row in rows]
    engine, stepper, _ = faulty(model)
    keep, failed = stepper.inner.keep, []

    def short(kept: Sequence[int]) -> None:
        if kept and len(failed) < 3:
            failed.append(kept)
            raise torch.OutOfMemoryError("CUDA out of memory")
        keep(kept)

    monkeypatch.setattr(stepper.inner, "keep", short)
    assert not failures(run(engine, rows))
    assert len(failed) == 3
    assert [row.tokens for row in rows] == expected


# --- joining, and passes -------------------------------------------------------------------------


def test_a_sequence_that_cannot_join_fails_alone(model: LoadedModel) -> None:
    rows = some_rows()
    expected = [alone(model, row) for row in rows]
    rows[2] = Row([10_000, 2], [1], Decoding(5))  # an id that is in no table
    engine, _, traces = faulty(model)
    events = run(engine, rows)
    assert failures(events).keys() == {id(rows[2])}
    others = [0, 1, 3, 4, 5]
    assert [rows[i].tokens for i in others] == [expected[i] for i in others]
    assert set(traces[0].joined) == {rows[i] for i in others}


def test_a_prefix_that_fails_leaves_nothing_behind(model: LoadedModel) -> None:
    engine, stepper, _ = faulty(model)
    long = Row([5, 2], [1], Decoding(30))
    expected = alone(model, long)
    engine.submit(long)
    for _ in range(8):
        engine.step()
    original = stepper.inner.network.decoder.forward

    def spoiled(*args: object) -> Tensor:
        stepper.inner.targets.pool.tensor[:, :, 1] = torch.nan
        raise RuntimeError("half-way")

    stepper.inner.network.decoder.forward = spoiled  # type: ignore[method-assign]
    engine.submit(Row([6, 2], [1, 4, 5], Decoding(5)))
    try:
        joined = engine.scheduler.schedule().joining
        events: list[Event] = []
        with torch.inference_mode():
            engine._join(joined, events)
    finally:
        stepper.inner.network.decoder.forward = original  # type: ignore[method-assign]
    assert len(failures(events)) == 1
    late = Row([7, 2], [1], Decoding(5))
    wanted = alone(model, late)
    run(engine, [late])
    assert (long.tokens, late.tokens) == (expected, wanted)


def test_a_pass_that_fails_fails_alone(model: LoadedModel) -> None:
    engine, stepper, _ = faulty(model)
    passes = [Forward([n, 2], [1]) for n in (5, 6, SICK, 7)]
    passes += [Forward([n, 2], [1], attention=True) for n in (5, SICK)]

    def sick(part: Sequence[Forward]) -> None:
        if any(work.src[0] == SICK for work in part):
            raise RuntimeError("sick")

    stepper.on_forward = sick
    events = run(engine, passes)
    assert failures(events).keys() == {id(passes[2]), id(passes[5])}
    answered = {id(event.forward) for event in events if isinstance(event, ForwardEvent)}
    assert answered == {id(passes[i]) for i in (0, 1, 3, 4)}


def test_passes_that_do_not_fit_together_run_in_parts(model: LoadedModel) -> None:
    engine, stepper, _ = faulty(model)

    def short(part: Sequence[Forward]) -> None:
        if len(part) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    stepper.on_forward = short
    events = run(engine, [Forward([n, 2], [1]) for n in range(4, 12)])
    assert len(events) == 8
    assert all(isinstance(event, ForwardEvent) for event in events)


def test_a_lost_device_is_the_engine_s_end(model: LoadedModel) -> None:
    for kind in ("on_join", "on_step"):
        engine, stepper, _ = faulty(model)

        def lost(rows: Sequence[Row]) -> None:
            raise torch.AcceleratorError("CUDA error: device lost")

        setattr(stepper, kind, lost)
        engine.submit(Row([5, 2], [1], Decoding(5)))
        with pytest.raises(torch.AcceleratorError):
            engine.step()
