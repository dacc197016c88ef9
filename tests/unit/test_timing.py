"""Where the time of a step goes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from model.config import EngineConfig
from model.engine import Engine, Padding, StepTrace
from model.loader import load_model
from model.sequence import Decoding, Forward, Sequence
from model.timing import Stopwatch
from tests.builders import make_native_model


def test_a_phase_is_what_ran_since_the_last_mark() -> None:
    watch = Stopwatch(torch.device("cpu"))
    watch.start()
    time.sleep(0.02)
    watch.lap("decode")
    watch.lap("sample")
    time.sleep(0.01)
    watch.lap("decode")
    seconds = watch.seconds()
    assert seconds["decode"] >= 0.03
    assert seconds["sample"] < 0.01


def test_each_step_begins_anew() -> None:
    watch = Stopwatch(torch.device("cpu"))
    watch.start()
    watch.lap("encode")
    watch.start()
    assert watch.seconds() == {}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_a_phase_is_as_long_as_its_kernels_run() -> None:
    device = torch.device("cuda")
    square = torch.rand(8192, 8192, device=device)
    (square @ square).sum().item()
    watch = Stopwatch(device)
    watch.start()
    began = time.perf_counter()
    product = square @ square
    queued = time.perf_counter() - began
    watch.lap("decode")
    product.sum().item()
    watch.lap("sample")
    seconds = watch.seconds()
    assert seconds["decode"] > 2 * queued
    assert seconds["sample"] < seconds["decode"]


def test_a_step_tells_its_phases_and_how_much_of_it_was_padding(tmp_path: Path) -> None:
    traces: list[StepTrace] = []
    engine = Engine(load_model(make_native_model(tmp_path), "cpu"), EngineConfig(), traces.append)
    decoding = Decoding(max_new_tokens=2, min_new_tokens=2)
    engine.submit(Sequence([5, 6, 7, 2], [1], decoding))
    engine.submit(Sequence([5, 2], [1, 8, 9], decoding))
    engine.submit(Forward([5, 2], [1]))
    list(engine.run())
    first, second = traces
    assert first.phases.keys() == {"encode", "forward", "decode", "sample"}
    assert second.phases.keys() == {"decode", "sample"}
    assert (first.sources, first.targets) == (Padding(6, 8), Padding(4, 6))
    assert (second.sources, second.targets) == (Padding(), Padding(6, 8))
    for trace in traces:
        assert 0 < sum(trace.phases.values()) <= trace.seconds
