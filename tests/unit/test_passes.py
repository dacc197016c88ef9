"""Passes are read from few logits at a time, and report what all of them at once would say."""

from __future__ import annotations

import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import model.passes
from model.config import EngineConfig
from model.engine import Engine
from model.loader import load_model
from model.passes import MAX_LOGITS, Piece, read_out, slabs
from model.sequence import Forward, ForwardEvent
from tests.builders import make_native_model

VOCAB = 37


class Recorder:
    """An output layer that notes how many rows it was asked for, and how much is alive of it."""

    def __init__(self) -> None:
        self.layer = nn.Linear(8, VOCAB).requires_grad_(False)
        self.rows: list[int] = []
        self.alive: list[int] = []
        self._given: list[weakref.ref[Any]] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        self.alive.append(sum(given() is not None for given in self._given))
        self.rows.append(len(hidden))
        logits: Tensor = self.layer(hidden)
        # Of the memory itself: views of it may outlive the tensor.
        self._given.append(weakref.ref(logits.untyped_storage()))
        return logits


def draw_passes(count: int, seed: int = 0) -> tuple[list[Forward], list[Tensor]]:
    """Passes that ask for everything there is, with hidden states."""
    rng = random.Random(seed)
    passes = []
    for i in range(count):
        tgt = rng.choices(range(VOCAB), k=rng.randint(1, 30))
        labels = rng.choices(range(VOCAB), k=len(tgt))
        asked: list[dict[str, Any]] = [
            {"positions": "all", "labels": labels},
            {"positions": "all", "top_k": 5},
            {"positions": "last", "top_k": 99},
            {"positions": "all"},
            {"positions": "last"},
        ]
        passes.append(Forward([5], tgt, **asked[i % len(asked)]))
    draw = torch.Generator().manual_seed(seed)
    lengths = [len(p.tgt) if p.positions == "all" else 1 for p in passes]
    return passes, [torch.randn(length, 8, generator=draw) for length in lengths]


def check_same(found: ForwardEvent, expected: ForwardEvent) -> None:
    assert found.forward is expected.forward
    for name in ("logits", "ids", "logprobs"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 10_000])
def test_the_size_of_slabs_changes_no_answer(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, hidden = draw_passes(20)
    output = Recorder()
    together = read_out(passes, hidden, output, VOCAB)
    assert output.rows == [sum(map(len, hidden))]
    for event, states in zip(together, hidden, strict=True):
        logits = output.layer(states)
        if event.ids is not None:
            assert event.logprobs is not None
            expected = logits.log_softmax(-1).gather(1, event.ids)
            torch.testing.assert_close(event.logprobs, expected, atol=1e-6, rtol=1e-6)
            logits = logits.gather(1, event.ids)
        torch.testing.assert_close(event.logits, logits, atol=1e-6, rtol=1e-6)
    monkeypatch.setattr(model.passes, "MAX_LOGITS", rows * VOCAB + VOCAB - 1)
    for found, expected_event in zip(
        read_out(passes, hidden, output, VOCAB), together, strict=True
    ):
        check_same(found, expected_event)


def test_labels_are_reported_in_order() -> None:
    labels = [3, 1, 4, 1, 5]
    forward = Forward([5], [0] * 5, "all", labels=labels)
    [event] = read_out([forward], [torch.randn(5, 8)], Recorder(), VOCAB)
    assert event.ids is not None
    assert event.ids[:, 0].tolist() == labels


def test_logits_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slab has more than its share, and none is left when the next one is formed."""
    passes, hidden = draw_passes(60, seed=1)
    monkeypatch.setattr(model.passes, "MAX_LOGITS", 16 * VOCAB)
    output = Recorder()
    events = read_out(passes, hidden, output, VOCAB)
    assert len(events) == 60  # they are alive, full rows of logits among them
    assert sum(output.rows) == sum(map(len, hidden))
    assert set(output.rows[:-1]) == {16}
    assert not any(output.alive)


def test_a_vocabulary_wider_than_the_bound_is_read_position_by_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model.passes, "MAX_LOGITS", VOCAB - 1)
    output = Recorder()
    read_out(*draw_passes(5), output, VOCAB)
    assert set(output.rows) == {1}


def test_the_bound_is_128_mebibytes_of_float32() -> None:
    assert MAX_LOGITS * 4 == 128 * 2**20


@torch.inference_mode()
def test_an_engine_scores_a_chunk_in_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(make_native_model(tmp_path), "cpu")
    vocab = loaded.spec.tgt_vocab_size
    draw = random.Random(3)

    def scored() -> list[Tensor]:
        draw.seed(3)
        engine = Engine(loaded, EngineConfig())
        for _ in range(12):
            labels = draw.choices(range(4, vocab), k=20)
            engine.submit(Forward([5, 6, 2], [1, *labels[:-1]], "all", labels=labels))
        return [
            e.logprobs
            for e in engine.run()
            if isinstance(e, ForwardEvent) and e.logprobs is not None
        ]

    rows: list[int] = []
    network: Any = loaded.network
    hook = network.output.register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
    try:
        together = scored()
        assert rows == [12 * 20]
        rows.clear()
        monkeypatch.setattr(model.passes, "MAX_LOGITS", 50 * vocab)
        apart = scored()
    finally:
        hook.remove()
    assert rows == [50, 50, 50, 50, 40]
    for found, expected in zip(apart, together, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_slabs_cut_passes_where_they_are_full() -> None:
    assert list(slabs([2, 5, 1], 3)) == [
        [Piece(0, 0, 2), Piece(1, 0, 1)],
        [Piece(1, 1, 4)],
        [Piece(1, 4, 5), Piece(2, 0, 1)],
    ]
    assert list(slabs([], 3)) == []
    assert list(slabs([3], 3)) == [[Piece(0, 0, 3)]]
