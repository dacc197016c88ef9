"""Where the time of a step goes."""

from __future__ import annotations

import time

import pytest
import torch

from model.timing import Stopwatch


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
