"""Pools that grow, shrink and reorder; how their keys are read."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import model.pool
from model.attention import attention, attention_weights, mask_bias, padding_mask
from model.pool import LENGTH_BLOCK, PIECE, STREAMED_LENGTH, CacheShape, Pool, cut_keys, one_by_one

SHAPE = CacheShape(layers=2, heads=3, head_dim=4, device=torch.device("cpu"), dtype=torch.float32)


def join(pool: Pool, length: int, value: float) -> None:
    """A row of `length` positions that all hold `value`."""
    row = pool.rows
    pool.reserve(row + 1, length)
    pool.tensor[:, :, row, :, :length] = value
    pool.lengths.append(length)


def contents(pool: Pool) -> list[list[float]]:
    """What each row holds; the same in every layer, head and element, keys and values."""
    rows = []
    for row, length in enumerate(pool.lengths):
        used = pool.tensor[:, :, row, :, :length]
        assert used.eq(used[:1, :1, :1, :, :1]).all()
        rows.append(used[0, 0, 0, :, 0].tolist())
    return rows


def test_an_empty_pool_holds_no_memory() -> None:
    assert Pool(SHAPE).tensor.numel() == 0


@pytest.mark.parametrize("held", [0, 2**28])
def test_much_memory_is_released_when_the_last_row_leaves(
    monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setattr(model.pool, "IDLE_BYTES", held)
    pool = Pool(SHAPE)
    for _ in range(5):
        join(pool, 100, 1.0)
    assert pool.tensor.numel() > 0
    pool.keep([3])
    assert pool.tensor.numel() > 0
    pool.keep([])
    assert (pool.tensor.numel() > 0) == (held > 0)
    assert not pool.tensor.any()
    assert pool.rows == pool.longest == 0
    join(pool, 2, 7.0)  # and it can be used again
    assert contents(pool) == [[7.0, 7.0]]


def test_lengths_grow_in_blocks_and_contents_stay() -> None:
    pool = Pool(SHAPE)
    join(pool, 1, 1.0)
    assert pool.tensor.shape[4] == LENGTH_BLOCK
    for length in (LENGTH_BLOCK, LENGTH_BLOCK + 1, 3 * LENGTH_BLOCK + 1):
        join(pool, length, float(length))
    assert pool.tensor.shape[4] == 4 * LENGTH_BLOCK
    assert contents(pool)[0] == [1.0]
    assert contents(pool)[2] == [LENGTH_BLOCK + 1.0] * (LENGTH_BLOCK + 1)


def test_a_tight_pool_is_as_long_as_its_longest_row_and_contents_stay() -> None:
    pool = Pool(SHAPE, tight=True)
    lengths = []
    for length in (3, 7, 5, 30):
        join(pool, length, float(length))
        lengths.append(length)
        assert pool.tensor.shape[4] == max(lengths)
    assert contents(pool) == [[float(length)] * length for length in lengths]
    pool.keep([0, 1, 2])
    assert pool.tensor.shape[4] == 30
    join(pool, 6, 6.0)  # once rows join, half of what is there is not needed
    assert pool.tensor.shape[4] == 7
    assert contents(pool) == [[float(length)] * length for length in (3, 7, 5, 6)]


def test_an_empty_tight_pool_lays_its_memory_out_anew() -> None:
    pool = Pool(SHAPE, tight=True)
    for _ in range(4):
        join(pool, 20, float("nan"))
    memory = pool.tensor.data_ptr()
    for length in (19, 20, 3):
        pool.keep([])
        join(pool, length, 1.0)
        assert (pool.tensor.data_ptr(), pool.tensor.shape[4]) == (memory, length)
        assert pool.tensor.isfinite().all()
    pool.keep([])
    pool.held = True
    join(pool, 2, 1.0)
    assert pool.tensor.shape[4] == 3, "what is bound to it needs it as it is"


def test_rows_that_come_one_by_one_are_copied_seldom() -> None:
    pool = Pool(SHAPE)
    tensors = set()
    for _ in range(64):
        join(pool, 1, 1.0)
        tensors.add(pool.tensor.data_ptr())
    assert len(tensors) <= 7  # 1, 2, 4, ... 64
    assert pool.tensor.shape[2] == 64


@pytest.mark.parametrize(
    "kept", [[0, 1, 2, 3], [3, 1, 2], [1], [3, 2, 1, 0], [0, 3], [2, 0, 3, 1], []]
)
def test_kept_rows_take_their_new_order(kept: list[int]) -> None:
    pool = Pool(SHAPE)
    for row in range(4):
        join(pool, row + 1, 10.0 + row)
    pool.keep(kept)
    assert pool.lengths == [row + 1 for row in kept]
    assert contents(pool) == [[10.0 + row] * (row + 1) for row in kept]


def test_moves_come_in_an_order_in_which_nothing_is_read_too_late() -> None:
    draw = random.Random(4)
    for _ in range(300):
        size = draw.randint(1, 9)
        new = draw.sample(range(size), draw.randint(0, size))
        moves = [(place, draw.randrange(size)) for place in new]
        if draw.random() < 0.5:
            moves = list(zip(new, draw.sample(new, len(new)), strict=True))
        places: dict[int | None, int] = {place: place for place in range(size)}
        expected = places | dict(moves)
        for to, origin in one_by_one(moves):
            places[to] = places[origin]
        places.pop(None, None)
        assert places == expected


def test_a_slot_that_was_left_holds_nothing_of_its_last_user() -> None:
    # A NaN behind a mask is still a NaN: zero weight times NaN.
    pool = Pool(SHAPE)
    join(pool, 2, 1.0)
    join(pool, 9, float("nan"))
    join(pool, 3, 2.0)
    join(pool, 7, float("nan"))
    pool.keep([0, 2])  # one of them is overwritten, one is just left
    join(pool, 1, 3.0)
    assert contents(pool) == [[1.0] * 2, [2.0] * 3, [3.0]]
    assert pool.tensor.isfinite().all()


@pytest.mark.parametrize("tight", [False, True])
def test_pools_follow_any_history(tight: bool) -> None:
    draw = random.Random(0)
    pool = Pool(SHAPE, tight)
    expected: list[list[float]] = []
    for step in range(300):
        if expected and draw.random() < 0.4:
            several = draw.choices if draw.random() < 0.3 else draw.sample  # as beams do
            kept = several(range(len(expected)), k=draw.randint(0, len(expected)))
            pool.keep(kept)
            expected = [expected[row] for row in kept]
        else:
            length = draw.choice([0, 1, 5, LENGTH_BLOCK, LENGTH_BLOCK + 3])
            join(pool, length, float(step))
            expected.append([float(step)] * length)
        assert contents(pool) == expected


# --- how keys are read ---------------------------------------------------------------------------


def test_positions_of_all_rows_lie_together_unless_rows_are_few_and_long() -> None:
    pool = Pool(SHAPE)
    join(pool, 2 * STREAMED_LENGTH, 1.0)
    assert pool.pieces(pool.lengths) is None, "each head's keys are one piece of memory"
    join(pool, 20, 2.0)
    assert pool.tensor[0, 0, :, :, 0].is_contiguous()
    pieces = pool.pieces(pool.lengths)
    assert pieces
    assert [rows for _, rows in pieces] == [2, 1]
    assert contents(pool) == [[1.0] * 2 * STREAMED_LENGTH, [2.0] * 20]
    half = Pool(replace(SHAPE, dtype=torch.bfloat16))
    for _ in range(9):
        join(half, 3, 1.0)
    assert half.pieces(half.lengths) is None, "other kernels read these"


def test_pieces_hold_every_key_of_every_row() -> None:
    draw = random.Random(3)
    for _ in range(300):
        rows = draw.choice([1, 5, 40])
        lengths = [draw.choice([0, 1, PIECE, draw.randrange(200)]) for _ in range(rows)]
        pieces = cut_keys(lengths)
        assert [part.start for part, _ in pieces] == [0, *(part.stop for part, _ in pieces[:-1])]
        assert pieces[-1][0].stop == max(1, *lengths)
        assert pieces[0][1] == len(lengths)
        for part, live in pieces:
            assert all(length <= part.start for length in lengths[live:])
            assert lengths[live - 1] > part.start or not part.start


@torch.no_grad()
@pytest.mark.parametrize("queries", [1, 3])
def test_attention_by_pieces_is_attention(queries: int) -> None:
    torch.manual_seed(0)
    draw = random.Random(queries)
    for rows in (1, 2, 9, 30):
        lengths = [draw.randint(1, 90) for _ in range(rows)]
        longest = max(lengths)
        query = torch.randn(rows, 3, queries, 4)
        keys, values = torch.randn(2, longest, rows, 3, 4).permute(0, 2, 3, 1, 4)
        mask = padding_mask(torch.tensor(lengths), longest)
        expected = attention_weights(query, keys, mask) @ values
        pieces = cut_keys(lengths)
        for part, live in pieces:
            keys[live:, :, part] = values[live:, :, part] = torch.nan  # nobody reads there
        bias = mask_bias(mask, torch.float32)
        found = attention(query, keys, values, bias, pieces=pieces)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
