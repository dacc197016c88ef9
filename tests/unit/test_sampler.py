"""Random numbers keyed by counters, and draws against the exact distribution."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from model.sampler import draw, mix, pick, uniform
from model.sequence import Decoding, Sequence


def chi_square_bound(degrees: int) -> float:
    """The 0.9999 quantile, by Wilson and Hilferty's cube approximation."""
    z = 3.719
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


def test_the_mixer_is_splitmix64() -> None:
    # First outputs of the published generator from state 0: the finaliser of 1, 2, 3 golden gammas.
    gamma = 0x9E3779B97F4A7C15
    outputs = [mix(n * gamma % 2**64) for n in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_uniforms_depend_on_each_counter_and_on_nothing_else() -> None:
    base = uniform(1, 2, 3)
    assert base == uniform(1, 2, 3)
    assert len({base, uniform(2, 2, 3), uniform(1, 3, 3), uniform(1, 2, 4)}) == 4
    assert uniform(1, 0, 1) != uniform(0, 1, 1) != uniform(1, 1, 0)


@pytest.mark.parametrize("varied", range(3))
def test_uniforms_are_uniform_along_each_counter(varied: int) -> None:
    draws = []
    for n in range(20_000):
        counters = [7, 0, 5]
        counters[varied] = n
        draws.append(uniform(*counters))
    assert all(0.0 <= u < 1.0 for u in draws)
    counts = Counter(int(u * 100) for u in draws)
    statistic = sum((counts[b] - 200) ** 2 / 200 for b in range(100))
    assert statistic < chi_square_bound(99)


def test_draws_follow_the_softmax() -> None:
    torch.manual_seed(0)
    scores = torch.randn(40) * 2
    scores[[3, 17]] = -torch.inf
    n = 40_000
    uniforms = torch.tensor([uniform(9, 0, step) for step in range(n)], dtype=torch.float64)
    drawn = draw(scores.expand(n, -1), uniforms)
    counts = torch.bincount(drawn, minlength=40).double()
    assert counts[[3, 17]].sum() == 0
    expected = scores.double().softmax(0) * n
    allowed = expected > 0
    statistic = ((counts - expected) ** 2 / expected)[allowed].sum().item()
    assert statistic < chi_square_bound(int(allowed.sum()) - 1)


@pytest.mark.parametrize("u", [0.0, 0.5, 1.0 - 2**-53])
def test_a_banned_token_is_never_drawn_not_even_at_the_ends(u: float) -> None:
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]])
    assert draw(scores, torch.tensor([u], dtype=torch.float64)).item() in (1, 3)


def test_rows_that_do_not_sample_take_the_likeliest() -> None:
    scores = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0], [2.0, 2.0, 1.0]])
    greedy = Decoding(max_new_tokens=5)
    rows = [
        Sequence([5], [1], greedy),
        Sequence([5], [1], Decoding(max_new_tokens=5, sample=True, seed=3)),
        Sequence([5], [1], greedy),
    ]
    assert pick(scores[[0, 2]], [rows[0], rows[2]]).tolist() == [1, 0]
    picked = pick(scores, rows).tolist()
    assert (picked[0], picked[2]) == (1, 0)  # the lowest id wins a tie


def test_the_step_of_a_draw_is_the_number_of_tokens_before_it() -> None:
    scores = torch.zeros(1, 1000)
    row = Sequence([5], [1], Decoding(max_new_tokens=5, sample=True, seed=3))
    first = pick(scores, [row]).item()
    row.tokens.append(7)
    second = pick(scores, [row]).item()
    row.tokens.pop()
    assert pick(scores, [row]).item() == first != second
    assert first == int(uniform(3, 0, 0) * 1000)
