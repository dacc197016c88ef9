"""Recorded steps say what steps say: with a stand-in for the recorder here, with graphs on CUDA."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import EngineConfig
from model.engine import Engine
from model.graphs import Repeat, StepGraphs, bucket, record
from model.loader import LoadedModel, load_model
from model.sequence import Decoding, FailureEvent, TokenEvent
from model.sequence import Sequence as Row
from model.steppers import CachedStepper
from tests.builders import (
    make_byt5_model,
    make_m2m_model,
    make_marian_model,
    make_native_model,
    make_relative_model,
)

MAKERS: list[Callable[..., Path]] = [
    make_native_model,
    make_relative_model,
    make_marian_model,
    make_m2m_model,
    make_byt5_model,
]
NAMES = [make.__name__.split("_")[1] for make in MAKERS]


class Recorder:
    """Repeats a computation by running it, into the tensor of its first result, as graphs do."""

    def __init__(self) -> None:
        self.recorded = self.repeated = 0

    def __call__(self, run: Callable[[], Tensor]) -> Repeat:
        self.recorded += 1
        result = run()

        def repeat() -> Tensor:
            self.repeated += 1
            return result.copy_(run())

        return repeat


def rows_of(model: LoadedModel, count: int, **decoding: Any) -> list[Row]:
    """Sources of all lengths, an empty prefix or one, and ends at any time."""
    draw = random.Random(count)
    vocab = range(4, min(model.spec.src_vocab_size, model.spec.tgt_vocab_size))

    def row() -> Row:
        src = [*draw.choices(vocab, k=draw.randint(1, 8)), model.spec.eos_ids[0]]
        prefix = [*model.spec.decoder_start_ids, *draw.choices(vocab, k=draw.randint(0, 3))]
        return Row(src, prefix, Decoding(draw.randint(1, 12), **decoding))

    return [row() for _ in range(count)]


def answers(engine: Engine, rows: list[Row]) -> list[list[int]]:
    """Tokens of rows that come in one after the other, while others leave."""
    coming = list(rows)
    while coming or engine.has_work:
        for row in coming[:3]:
            engine.submit(row)
        del coming[:3]
        for event in engine.step():
            assert not isinstance(event, FailureEvent), event.error
            assert isinstance(event, TokenEvent)
    return [row.tokens for row in rows]


def recording(model: LoadedModel, record: Callable[..., Repeat]) -> Engine:
    engine = Engine(model, EngineConfig(max_rows=11, lookahead=0))
    stepper = engine.stepper
    assert isinstance(stepper, CachedStepper)
    stepper.graphs = StepGraphs(stepper.network, stepper.targets, stepper.sources, record)
    return engine


@pytest.mark.parametrize("make", MAKERS, ids=NAMES)
def test_recorded_steps_say_what_steps_say(make: Callable[..., Path], tmp_path: Path) -> None:
    model = load_model(make(tmp_path), "cpu")
    plain = answers(Engine(model, EngineConfig(max_rows=11, lookahead=0)), rows_of(model, 40))
    recorder = Recorder()
    engine = recording(model, recorder)
    assert answers(engine, rows_of(model, 40)) == plain
    assert recorder.repeated > 4 * recorder.recorded > 0
    assert answers(engine, rows_of(model, 40)) == plain, "and again, on caches that are there"
    before = recorder.recorded
    assert answers(engine, rows_of(model, 40)) == plain
    assert recorder.recorded == before, "all sizes are known by now"


def test_rows_that_share_a_source_are_not_recorded(tmp_path: Path) -> None:
    model = load_model(make_native_model(tmp_path), "cpu")
    beams = {"num_beams": 2, "early_stopping": True}
    expected = answers(Engine(model, EngineConfig(max_rows=11)), rows_of(model, 6, **beams))
    recorder = Recorder()
    assert answers(recording(model, recorder), rows_of(model, 6, **beams)) == expected
    assert recorder.recorded == 0


def test_recordings_return_the_memory_that_they_hold(tmp_path: Path) -> None:
    model = load_model(make_native_model(tmp_path), "cpu")
    recorder = Recorder()
    engine = recording(model, recorder)
    first = answers(engine, rows_of(model, 9))
    stepper = engine.stepper
    assert isinstance(stepper, CachedStepper)
    held = weakref.ref(stepper.targets.pool.tensor)
    before = recorder.recorded
    stepper.release()
    gc.collect()
    assert held() is None
    assert answers(engine, rows_of(model, 9)) == first
    assert recorder.recorded > before


def test_steps_are_recorded_for_few_numbers_of_rows() -> None:
    assert [bucket(rows) for rows in (1, 2, 3, 5, 8, 9, 16, 17, 64)] == [
        *(1, 2, 4, 8, 8, 16, 16, 24, 64),
    ]


def test_what_rows_in_excess_leave_harms_nobody(tmp_path: Path) -> None:
    model = load_model(make_native_model(tmp_path), "cpu")
    engine = recording(model, Recorder())
    answers(engine, rows_of(model, 9))
    stepper = engine.stepper
    assert isinstance(stepper, CachedStepper)
    assert stepper.targets.pool.tensor.isfinite().all()
    assert stepper.targets.pool.tensor.shape[2] >= 11, "rows in excess were there"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("make", MAKERS, ids=NAMES)
def test_graphs_say_what_steps_say(make: Callable[..., Path], tmp_path: Path) -> None:
    model = load_model(make(tmp_path), "cuda")
    plain = answers(Engine(model, EngineConfig(max_rows=11, lookahead=0)), rows_of(model, 40))
    assert answers(recording(model, record), rows_of(model, 40)) == plain
