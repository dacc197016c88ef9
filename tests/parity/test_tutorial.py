"""The family `tutorial` against a plain transcription of the tutorial's equations.

The transcription works on the raw state dict, one sequence at a time, and shares nothing with
`model/`: no layers, no masks of padding, no batches. It computes in float64, so that what differs
is the model's own rounding. Checkpoints are drawn at random.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import EngineConfig
from model.engine import Engine
from model.loader import LoadedModel, load_model
from model.sequence import Decoding, Forward, ForwardEvent
from model.sequence import Sequence as Row
from tests.builders import (
    TINY_TUTORIAL,
    make_tutorial_model,
    tutorial_positions,
    tutorial_tensors,
)

VOCAB, BLOCK = TINY_TUTORIAL["vocab_size"], TINY_TUTORIAL["block_size"]
ATOL = 1e-5


# --- the transcription -------------------------------------------------------------------------


class Transcription:
    """The tutorial's `forward(idx)`, line by line.

    Args:
        tensors: its state dict, under the tutorial's own names.
        heads, layers: `n_heads`, `n_layer`.
        residual: "standard" or "normalized".
    """

    def __init__(
        self, tensors: dict[str, Tensor], heads: int, layers: int, residual: str = "standard"
    ) -> None:
        self.t = {name: tensor.double() for name, tensor in tensors.items()}
        self.heads = heads
        self.layers = layers
        self.normalized = residual == "normalized"

    def norm(self, name: str, x: Tensor) -> Tensor:
        n = x.shape[-1]
        mean = x.sum(-1, keepdim=True) / n
        std = (((x - mean) ** 2).sum(-1, keepdim=True) / (n - 1)) ** 0.5
        return self.t[f"{name}.a_2"] * (x - mean) / (std + 1e-6) + self.t[f"{name}.b_2"]

    def attention(self, name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        wq, wk, wv, wo = (self.t[f"{name}.{w}.weight"] for w in ("wq", "wk", "wv", "wo"))
        q, k, v = q @ wq.T, k @ wk.T, v @ wv.T
        width = q.shape[-1] // self.heads
        outputs = []
        for head in range(self.heads):
            part = slice(head * width, (head + 1) * width)
            scores = q[:, part] @ k[:, part].T / math.sqrt(width)
            if causal:
                for t in range(len(scores)):
                    scores[t, t + 1 :] = -math.inf
            outputs.append(torch.softmax(scores, dim=-1) @ v[:, part])
        return torch.cat(outputs, dim=-1) @ wo.T

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        return (x @ self.t[f"{name}.w1.weight"].T).clamp(min=0) @ self.t[f"{name}.w2.weight"].T

    def encoder_layer(self, name: str, x: Tensor) -> Tensor:
        y = self.norm(f"{name}.attention_norm", x)
        h = (y if self.normalized else x) + self.attention(f"{name}.attention", y, y, y)
        y = self.norm(f"{name}.fnn_norm", h)
        return h + self.feed_forward(f"{name}.feed_forward", y)

    def decoder_layer(self, name: str, x: Tensor, memory: Tensor) -> Tensor:
        y = self.norm(f"{name}.attention_norm_1", x)
        masked = self.attention(f"{name}.mask_attention", y, y, y, causal=True)
        x = (y if self.normalized else x) + masked
        y = self.norm(f"{name}.attention_norm_2", x)
        cross = self.attention(f"{name}.attention", y, memory, memory)
        h = (y if self.normalized else x) + cross
        last = "ffn_norm" if f"{name}.ffn_norm.a_2" in self.t else "fnn_norm"
        return h + self.feed_forward(f"{name}.feed_forward", self.norm(f"{name}.{last}", h))

    def logits(self, src: Sequence[int], tgt: Sequence[int]) -> Tensor:
        """``[tgt, vocab]``; the tutorial's own call has src = tgt."""
        table = self.t["transformer.wte.weight"]
        pe = tutorial_positions(max(len(src), len(tgt)), table.shape[1]).double()
        memory = table[list(src)] + pe[: len(src)]
        for i in range(self.layers):
            memory = self.encoder_layer(f"transformer.encoder.layers.{i}", memory)
        memory = self.norm("transformer.encoder.norm", memory)
        x = table[list(tgt)] + pe[: len(tgt)]
        for i in range(self.layers):
            x = self.decoder_layer(f"transformer.decoder.layers.{i}", x, memory)
        return self.norm("transformer.decoder.norm", x) @ self.t["lm_head.weight"].T

    def greedy(self, ids: list[int], new_tokens: int, eos: int | None = None) -> list[int]:
        """Re-submit the grown sequence for each token."""
        grown = list(ids)
        while len(grown) < min(BLOCK, len(ids) + new_tokens):
            grown.append(int(self.logits(grown, grown)[-1].argmax()))
            if grown[-1] == eos:
                break
        return grown[len(ids) :]


