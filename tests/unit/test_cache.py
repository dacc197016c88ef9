"""What is remembered of targets and sources; what rows see of each other, which is nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from model.attention import MultiHeadAttention
from model.cache import EncoderCache, RequestMemory, Sharing, SourceCache, TargetCache
from model.config import EngineConfig
from model.loader import load_model
from model.pool import CacheShape
from model.sequence import Decoding
from model.sequence import Sequence as Row
from model.steppers import CachedStepper
from model.transformer import Transformer
from tests.builders import make_byt5_model, make_native_model

CPU = torch.device("cpu")
SHAPE = CacheShape(layers=2, heads=3, head_dim=4, device=CPU, dtype=torch.float32)


# --- targets -----------------------------------------------------------------------------------


def test_a_step_writes_each_row_where_that_row_ends() -> None:
    cache = TargetCache(SHAPE)
    cache.join(2, 3)
    cache.joined([3, 1])
    layers, mask, positions = cache.next_positions(slice(None))
    assert positions.tolist() == [[3], [1]]
    assert mask is not None
    assert mask[:, 0, 0].int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    new = torch.arange(2.0 * 3 * 4).reshape(2, 3, 1, 4) + 1
    layers[1].extend(new, -new)
    keys, values = layers[1].keys, layers[1].values
    assert keys.shape == (2, 3, 4, 4)  # rows, heads, longest + 1, head_dim
    assert torch.equal(keys[0, :, 3], new[0, :, 0])
    assert torch.equal(keys[1, :, 1], new[1, :, 0])
    assert torch.equal(values[0, :, 3], -new[0, :, 0])
    assert keys[1, :, 2:].eq(0).all()
    cache.advance(slice(None))
    assert cache.pool.lengths == [4, 2]


def test_a_step_that_is_not_advanced_can_be_taken_again() -> None:
    cache = TargetCache(SHAPE)
    cache.join(1, 2)
    cache.joined([2])
    first = torch.ones(1, 3, 1, 4)
    for new in (first, 2 * first):
        layers, mask, positions = cache.next_positions(slice(None))
        assert mask is None, "a row alone sees all there is"
        layers[0].extend(new, new)
        assert positions.tolist() == [[2]]
        assert torch.equal(layers[0].keys[:, :, 2:], new)


# --- sources -----------------------------------------------------------------------------------


def test_rows_in_slot_order_need_no_regrouping() -> None:
    assert Sharing.of([0, 1, 2], CPU) is None
    assert Sharing.of([0, 0, 1], CPU) is not None
    assert Sharing.of([1, 0], CPU) is not None


def join_sources(cache: SourceCache, sources: list[Tensor], slots: list[int]) -> None:
    """Sources ``[heads, src, head_dim]``, the same in every layer; keys equal values."""
    lengths = [source.shape[1] for source in sources]
    nothing = torch.full((3, 1, 4), 9.0)
    # [1, heads, sum of lengths, head_dim]
    packed = torch.cat([s if s.shape[1] else nothing for s in sources], dim=1)[None]
    cache.join([(packed, packed)] * SHAPE.layers, lengths, slots)


@torch.no_grad()
def test_rows_of_one_source_see_what_rows_of_copies_see() -> None:
    torch.manual_seed(0)
    cross = MultiHeadAttention(12, 3)
    sources = [torch.randn(3, length, 4) for length in (5, 2, 7)]
    for slots in ([0, 0, 1, 2, 2, 2], [2, 0, 1, 0, 0, 2], [1, 0, 2], [0, 1, 2]):
        x = torch.randn(len(slots), 1, 12)
        shared, copied = SourceCache(SHAPE), SourceCache(SHAPE)
        join_sources(shared, sources, slots)
        join_sources(copied, [sources[slot] for slot in slots], list(range(len(slots))))
        assert shared.pool.rows == 3
        for one, other in zip(shared.layers(slice(None)), copied.layers(slice(None)), strict=True):
            found, expected = one.attend(cross, x), other.attend(cross, x)
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_several_queries_a_row_may_share_a_source() -> None:
    torch.manual_seed(0)
    cross = MultiHeadAttention(12, 3)
    sources = [torch.randn(3, length, 4) for length in (4, 6)]
    slots = [1, 0, 1]
    shared, copied = SourceCache(SHAPE), SourceCache(SHAPE)
    join_sources(shared, sources, slots)
    join_sources(copied, [sources[slot] for slot in slots], [0, 1, 2])
    x = torch.randn(3, 5, 12)
    found = shared.layers(slice(None))[0].attend(cross, x)
    torch.testing.assert_close(
        found, copied.layers(slice(None))[0].attend(cross, x), atol=1e-6, rtol=1e-5
    )


def test_a_slot_lives_as_long_as_a_row_uses_it() -> None:
    cache = SourceCache(SHAPE)
    join_sources(cache, [torch.ones(3, 2, 4), 2 * torch.ones(3, 5, 4)], [0, 0, 1])
    cache.keep([1, 2])
    assert (cache.slots, cache.pool.lengths) == ([0, 1], [2, 5])
    cache.keep([1])
    assert (cache.slots, cache.pool.lengths) == ([0], [5])
    assert cache.layers(slice(None))[0].keys.eq(2).all()
    cache.keep([])
    assert (cache.slots, cache.pool.lengths) == ([], [])
    assert not cache.pool.tensor.any()


@torch.no_grad()
def test_an_empty_source_yields_what_attending_to_nothing_yields() -> None:
    torch.manual_seed(0)
    cross = MultiHeadAttention(12, 3)
    cache = SourceCache(SHAPE)
    join_sources(cache, [torch.zeros(3, 0, 4), torch.randn(3, 4, 4)], [0, 1])
    found = cache.layers(slice(None))[0].attend(cross, torch.randn(2, 1, 12))
    torch.testing.assert_close(found[0, 0], cross.output.bias)
    assert not torch.allclose(found[1, 0], cross.output.bias, atol=0.01)


# --- sources encoded lately --------------------------------------------------------------------


def memory(length: int, value: float = 1.0) -> Tensor:
    """``[length, 4]``, 16 bytes a position."""
    return torch.full((length, 4), value)


def test_what_was_put_is_found_and_counted() -> None:
    cache = EncoderCache(1000)
    assert cache.get((5, 6)) is None
    cache.put((5, 6), memory(2, 7.0))
    found = cache.get((5, 6))
    assert found is not None
    assert torch.equal(found, memory(2, 7.0))
    assert cache.get((5,)) is None
    assert (cache.hits, cache.misses, cache.bytes) == (1, 2, 32)


def test_the_least_recently_used_memories_make_room() -> None:
    cache = EncoderCache(5 * 16)
    for id in (1, 2):
        cache.put((id,), memory(2))
    assert cache.get((1,)) is not None
    cache.put((3,), memory(2))
    assert [cache.get((id,)) is not None for id in (1, 2, 3)] == [True, False, True]
    cache.put((4,), memory(5))  # all of it
    assert [cache.get((id,)) is not None for id in (1, 3, 4)] == [False, False, True]
    assert cache.bytes == 80


def test_what_is_too_large_drops_nothing_else() -> None:
    cache = EncoderCache(3 * 16)
    cache.put((1,), memory(3))
    cache.put((2,), memory(4))
    assert cache.get((1,)) is not None
    assert cache.get((2,)) is None
    assert cache.bytes == 48


def test_putting_twice_counts_once() -> None:
    cache = EncoderCache(1000)
    cache.put((1,), memory(2, 1.0))
    cache.put((1,), memory(2, 1.0))
    assert cache.bytes == 32


def test_without_room_nothing_is_held() -> None:
    cache = EncoderCache(0)
    cache.put((1,), memory(1))
    assert not cache
    assert cache.get((1,)) is None
    assert cache.bytes == 0
    assert EncoderCache(1)


def test_a_memory_keeps_no_batch_alive() -> None:
    cache = EncoderCache(1000)
    batch = torch.ones(50, 9, 4)
    cache.put((1,), batch[3, :2])
    batch.zero_()
    found = cache.get((1,))
    assert found is not None
    assert found.eq(1).all()
    assert found.untyped_storage().nbytes() == cache.bytes == 32


def test_bytes_stay_within_bounds_in_any_history() -> None:
    draw = random.Random(0)
    cache = EncoderCache(20 * 16)
    recent: list[int] = []  # least recently used first
    for _ in range(2000):
        id = draw.randrange(15)
        length = id % 7 + 1
        found = cache.get((id,))
        assert (found is not None) == (id in recent)
        if found is None:
            cache.put((id,), memory(length, float(id)))
        else:
            assert found.shape == (length, 4)
            assert found.eq(id).all()
            recent.remove(id)
        recent.append(id)
        while sum(i % 7 + 1 for i in recent) > 20:
            recent.pop(0)
        assert cache.bytes == 16 * sum(i % 7 + 1 for i in recent)


# --- memory of a request -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_tgt", [48, 70])
def test_the_memory_of_a_request_is_what_it_allocates(
    dtype: str, max_tgt: int, tmp_path: Path
) -> None:
    shape = {"decoder_layers": 3, "max_src": 130, "max_tgt": max_tgt}
    model = load_model(make_native_model(tmp_path, **shape), "cpu", dtype)
    stepper = CachedStepper(cast("Transformer", model.network), model.spec, EngineConfig())
    memory = RequestMemory.of(stepper.network, model.spec)
    row = Row([5] * 130, [1], Decoding(max_tgt))
    with torch.inference_mode():
        stepper.join([row])
        for _ in range(max_tgt):
            stepper.step([row])
            row.tokens.append(5)
    targets, sources = stepper.targets.pool.tensor, stepper.sources.pool.tensor
    kept = stepper.encoder_cache.bytes
    assert memory.longest == targets.nbytes + sources.nbytes + kept
    assert memory.per_target_token == targets.nbytes / targets.shape[4]
    assert memory.per_source_token == sources.nbytes / sources.shape[4] + kept / 130
    assert targets.shape[4] == (128 if max_tgt == 70 else 64)


def test_the_encoder_s_output_counts_in_the_dtype_of_the_weights(tmp_path: Path) -> None:
    """Though T5's layers add up in float32 where its weights are float16."""
    model = load_model(make_byt5_model(tmp_path), "cpu", "float16")
    stepper = CachedStepper(cast("Transformer", model.network), model.spec, EngineConfig())
    memory = RequestMemory.of(stepper.network, model.spec)
    with torch.inference_mode():
        stepper.join([Row([5, 6, 7], [0], Decoding(3))])
    assert stepper.encoder_cache.bytes == 3 * (memory.per_source_token - memory.per_target_token)
