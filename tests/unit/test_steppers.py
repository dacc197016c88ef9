"""Decoding with a cache equals the full pass; rows never see each other."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import model.steppers
from model.attention import padding_mask
from model.config import EngineConfig
from model.families.seqserve import TransformerConfig, spec
from model.loader import load_model
from model.pool import LENGTH_BLOCK
from model.sequence import AttentionMaps, Decoding, Forward
from model.sequence import Sequence as Row
from model.steppers import CachedStepper, ResubmittingStepper, alike, distinct, pad_rows
from model.transformer import Transformer
from tests.builders import TINY, lively_network, make_tutorial_model

VOCAB = 23
CONFIG = TransformerConfig(VOCAB, VOCAB, **{**TINY, "max_src": 200, "max_tgt": 200})
NETWORK = lively_network(CONFIG, seed=5)
SPEC = spec(CONFIG)
DECODING = Decoding(max_new_tokens=1000)

ROUNDING = 1e-3
"""Of logits around 10 from lively weights: one row in a hundred thousand comes near to half of it.
What a wrong place in the cache does is over 1."""


def stepper(network: Transformer = NETWORK) -> CachedStepper:
    return CachedStepper(network, SPEC, EngineConfig())


def row(src: list[int], prefix: list[int]) -> Row:
    return Row(src=src, prefix=[1, *prefix], decoding=DECODING)


def random_row(draw: random.Random, longest: int = 9) -> Row:
    def ids(least: int) -> list[int]:
        return [draw.randrange(4, VOCAB) for _ in range(draw.randint(least, longest))]

    return row([*ids(0), 2], ids(0))


@torch.no_grad()
def full_pass(of: Row) -> Tensor:
    """The last position's logits of an unpadded full pass over everything decoded so far."""
    logits, _ = NETWORK(torch.tensor([of.src]), torch.tensor([of.target]), src_lengths=None)
    return logits[0, -1]


def check_step(cached: CachedStepper, rows: list[Row]) -> None:
    """Step, compare every row with its full pass, and let rows grow by their likeliest token."""
    with torch.inference_mode():
        logits = cached.step(rows)
    assert logits.shape == (len(rows), VOCAB)
    for r, found in zip(rows, logits, strict=True):
        torch.testing.assert_close(found, full_pass(r), atol=ROUNDING, rtol=1e-5)
    for r, token in zip(rows, logits.argmax(-1).tolist(), strict=True):
        r.tokens.append(token)


@torch.inference_mode()
def join(cached: CachedStepper, rows: list[Row]) -> None:
    cached.join(rows)


@torch.inference_mode()
def keep(cached: CachedStepper, rows: list[int]) -> None:
    cached.keep(rows)


# --- cached decoding ---------------------------------------------------------------------------


def test_each_cached_step_equals_its_row_of_the_full_pass() -> None:
    draw = random.Random(1)
    cached, rows = stepper(), [random_row(draw) for _ in range(7)]
    join(cached, rows)
    for _ in range(12):
        check_step(cached, rows)
    assert len({tuple(r.tokens) for r in rows}) == 7  # the answers vary
    assert sum(len(set(r.tokens)) for r in rows) > 7 * 3