VARIANTS: list[dict[str, Any]] = [
    {},
    {"residual": "standard", "feed_forward_norm": "ffn_norm"},
    {"residual": "normalized", "feed_forward_norm": "ffn_norm"},
    {"residual": "normalized", "feed_forward_norm": "fnn_norm"},
    {"hidden": 50, "n_layer": 3, "n_heads": 2},
    {"n_heads": 1, "n_layer": 1},
    {"tied": True},
]
"""Of equations."""

FILES: list[dict[str, Any]] = [
    {"buffers": False},
    {"file": "model.pt"},
    {"file": "transformer.pt", "buffers": False, "prefix": "module."},
    {"file": "checkpoint.pth", "wrapper": "model"},
    {"file": "checkpoint.pt", "wrapper": "model", "prefix": "module."},
    {"prefix": "module."},
]
"""In which the same tensors may lie."""


def load(directory: Path, seed: int = 0, **options: Any) -> tuple[LoadedModel, Transcription]:
    make_tutorial_model(directory, seed, **options)
    sizes = {k: options.get(k, default) for k, default in TINY_TUTORIAL.items()}
    norm = options.get("feed_forward_norm", "fnn_norm")
    tensors = tutorial_tensors(sizes, seed, norm, tied=options.get("tied", False))
    reference = Transcription(
        tensors, sizes["n_heads"], sizes["n_layer"], options.get("residual", "standard")
    )
    return load_model(directory, "cpu"), reference


def prompts(count: int, seed: int = 0, longest: int = 12) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def passes(model: LoadedModel, work: Sequence[Forward]) -> list[Tensor]:
    """Logits through the engine, all passes submitted at once."""
    engine = Engine(model, EngineConfig())
    for forward in work:
        engine.submit(forward)
    found = {id(e.forward): e.logits for e in engine.run() if isinstance(e, ForwardEvent)}
    return [found[id(forward)] for forward in work]


def generate(model: LoadedModel, rows: Sequence[Row]) -> None:
    engine = Engine(model, EngineConfig(max_rows=4))
    for row in rows:
        engine.submit(row)
    for _ in engine.run():
        pass


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=ATOL, rtol=ATOL)


