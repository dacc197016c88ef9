"""Each parameter by hand, its no-op, and rows that do not notice each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.config import ModelSpec
from model.decoding import (
    PROCESSORS,
    History,
    ProcessorBatch,
    divide_by_temperature,
    finish_reason,
    keep_top_k,
    keep_top_p,
)
from model.sequence import Decoding, Sequence

BANNED = -torch.inf
CPU = torch.device("cpu")


def row(*scores: float) -> Tensor:
    return torch.tensor([scores])


SPEC = ModelSpec("test", 10, 10, 0, (1,), 2, 3, max_src=10, max_tgt=8, default_max_new_tokens=8)
RESUBMITTED = ModelSpec("test", 10, 10, 0, (), 2, 3, 10, 10, 10, source_is_target=True)


def history(*targets: list[int], vocab: int = 10) -> History:
    """Rows whose decoder start is 1 and whose generated tokens are given."""
    rows = [Sequence([4], [1], Decoding(20), tokens) for tokens in targets or ([],)]
    return History(rows, replace(SPEC, tgt_vocab_size=vocab), CPU)


class TestTemperature:
    def test_scores_are_divided(self) -> None:
        divided = divide_by_temperature(row(1.0, -2.0, 4.0), history(), torch.tensor([2.0]))
        assert divided.tolist() == [[0.5, -1.0, 2.0]]


class TestTopK:
    def test_all_but_the_k_likeliest_are_banned(self) -> None:
        kept = keep_top_k(row(1.0, 3.0, 2.0, 0.0), history(), torch.tensor([2]))
        assert kept.tolist() == [[BANNED, 3.0, 2.0, BANNED]]

    def test_ties_with_the_kth_stay(self) -> None:
        kept = keep_top_k(row(1.0, 3.0, 1.0, 0.0), history(), torch.tensor([2]))
        assert kept.tolist() == [[1.0, 3.0, 1.0, BANNED]]

    def test_more_than_the_vocabulary_bans_nothing(self) -> None:
        assert keep_top_k(row(1.0, 3.0), history(), torch.tensor([9])).tolist() == [[1.0, 3.0]]


class TestTopP:
    # probabilities 0.5, 0.3, 0.15, 0.05, out of order
    SCORES = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()

    @pytest.mark.parametrize(
        ("p", "kept"),
        [
            (0.01, {1}),
            (0.49, {1}),
            (0.51, {1, 3}),
            (0.79, {1, 3}),
            (0.81, {0, 1, 3}),
            (0.96, {0, 1, 2, 3}),
            (1.0, {0, 1, 2, 3}),
        ],
    )
    def test_the_fewest_tokens_that_hold_p_stay(self, p: float, kept: set[int]) -> None:
        scores = keep_top_p(self.SCORES, history(), torch.tensor([p]))[0]
        assert {i for i in range(4) if scores[i] > BANNED} == kept
        assert all(scores[i] == self.SCORES[0, i] for i in kept)


def plain(logits: list[float], decoding: Decoding) -> list[float]:
    """The same definitions, token by token."""
    scores = [x / decoding.temperature for x in logits]
    if decoding.top_k:
        kth = sorted(scores, reverse=True)[min(decoding.top_k, len(scores)) - 1]
        scores = [x if x >= kth else BANNED for x in scores]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    mass = torch.tensor(scores).softmax(0).tolist()
    held = 0.0
    for place, i in enumerate(order):
        if place and held >= decoding.top_p < 1.0:
            scores[i] = BANNED
        held += mass[i]
    return scores


def test_mixed_rows_equal_each_row_alone_and_a_plain_transcription() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 50) * 3
    choices = [
        Decoding(
            1,
            sample=True,
            temperature=[1.0, 0.7, 1.6][i % 3],
            top_k=[0, 1, 5, 500][i % 4],
            top_p=[1.0, 0.3, 0.95, 0.6, 1.0][i % 5],
        )
        for i in range(40)
    ]
    nothing = history(*[[] for _ in choices], vocab=50)
    together = ProcessorBatch(choices, SPEC, CPU)(logits, nothing)
    for i, decoding in enumerate(choices):
        alone = ProcessorBatch([decoding], SPEC, CPU)(logits[i : i + 1], history(vocab=50))[0]
        torch.testing.assert_close(together[i], alone, atol=0, rtol=0)
        torch.testing.assert_close(alone, torch.tensor(plain(logits[i].tolist(), decoding)))


def test_no_processor_runs_when_no_row_asks() -> None:
    batch = ProcessorBatch([Decoding(5), Decoding(5, sample=True, seed=3)], SPEC, CPU)
    logits = torch.randn(2, 10)
    assert batch(logits, history([], [])) is logits


def test_every_processor_names_a_field_and_its_no_op_changes_nothing() -> None:
    logits = torch.randn(3, 10)
    said = history([4, 5, 4, 5], [], [6])
    for processor in PROCESSORS:
        assert getattr(Decoding(5), processor.field) == processor.no_op
        values = processor.prepare([processor.no_op] * 3, SPEC, CPU)
        unchanged = processor.apply(logits, said, values)
        torch.testing.assert_close(unchanged, logits, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("spec", "src", "prefix", "tokens", "limit", "reason"),
    [
        (SPEC, 3, 1, [5, 2], 9, "eos_token"),
        (SPEC, 3, 1, [5, 5], 9, None),
        (SPEC, 3, 1, [5, 5], 2, "length"),
        (SPEC, 3, 1, [5, 2], 2, "eos_token"),
        (SPEC, 3, 1, [5] * 7, 99, None),
        (SPEC, 3, 1, [5] * 8, 99, "length"),  # the 8th token came out of the last position
        (SPEC, 3, 6, [5] * 3, 99, "length"),
        (RESUBMITTED, 7, 0, [5] * 2, 99, None),
        (RESUBMITTED, 7, 0, [5] * 3, 99, "length"),
    ],
)
def test_why_a_row_ends(
    spec: ModelSpec, src: int, prefix: int, tokens: list[int], limit: int, reason: str | None
) -> None:
    grown = Sequence([4] * src, [1] * prefix, Decoding(limit), tokens)
    assert finish_reason(grown, spec) == reason