def test_one_pass_over_a_whole_target_equals_its_cached_steps() -> None:
    draw = random.Random(2)
    cached, rows = stepper(), [random_row(draw) for _ in range(5)]
    join(cached, rows)
    steps = []
    with torch.inference_mode():
        for _ in range(8):
            logits = cached.step(rows)
            steps.append(logits)
            for r, token in zip(rows, logits.argmax(-1).tolist(), strict=True):
                r.tokens.append(token)
        passes = [Forward(r.src, r.target[:-1], positions="all") for r in rows]
        whole = cached.forward(passes)
    for i, (r, event) in enumerate(zip(rows, whole, strict=True)):
        found = torch.stack([step[i] for step in steps])
        expected = event.logits[len(r.prefix) - 1 :]
        torch.testing.assert_close(found, expected, atol=ROUNDING, rtol=1e-5)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_that_join_leave_and_change_places_equal_their_full_pass(seed: int) -> None:
    draw = random.Random(seed)
    cached = stepper()
    rows: list[Row] = []
    for _ in range(14):
        if draw.random() < 0.5 or not rows:
            new = [random_row(draw) for _ in range(draw.randint(1, 4))]
            if draw.random() < 0.5:  # two rows of one source, their targets apart
                new.append(row(new[0].src, [draw.randrange(4, VOCAB)]))
            draw.shuffle(new)
            join(cached, new)
            rows += new
        if draw.random() < 0.5:
            kept = draw.sample(range(len(rows)), draw.randint(0, len(rows)))
            keep(cached, kept)
            rows = [rows[i] for i in kept]
        if rows:
            check_step(cached, rows)


def test_targets_over_several_blocks_of_cache_equal_their_full_pass() -> None:
    draw = random.Random(3)
    cached = stepper()
    rows = [row([5, 6, 2], []), row([7, 2], [4] * (2 * LENGTH_BLOCK - 3)), random_row(draw)]
    join(cached, rows)
    for _ in range(6):
        check_step(cached, rows)
    assert cached.targets.pool.longest > 2 * LENGTH_BLOCK
    late = [row([9, 9, 2], [5] * 3)]
    join(cached, late)
    check_step(cached, rows + late)


def test_sources_over_several_blocks_of_cache_equal_their_full_pass() -> None:
    draw = random.Random(4)
    cached, rows = stepper(), [random_row(draw), row([5, 6, 7] * LENGTH_BLOCK + [2], [])]
    join(cached, rows[:1])
    check_step(cached, rows[:1])
    join(cached, rows[1:])
    for _ in range(3):
        check_step(cached, rows)


def test_rows_of_one_source_share_its_slot_and_answer_as_with_copies() -> None:
    src = [5, 9, 6, 2]
    shared, rows = stepper(), [row(src, [i]) for i in (4, 5, 6)]
    join(shared, rows)
    assert shared.sources.pool.rows == 1
    separate, copies = stepper(), [row(src, [i]) for i in (4, 5, 6)]
    for copy in copies:  # joined one by one, each brings a slot of its own
        join(separate, [copy])
    assert separate.sources.pool.rows == 3
    with torch.inference_mode():
        found, expected = shared.step(rows), separate.step(copies)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_relative_positions_are_those_of_each_row_in_any_company() -> None:
    network = lively_network(replace(CONFIG, relative_positions=True), seed=6)
    draw = random.Random(8)
    cached, rows = stepper(network), [random_row(draw) for _ in range(7)]
    cached.join(rows)
    for _ in range(20):
        logits = cached.step(rows)
        for r, found in zip(rows, logits, strict=True):
            full, _ = network(torch.tensor([r.src]), torch.tensor([r.target]))
            torch.testing.assert_close(found, full[0, -1], atol=ROUNDING, rtol=1e-5)
            r.tokens.append(int(found.argmax()))
    for stack in (network.encoder, network.decoder):
        assert stack.position_bias is not None
        for parameter in stack.position_bias.parameters():
            parameter.zero_()
        changed, _ = network(torch.tensor([r.src]), torch.tensor([r.target[:-1]]))
        assert not torch.allclose(changed, full, atol=0.1), "both stacks use theirs"
        full = changed


def test_an_empty_source_disturbs_nobody() -> None:
    cached, rows = stepper(), [row([], []), row([5, 6, 2], [7])]
    join(cached, rows)
    with torch.inference_mode():
        logits = cached.step(rows)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[1], full_pass(rows[1]), atol=ROUNDING, rtol=1e-5)


def test_a_batch_of_nothing_but_empty_sources_answers() -> None:
    cached, rows = stepper(), [row([], []), row([], [5])]
    join(cached, rows)
    with torch.inference_mode():
        assert cached.step(rows).isfinite().all()