# --- logits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_position_equal_the_transcription(
    tmp_path: Path, variant: dict[str, Any]
) -> None:
    model, reference = load(tmp_path, **variant)
    for ids in [*prompts(4), list(range(VOCAB)) + list(range(BLOCK - VOCAB))]:
        (found,) = passes(model, [Forward(ids, ids, positions="all")])
        expected = reference.logits(ids, ids)
        assert expected.std() > 0.5
        close(found, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_in_ragged_batches_equal_the_transcription(
    tmp_path: Path, variant: dict[str, Any]
) -> None:
    model, reference = load(tmp_path, seed=1, **variant)
    work = [Forward(ids, ids, positions="all") for ids in prompts(16, seed=1)]
    work += [Forward(ids, ids, positions="last") for ids in prompts(8, seed=2)]
    assert len({len(forward.src) for forward in work}) > 5
    for forward, found in zip(work, passes(model, work), strict=True):
        expected = reference.logits(forward.src, forward.tgt)
        close(found, expected if forward.positions == "all" else expected[-1:])


def test_targets_of_their_own_are_decoded_behind_another_source(tmp_path: Path) -> None:
    model, reference = load(tmp_path)
    pairs = list(zip(prompts(6, seed=3), prompts(6, seed=4), strict=True))
    work = [Forward(src, tgt, positions="all") for src, tgt in pairs]
    for (src, tgt), found in zip(pairs, passes(model, work), strict=True):
        close(found, reference.logits(src, tgt))


@pytest.mark.parametrize("file", FILES)
def test_every_kind_of_file_holds_the_same_model(tmp_path: Path, file: dict[str, Any]) -> None:
    model, reference = load(tmp_path, seed=2, **file)
    work = [Forward(ids, ids, positions="all") for ids in prompts(3, seed=5)]
    for forward, found in zip(work, passes(model, work), strict=True):
        close(found, reference.logits(forward.src, forward.tgt))


def test_id_zero_is_a_token_like_any_other(tmp_path: Path) -> None:
    model, reference = load(tmp_path)
    for ids in ([0], [3, 0, 0], [0, 5, 0]):
        longer = Forward([1] * 9, [1] * 9)  # makes the batch pad
        found, _ = passes(model, [Forward(ids, ids, positions="all"), longer])
        close(found, reference.logits(ids, ids))
        tensor = torch.tensor([ids])
        with torch.inference_mode():
            logits, _ = model.network(tensor, tensor)
        close(logits[0], reference.logits(ids, ids))


def test_the_two_residuals_are_different_models(tmp_path: Path) -> None:
    ids = prompts(1)[0]
    answers = [
        passes(load(tmp_path / name, residual=name)[0], [Forward(ids, ids)])[0]
        for name in ("standard", "normalized")
    ]
    assert (answers[0] - answers[1]).abs().max() > 0.1


# --- generation --------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", ["standard", "normalized"])
def test_greedy_continuation_equals_resubmission_of_the_grown_sequence(
    tmp_path: Path, residual: str
) -> None:
    model, reference = load(tmp_path, seed=1, residual=residual)
    rows = [Row(ids, [], Decoding(n)) for ids, n in zip(prompts(9), range(3, 21, 2), strict=True)]
    generate(model, rows)
    for row in rows:
        assert row.tokens == reference.greedy(row.src, row.decoding.max_new_tokens)
        assert row.finish_reason == "length"
    assert len({token for row in rows for token in row.tokens}) > 8  # the answers vary


def test_the_encoder_sees_what_was_generated(tmp_path: Path) -> None:
    model, reference = load(tmp_path, seed=1)
    prompt = prompts(1)[0]
    row = Row(prompt, [], Decoding(12))
    generate(model, [row])
    frozen = list(prompt)  # as a decoder on an encoder output computed once would have it
    for _ in range(12):
        frozen.append(int(reference.logits(prompt, frozen)[-1].argmax()))
    assert row.tokens != frozen[len(prompt) :]


def test_generation_stops_at_eos(tmp_path: Path) -> None:
    _, reference = load(tmp_path / "without", seed=1)
    prompt = prompts(1)[0]
    free = reference.greedy(prompt, 10)
    eos = free[4]
    model, _ = load(tmp_path / "with", seed=1, extra_config={"eos_token_id": eos})
    row = Row(prompt, [], Decoding(10))
    generate(model, [row])
    assert row.tokens == free[: free.index(eos) + 1] == reference.greedy(prompt, 10, eos)
    assert row.finish_reason == "eos_token"


def test_generation_stops_at_block_size(tmp_path: Path) -> None:
    model, reference = load(tmp_path, seed=1)
    long = [*range(VOCAB), *range(BLOCK - VOCAB - 3)]
    assert len(long) == BLOCK - 3
    rows = [Row(ids, [], Decoding(100)) for ids in (long, prompts(1)[0], long[:-1])]
    generate(model, rows)
    for row in rows:
        assert len(row.src) + len(row.tokens) == BLOCK
        assert row.tokens == reference.greedy(row.src, 100)
        assert row.finish_reason == "length"


def test_the_spec_says_what_the_service_must_know(tmp_path: Path) -> None:
    model, _ = load(tmp_path, extra_config={"eos_token_id": 7, "dim": 24, "max_seq_len": 40})
    spec = model.spec
    assert spec.source_is_target
    assert spec.decoder_start_ids == ()
    assert (spec.src_vocab_size, spec.tgt_vocab_size) == (VOCAB, VOCAB)
    assert (spec.max_src, spec.max_tgt) == (BLOCK, BLOCK)
    assert (spec.eos_id, spec.unk_id) == (7, None)
    assert spec.room(BLOCK - 3, 0) == 3
    assert model.source_tokenizer is None
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eos_token_id"] == 7


def test_parameters_are_those_of_the_checkpoint_without_buffers(tmp_path: Path) -> None:
    model, reference = load(tmp_path)
    buffers = ("transformer.wpe.pe", "mask_attention.mask")
    stored = {n: t for n, t in reference.t.items() if not n.endswith(buffers)}
    assert model.parameters == sum(tensor.numel() for tensor in stored.values())
