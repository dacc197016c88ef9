"""Packed linear layers compute what the plain ones do, row by row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import model.loader
import model.packing
from model.config import EngineConfig
from model.engine import Engine
from model.loader import LoadedModel, load_model
from model.packing import (
    Int8Linear,
    MklLinear,
    OneDnnLinear,
    can_pack,
    can_quantize,
    has_int8_tiles,
    has_mkl,
    is_intel,
    packed_linear,
    round_up,
)
from model.sequence import Decoding, Forward, Sequence, TokenEvent
from tests.builders import make_native_model, make_tutorial_model

needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32), reason="this build of torch has no oneDNN operators"
)
needs_int8 = pytest.mark.skipif(
    not can_quantize(), reason="this build of torch has no int8 kernels for this CPU"
)
tiles = pytest.mark.parametrize(
    "tiles",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(not has_int8_tiles(), reason="this CPU has no matrix unit"),
        ),
    ],
)
float32_layers = pytest.mark.parametrize(
    "make",
    [
        partial(OneDnnLinear, dtype=torch.float32),
        pytest.param(
            MklLinear,
            marks=pytest.mark.skipif(
                not has_mkl(), reason="MKL is not there, or not used on this CPU"
            ),
        ),
    ],
    ids=["onednn", "mkl"],
)

ROWS = (1, 2, 3, 7, 16, 33)


@pytest.fixture
def native(tmp_path: Path) -> Path:
    return make_native_model(tmp_path, tie_output=True)


def linear(inputs: int, outputs: int, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias=bias)
    layer.requires_grad_(False)
    return layer


# --- single layers -----------------------------------------------------------------------------


@needs_packing
@float32_layers
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 8), (13, 7), (64, 257), (300, 5)])
def test_a_packed_layer_computes_the_same(
    make: Callable[[nn.Linear], nn.Module], inputs: int, outputs: int, bias: bool
) -> None:
    plain = linear(inputs, outputs, bias)
    packed = make(plain)
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        torch.testing.assert_close(packed(x), plain(x), atol=1e-5, rtol=1e-5)
    grid = torch.randn(2, 3, inputs)  # and with more dimensions
    torch.testing.assert_close(packed(grid), plain(grid), atol=1e-5, rtol=1e-5)


@needs_packing
@float32_layers
def test_a_packed_row_is_the_same_to_the_last_bit_whatever_its_company(
    make: Callable[[nn.Linear], nn.Module],
) -> None:
    packed, x = make(linear(512, 300)), torch.randn(64, 512)
    together = packed(x)
    for rows in (*ROWS, 5, 12, 48):
        assert torch.equal(packed(x[:rows]), together[:rows])


@needs_packing
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(16, 16), (32, 64), (64, 64), (64, 192), (128, 128), (256, 1024), (1280, 512), (2048, 512)],
)
def test_a_row_is_the_same_in_any_company_in_layers_of_any_size(inputs: int, outputs: int) -> None:
    packed, x = packed_linear(linear(inputs, outputs), torch.float32), torch.randn(33, inputs)
    together = packed(x)
    for rows in ROWS:
        assert torch.equal(packed(x[:rows].clone()), together[:rows])


@pytest.mark.parametrize(
    ("said", "suits"),
    [("vendor_id\t: GenuineIntel\n", True), ("vendor_id\t: AuthenticAMD\n", False), ("", False)],
)
def test_mkl_lays_weights_out_on_intel_s_cpus_alone(
    monkeypatch: pytest.MonkeyPatch, said: str, suits: bool
) -> None:
    monkeypatch.setattr(Path, "exists", lambda _: True)
    monkeypatch.setattr(Path, "read_text", lambda _: said)
    is_intel.cache_clear()
    try:
        assert is_intel() == suits
        assert has_mkl() <= suits
        between = packed_linear(linear(128, 200), torch.float32)
        assert isinstance(between, MklLinear if has_mkl() else OneDnnLinear)
    finally:
        is_intel.cache_clear()


@needs_packing
def test_wide_and_narrow_layers_go_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.packing, "WIDE", 200)
    between = MklLinear if has_mkl() else OneDnnLinear
    assert isinstance(packed_linear(linear(128, 199), torch.float32), between)
    for inputs, outputs in ((128, 200), (128, 127), (127, 128)):
        assert isinstance(packed_linear(linear(inputs, outputs), torch.float32), OneDnnLinear)


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="this CPU has no bfloat16 kernels")
def test_a_packed_layer_in_bfloat16_computes_the_same() -> None:
    plain = linear(64, 40).bfloat16()
    packed = OneDnnLinear(plain, torch.bfloat16)
    x = torch.randn(5, 64).bfloat16()
    found, exact = packed(x), plain.float()(x.float())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, atol=0.02, rtol=0.02)


@needs_int8
@tiles
def test_int8_products_equal_a_hand_computed_one(tiles: bool) -> None:
    plain = linear(2, 2)
    plain.weight.copy_(torch.tensor([[1.27, -0.64], [-2.54, 0.0]]))  # scales 0.01 and 0.02
    plain.bias.copy_(torch.tensor([10.0, 20.0]))
    packed = Int8Linear(plain, tiles)
    found = packed(torch.tensor([[3.0, -3.0], [0.0, 5.0], [0.0, 0.0]]))
    # +-1 and 0 are exact in 7 and in 8 bits: 3 * (1.27 + 0.64), 3 * -2.54; 5 * -0.64; nothing.
    expected = torch.tensor([[15.73, 12.38], [6.8, 20.0], [10.0, 20.0]])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-6)


@needs_int8
@tiles
@pytest.mark.parametrize("bias", [True, False])
def test_int8_is_near_the_plain_layer(bias: bool, tiles: bool) -> None:
    plain = linear(128, 64, bias)
    x = torch.randn(16, 128) * torch.logspace(-3, 3, 16)[:, None]  # rows of very different size
    found, expected = Int8Linear(plain, tiles)(x), plain(x)
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) < 0.03


@needs_int8
@tiles
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 50), (64, 256)])
def test_an_int8_row_is_the_same_to_the_last_bit_whatever_its_company(
    inputs: int, outputs: int, tiles: bool
) -> None:
    packed = Int8Linear(linear(inputs, outputs), tiles)
    x = torch.randn(40, inputs)
    company = torch.cat([x, 1e6 * torch.randn(3, inputs), torch.zeros(1, inputs)])
    together = packed(company)
    for row in range(40):
        assert torch.equal(packed(x[row : row + 1])[0], together[row])


@needs_int8
@tiles
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_row_shows_and_breaks_no_other(broken: float, tiles: bool) -> None:
    packed = Int8Linear(linear(8, 4), tiles)
    x = torch.randn(3, 8)
    expected = packed(x)
    x[1, 2] = broken
    found = packed(x)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@needs_int8
@tiles
def test_an_output_without_weights_is_its_bias(tiles: bool) -> None:
    plain = linear(4, 3)
    plain.weight[1] = 0.0
    found = Int8Linear(plain, tiles)(torch.randn(2, 4))
    assert torch.equal(found[:, 1], plain.bias[1].expand(2))


@needs_int8
@pytest.mark.skipif(not has_int8_tiles(), reason="this CPU has no matrix unit")
def test_a_matrix_unit_finds_what_vector_instructions_find() -> None:
    plain, x = linear(300, 70), torch.randn(33, 300)
    found, expected = Int8Linear(plain, tiles=True)(x), Int8Linear(plain, tiles=False)(x)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_rows_are_rounded_up_to_few_numbers() -> None:
    found = [round_up(rows) for rows in range(9000)]
    assert all(rows <= up <= 1.34 * rows or rows in (3, 5) for rows, up in enumerate(found))
    assert len(set(found)) < 50
    assert found[:11] == [0, 1, 2, 4, 4, 8, 8, 8, 8, 10, 10]


# --- whole models ------------------------------------------------------------------------------


def answers(loaded: LoadedModel, sources: list[list[int]]) -> list[list[int]]:
    """Greedy tokens, all decoded together."""
    engine = Engine(loaded, EngineConfig())
    start = list(loaded.spec.decoder_start_ids)
    sequences = [Sequence(src, start, Decoding(max_new_tokens=12)) for src in sources]
    for sequence in sequences:
        engine.submit(sequence)
    events = [event for event in engine.run() if isinstance(event, TokenEvent)]
    assert len({event.sequence for event in events}) == len(sources)
    return [sequence.tokens for sequence in sequences]


def logits(loaded: LoadedModel, src: list[int], tgt: list[int]) -> Tensor:
    stepper = loaded.stepper(EngineConfig())
    with torch.inference_mode():
        [found] = stepper.forward([Forward(src, tgt, positions="all")])
    return found.logits


SOURCES = [[4, 5, 6], [7], [8, 9, 10, 11, 12, 4, 4], [20, 5]]


@needs_packing
def test_a_packed_model_answers_like_the_plain_one(native: Path) -> None:
    plain, packed = load_model(native, "cpu", packed=False), load_model(native, "cpu")
    assert any(isinstance(m, MklLinear | OneDnnLinear) for m in packed.network.modules())
    assert not any(isinstance(module, nn.Linear) for module in packed.network.modules())
    assert packed.parameters == plain.parameters
    assert answers(packed, SOURCES) == answers(plain, SOURCES)
    for src in SOURCES:
        found, expected = logits(packed, src, [1, 5, 6]), logits(plain, src, [1, 5, 6])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="this CPU has no bfloat16 kernels")
def test_a_tied_table_is_not_copied_where_the_file_has_another_dtype(native: Path) -> None:
    network: Any = load_model(native, "cpu", "bfloat16").network
    assert network.output.weight is network.decoder.embedding.tokens.weight


@needs_packing
def test_attention_of_a_packed_model_is_that_of_the_plain_one(native: Path) -> None:
    passes = [Forward(src, [1, 5, 6], attention=True) for src in SOURCES]
    maps = [
        load_model(native, "cpu", packed=packed).stepper(EngineConfig()).attention(passes)
        for packed in (True, False)
    ]
    for found, expected in zip(*maps, strict=True):
        torch.testing.assert_close(found.encoder, expected.encoder, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found.decoder, expected.decoder, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found.cross, expected.cross, atol=1e-5, rtol=1e-4)


@needs_int8
@pytest.mark.parametrize("make", [make_native_model, make_tutorial_model])
def test_an_int8_model_answers_alone_as_in_company(make: Any, tmp_path: Path) -> None:
    loaded = load_model(make(tmp_path), "cpu", "int8")
    assert loaded.dtype == "int8"
    together = answers(loaded, SOURCES)
    assert len({tuple(tokens) for tokens in together}) > 1
    assert [answers(loaded, [src])[0] for src in SOURCES] == together


@needs_int8
def test_an_int8_model_is_near_the_plain_one(native: Path) -> None:
    plain, rounded = load_model(native, "cpu"), load_model(native, "cpu", "int8")
    spread = torch.cat([logits(plain, src, [1, 5, 6]) for src in SOURCES]).std()
    for src in SOURCES:
        found, expected = logits(rounded, src, [1, 5, 6]), logits(plain, src, [1, 5, 6])
        assert 0 < float((found - expected).abs().mean()) < 0.1 * float(spread)


def test_without_the_operators_a_model_stays_plain(
    native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.loader, "can_pack", lambda dtype: False)
    loaded = load_model(native, "cpu")
    assert any(isinstance(module, nn.Linear) for module in loaded.network.modules())
    assert len(answers(loaded, SOURCES)) == len(SOURCES)


def test_int8_is_refused_where_there_are_no_kernels_for_it(
    native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.loader, "can_quantize", lambda: False)
    with pytest.raises(model.loader.ModelError, match="dtype int8 needs a CPU with AVX2"):
        load_model(native, "cpu", "int8")


@needs_int8
@pytest.mark.parametrize("bias", [True, False])
def test_a_row_of_zeros_gives_the_bias_in_int8(bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(40, 24, bias=bias)
    x = torch.randn(5, 40)
    x[2] = 0.0
    x[3] = 1e-42  # less than float32's smallest normal number
    found = Int8Linear(plain)(x)
    expected = torch.zeros(24) if plain.bias is None else plain.bias.detach()
    assert torch.equal(found[2], expected)
    torch.testing.assert_close(found[3], expected)
    assert found.isfinite().all()