def test_a_requeued_row_goes_on_from_the_tokens_it_has() -> None:
    draw = random.Random(6)
    cached, rows = stepper(), [random_row(draw) for _ in range(3)]
    join(cached, rows)
    for _ in range(4):
        check_step(cached, rows)
    again = stepper()  # the tokens are replayed as a prefix
    join(again, rows)
    for _ in range(3):
        check_step(again, rows)


def test_an_idle_stepper_holds_nothing_in_its_cache_and_returns_it_when_told() -> None:
    cached, rows = stepper(), [row([5, 2], []), row([6, 2], [])]
    join(cached, rows)
    check_step(cached, rows)
    keep(cached, [])
    pools = (cached.targets.pool, cached.sources.pool)
    assert all(pool.tensor.numel() and not pool.tensor.any() for pool in pools)
    assert cached.encoder_cache.bytes
    cached.release()
    assert all(pool.tensor.numel() == 0 for pool in pools)
    assert not cached.encoder_cache.bytes
    join(cached, rows[:1])
    check_step(cached, rows[:1])


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_row_of_nan_harms_neither_its_mates_nor_whoever_takes_its_place(side: str) -> None:
    network = lively_network(CONFIG, seed=5)
    stack: Any = network.encoder if side == "source" else network.decoder
    with torch.no_grad():
        stack.embedding.tokens.weight[22] = torch.nan
    cached = stepper(network)
    bad = row([22] * 9 + [2], []) if side == "source" else row([5, 2], [22] * 9)
    rows = [row([5, 6, 2], [4]), bad]
    join(cached, rows)
    with torch.inference_mode():
        logits = cached.step(rows)
    assert not logits[1].isfinite().any()
    torch.testing.assert_close(logits[0], full_pass(rows[0]), atol=ROUNDING, rtol=1e-5)
    rows[0].tokens.append(7)
    keep(cached, [0])
    rows = [rows[0], row([7, 2], [])]
    join(cached, rows[1:])
    for _ in range(3):
        check_step(cached, rows)


def test_padding_behind_a_prefix_of_nan_harms_nobody_who_moves_there() -> None:
    network = lively_network(CONFIG, seed=5)
    with torch.no_grad():
        network.decoder.embedding.tokens.weight[22] = torch.nan
    cached = stepper(network)
    rows = [row([5, 2], [22, 6]), row([6, 2], [4] * 30), row([7, 2], [5])]
    join(cached, rows)
    keep(cached, [2, 1])
    check_step(cached, [rows[2], rows[1]])


# --- the tests above are sharp -----------------------------------------------------------------


def no_mask(lengths: Tensor, max_length: int) -> Tensor:
    return torch.ones_like(padding_mask(lengths, max_length))


