"""How far number formats are apart, by hand and on the shipped model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.formats import differences, read, scores
from model.loader import load_model

WEIGHTS = Path(__file__).parents[3] / "weights" / "g2p-en"


def test_differences_are_those_of_tokens_and_of_their_sums() -> None:
    one = [torch.tensor([-1.0, -2.0]), torch.tensor([-4.0])]
    other = [torch.tensor([-1.5, -1.5]), torch.tensor([-3.0])]
    assert differences(one, other) == pytest.approx((1.0, 2 / 3, 1.0, 0.5))


def test_a_format_moves_the_shipped_model_s_scores_a_little() -> None:
    plain = load_model(WEIGHTS, "cpu")
    pairs = read(WEIGHTS / "dev-sample.tsv", plain)[:40]
    expected = scores(plain, pairs)
    assert [len(each) for each in expected] == [len(tgt) for _, tgt in pairs]
    assert all((each <= 0).all() for each in expected)
    _, mean, _, _ = differences(expected, scores(load_model(WEIGHTS, "cpu", "bfloat16"), pairs))
    assert 0 < mean < 0.05