@pytest.mark.parametrize("place", ["model.cache", "model.steppers"])
def test_without_padding_masks_rows_see_each_other(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{place}.padding_mask", no_mask)
    rows = [row([5, 6, 2], []), row([7, 8, 9, 10, 11, 2], [4, 5, 6])]
    cached = stepper()
    join(cached, rows)
    with pytest.raises(AssertionError, match="not close"):
        check_step(cached, rows)


def test_without_the_causal_mask_prefixes_see_their_future(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def see_all(length: int, device: torch.device | None = None) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool, device=device)

    monkeypatch.setattr(model.steppers, "causal_mask", see_all)
    rows = [row([5, 6, 2], [7, 8, 9, 10])]
    cached = stepper()
    join(cached, rows)
    with pytest.raises(AssertionError, match="not close"):
        check_step(cached, rows)


# --- teacher-forced passes ---------------------------------------------------------------------


@torch.inference_mode()
def test_passes_of_ragged_lengths_equal_single_ones() -> None:
    draw = random.Random(7)
    rows = [random_row(draw) for _ in range(9)]
    passes = [Forward(r.src, r.prefix, positions="all") for r in rows]
    passes += [Forward(r.src, [*r.prefix, 9], positions="last") for r in rows[:4]]
    for forward, event in zip(passes, stepper().forward(passes), strict=True):
        expected, _ = NETWORK(torch.tensor([forward.src]), torch.tensor([forward.tgt]))
        wanted = expected[0] if forward.positions == "all" else expected[0, -1:]
        torch.testing.assert_close(event.logits, wanted, atol=1e-4, rtol=1e-4)


def test_passes_encode_a_shared_source_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = NETWORK.encode

    def count(src: Tensor, mask: Tensor) -> Tensor:
        encoded.append(len(src))
        return encode(src, mask)

    monkeypatch.setattr(NETWORK, "encode", count)
    with torch.inference_mode():
        stepper().forward([Forward([5, 2], [1]), Forward([6, 2], [1]), Forward([5, 2], [1, 7])])
    assert encoded == [2]


@torch.inference_mode()
def test_sources_are_encoded_beside_those_of_like_length(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[tuple[int, int]] = []
    encode = NETWORK.encode

    def count(src: Tensor, mask: Tensor) -> Tensor:
        encoded.append((src.shape[0], src.shape[1]))
        return encode(src, mask)

    monkeypatch.setattr(NETWORK, "encode", count)
    draw = random.Random(13)
    lengths = [3, 90, 4, 88, 5, 3, 60, 4]
    rows = [row([draw.randrange(4, VOCAB) for _ in range(length)], []) for length in lengths]
    cached = stepper()
    cached.join(rows)
    assert encoded == [(3, 90), (5, 5)]
    monkeypatch.undo()
    check_step(cached, rows)
    check_step(cached, rows)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sources each pass over the encoder has had so far; 21 in a source is an error."""
    passes: list[int] = []
    encode = NETWORK.encode

    def count(src: Tensor, mask: Tensor) -> Tensor:
        if (src == 21).any():
            raise ValueError("a source that nobody can encode")
        passes.append(len(src))
        return encode(src, mask)

    monkeypatch.setattr(NETWORK, "encode", count)
    return passes


@torch.inference_mode()
@pytest.mark.parametrize("kept", [0, 10**6], ids=["without a cache", "with a cache"])
def test_sources_that_come_soon_are_encoded_beside_those_that_join(
    encoded: list[int], kept: int
) -> None:
    cached = CachedStepper(NETWORK, SPEC, EngineConfig(max_encoder_cache_bytes=kept))
    rows = [row([5 + i, 6, 7, 2], []) for i in range(7)]
    cached.expect(rows[:2], rows[2:6])
    assert encoded == [6]
    cached.join(rows[:2])
    cached.expect(rows[2:3], rows[3:6])
    cached.join(rows[2:3])
    cached.expect(rows[4:5], rows[5:])  # the fourth has been cancelled
    cached.join(rows[4:5])
    assert encoded == [6], "nothing is encoded for those that wait alone"
    cached.expect(rows[6:], [rows[3]])
    cached.join(rows[6:])
    assert encoded == [6, 2], "what was made for the fourth is gone"
    cached.expect(rows[:1], [])
    assert not cached._ahead, "nobody waits"
    live = [*rows[:3], rows[4], rows[6]]
    logits = cached.step(live)
    for r, found in zip(live, logits, strict=True):
        torch.testing.assert_close(found, full_pass(r), atol=ROUNDING, rtol=1e-5)


@torch.inference_mode()
def test_a_source_that_fails_does_so_when_its_row_joins(encoded: list[int]) -> None:
    cached = stepper()
    good, bad = row([5, 6, 2], []), row([21, 2], [])
    cached.expect([good], [bad])
    cached.join([good])
    cached.expect([bad], [row([7, 2], [])])
    with pytest.raises(ValueError, match="nobody can encode"):
        cached.join([bad])
    assert encoded == [1]


# --- the order of rows -------------------------------------------------------------------------


def test_rows_are_moved_once_that_spares_more_than_it_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model.steppers, "MOVE_COST", 20)
    cached = stepper()
    lengths = [4] * 9 + [61, 91]
    rows = [row([5 + i] * (length - 1) + [2], []) for i, length in enumerate(lengths)]
    join(cached, rows)
    excess = 11 * 75 - (2 * 45 + 30)  # 11 rows are read behind the first 16 positions, then two
    calls = -(-20 * sum(lengths) // excess)
    assert calls > 3
    assert [cached.better_order() for _ in range(calls - 1)] == [None] * (calls - 1)
    order = cached.better_order()
    assert order == [10, 9, *range(9)]
    keep(cached, order)
    check_step(cached, [rows[i] for i in order])
    assert [cached.better_order() for _ in range(100)] == [None] * 100


def test_rows_that_share_a_source_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model.steppers, "MOVE_COST", 0)
    cached = stepper()
    join(cached, [row([5, 2], []), row([5, 2], []), row([5] * 90 + [2], [])])
    assert cached.better_order() is None


@pytest.mark.parametrize("most", [1, 90, 300, 10**6])
@pytest.mark.parametrize("padding", [0, 1, 7, 64])
def test_groups_of_like_length_hold_everyone_once_within_their_bounds(
    padding: int, most: int
) -> None:
    draw = random.Random(padding)
    for count in range(30):
        lengths = [draw.choice([0, draw.randrange(20), draw.randrange(100)]) for _ in range(count)]
        groups = alike(lengths, padding, most)
        assert sorted(index for group in groups for index in group) == list(range(count))
        padded = [max(lengths[i] for i in g) * len(g) - sum(lengths[i] for i in g) for g in groups]
        assert all(tokens <= padding for tokens in padded)
        assert all(len(g) == 1 or len(g) * lengths[g[0]] <= most for g in groups)
        firsts = [lengths[group[0]] for group in groups]
        assert firsts == sorted(firsts, reverse=True)


@torch.inference_mode()
def test_a_source_is_encoded_once_however_often_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = NETWORK.encode

    def count(src: Tensor, mask: Tensor) -> Tensor:
        encoded.append(len(src))
        return encode(src, mask)

    monkeypatch.setattr(NETWORK, "encode", count)
    cached = stepper()
    draw = random.Random(11)
    sources: list[list[int]] = [[], [5, 2], [7, 8, 9, 2], [6] * 30]
    passes = [
        Forward(draw.choice(sources), [1, *draw.sample(range(4, VOCAB), 3)], "all")
        for _ in range(12)
    ]
    found = [e.logits for i in range(0, 12, 3) for e in cached.forward(passes[i : i + 3])]
    cached.join([row(p.src, p.tgt[1:]) for p in passes])
    assert sum(encoded) == 4
    assert cached.encoder_cache.misses == 4
    off = CachedStepper(NETWORK, SPEC, EngineConfig(max_encoder_cache_bytes=0))
    for forward, logits in zip(passes, found, strict=True):
        [expected] = off.forward([forward])
        torch.testing.assert_close(logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert sum(encoded) == 16
    step = cached.step([row(p.src, p.tgt[1:]) for p in passes])
    for forward, logits in zip(passes, step, strict=True):
        [expected] = off.forward([forward])
        torch.testing.assert_close(logits, expected.logits[-1], atol=ROUNDING, rtol=1e-5)


# --- attention ---------------------------------------------------------------------------------


def attention_passes() -> list[Forward]:
    draw = random.Random(12)
    passes = [
        Forward(r.src, r.prefix, attention=True) for r in (random_row(draw) for _ in range(6))
    ]
    return [*passes, Forward(passes[2].src, [1, 9, 8], attention=True), passes[0]]


def check_maps(found: AttentionMaps, expected: AttentionMaps) -> None:
    for name in ("encoder", "decoder", "cross"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), atol=1e-6, rtol=1e-5
        )


@torch.inference_mode()
def test_attention_of_ragged_lengths_equals_single_passes() -> None:
    """Also where two passes share a source, which is encoded once."""
    passes = attention_passes()
    for forward, found in zip(passes, stepper().attention(passes), strict=True):
        src, tgt = len(forward.src), len(forward.tgt)
        assert found.encoder.shape == (2, 4, src, src)
        assert found.decoder.shape == (2, 4, tgt, tgt)
        assert found.cross.shape == (2, 4, tgt, src)
        check_maps(found, stepper().attention([forward])[0])
        assert not found.decoder[..., ~torch.ones(tgt, tgt, dtype=torch.bool).tril()].any()
        for maps in (found.encoder, found.decoder, found.cross):
            torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]))


@torch.inference_mode()
def test_attention_is_computed_for_few_passes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = attention_passes()
    together = stepper().attention(passes)
    rows: list[int] = []
    hook = NETWORK.encoder.register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
    longest = max(max(len(p.src), len(p.tgt)) for p in passes)
    weights = NETWORK.heads.weights(longest, longest)
    try:
        for limit, largest in ((3 * weights, 3), (1, 1)):
            rows.clear()
            monkeypatch.setattr(model.steppers, "MAX_WEIGHTS", limit)
            for found, expected in zip(stepper().attention(passes), together, strict=True):
                check_maps(found, expected)
            assert max(rows) == largest
    finally:
        hook.remove()


@torch.inference_mode()
def test_looking_at_attention_leaves_no_trace() -> None:
    passes = attention_passes()
    stepper().attention(passes)
    assert not any(module._forward_hooks for module in NETWORK.modules())
    with pytest.raises(IndexError):  # an id that is none
        stepper().attention([Forward([10_000], [1], attention=True)])
    assert not any(module._forward_hooks for module in NETWORK.modules())


def test_weights_are_counted() -> None:
    heads = NETWORK.heads
    assert (heads.encoder, heads.decoder, heads.cross) == (8, 8, 8)
    assert heads.weights(5, 3) == 8 * (25 + 9 + 15)


# --- re-submission -----------------------------------------------------------------------------


@torch.inference_mode()
def test_resubmission_equals_the_full_pass_over_the_grown_sequence(tmp_path: Path) -> None:
    loaded = load_model(make_tutorial_model(tmp_path, seed=1), "cpu")
    stepping = loaded.stepper(EngineConfig())
    assert isinstance(stepping, ResubmittingStepper)
    draw = random.Random(8)
    rows = [
        Row([draw.randrange(29) for _ in range(draw.randint(1, 9))], [], DECODING) for _ in range(6)
    ]
    stepping.join(rows)
    for step in range(8):
        if step == 4:
            kept = [5, 1, 2]
            stepping.keep(kept)
            rows = [rows[i] for i in kept]
        logits = stepping.step(rows)
        for r, found in zip(rows, logits, strict=True):
            grown = torch.tensor([r.src + r.tokens])
            expected, _ = loaded.network(grown, grown)
            torch.testing.assert_close(found, expected[0, -1], atol=1e-5, rtol=1e-5)
            r.tokens.append(int(found.argmax()))


# --- helpers -----------------------------------------------------------------------------------


def test_rows_are_padded_on_the_right_to_one_column_at_least() -> None:
    cpu = torch.device("cpu")
    assert pad_rows([[5, 6], [7]], 0, cpu).tolist() == [[5, 6], [7, 0]]
    assert pad_rows([[], []], 9, cpu).tolist() == [[9], [9]]


def test_distinct_sources_keep_the_order_of_their_first_use() -> None:
    assert distinct([(7,), (5, 6), (7,), ()]) == ([(7,), (5, 6), ()], [0, 1, 0, 2])
