"""Each parameter by hand, its no-op, and rows that do not notice each other."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import ModelSpec
from model.decoding import (
    PROCESSORS,
    History,
    Processor,
    ProcessorBatch,
    divide_by_temperature,
    finish_reason,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
    penalize_frequency,
    penalize_presence,
    penalize_repetition,
    renormalize,
)
from model.sequence import Decoding, Sequence

BANNED = -torch.inf
CPU = torch.device("cpu")


def row(*scores: float) -> Tensor:
    return torch.tensor([scores])


SPEC = ModelSpec("test", 10, 10, 0, (1,), (2,), 3, max_src=10, max_tgt=8, default_max_new_tokens=8)
RESUBMITTED = ModelSpec("test", 10, 10, 0, (), (2,), 3, 10, 10, 10, source_is_target=True)


def history(*targets: list[int], vocab: int = 10) -> History:
    """Rows whose decoder start is 1 and whose generated tokens are given."""
    rows = [Sequence([4], [1], Decoding(20), tokens) for tokens in targets or ([],)]
    return History(rows, replace(SPEC, tgt_vocab_size=vocab), CPU)


class TestTemperature:
    def test_scores_are_divided(self) -> None:
        divided = divide_by_temperature(row(1.0, -2.0, 4.0), history(), torch.tensor([2.0]))
        assert divided.tolist() == [[0.5, -1.0, 2.0]]

    @pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-6])
    def test_the_lowest_ones_leave_one_likeliest_token(self, temperature: float) -> None:
        scores = divide_by_temperature(row(1.0, -2.0, 4.0), history(), torch.tensor([temperature]))
        assert scores.isfinite().all()
        assert scores.softmax(-1).tolist() == [[0.0, 0.0, 1.0]]


class TestRenormalize:
    def test_what_constraints_left_is_a_distribution_again(self) -> None:
        logits = torch.tensor([[0.0, BANNED, 0.0], [0.0, BANNED, 0.0]])
        scores = renormalize(logits, history([], []), torch.tensor([True, False]))
        assert scores[0].exp().tolist() == pytest.approx([0.5, 0.0, 0.5])
        assert scores[1].tolist() == [0.0, BANNED, 0.0]


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


class TestMinP:
    # probabilities 0.5, 0.3, 0.15, 0.05, out of order
    SCORES = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()

    @pytest.mark.parametrize(
        ("p", "kept"),
        [(0.09, {0, 1, 2, 3}), (0.11, {0, 1, 3}), (0.59, {1, 3}), (0.61, {1}), (1.0, {1})],
    )
    def test_tokens_below_a_share_of_the_likeliest_are_banned(
        self, p: float, kept: set[int]
    ) -> None:
        scores = keep_min_p(self.SCORES, history(), torch.tensor([p]))[0]
        assert {i for i in range(4) if scores[i] > BANNED} == kept


class TestTypicalP:
    # The entropy of 0.5, 0.3, 0.15, 0.05 is 1.142; surprises are 0.693, 1.204, 1.897, 2.996: the
    # second token is nearest, then the first, the third, the fourth.
    SCORES = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()

    @pytest.mark.parametrize(
        ("p", "kept"),
        [
            (0.01, {1}),
            (0.29, {1}),
            (0.31, {0, 1}),
            (0.79, {0, 1}),
            (0.81, {0, 1, 2}),
            (0.96, {0, 1, 2, 3}),
        ],
    )
    def test_the_least_surprising_surprises_that_hold_p_stay(
        self, p: float, kept: set[int]
    ) -> None:
        scores = keep_typical(self.SCORES, history(), torch.tensor([p]))[0]
        assert {i for i in range(4) if scores[i] > BANNED} == kept


class TestPenalties:
    SCORES = row(2.0, -2.0, 3.0, -1.0, 0.5)

    def test_repetition_divides_positive_and_multiplies_negative_scores(self) -> None:
        said = history([2, 3, 3], vocab=5)  # and 1, the decoder start
        penalized = penalize_repetition(self.SCORES, said, torch.tensor([2.0]))
        assert penalized.tolist() == [[2.0, -4.0, 1.5, -2.0, 0.5]]

    def test_repetition_rewards_below_one(self) -> None:
        penalized = penalize_repetition(self.SCORES, history([2], vocab=5), torch.tensor([0.5]))
        assert penalized.tolist() == [[2.0, -1.0, 6.0, -1.0, 0.5]]

    @pytest.mark.parametrize("penalty", [1e-46, 1e-38, 1e-6])
    def test_the_lowest_repetition_penalties_stay_finite(self, penalty: float) -> None:
        scores = penalize_repetition(
            row(0.0, 9.0, -9.0), history([0, 2], vocab=3), torch.tensor([penalty])
        )
        assert scores.isfinite().all()
        assert scores.argmax().item() == 1  # the decoder start is in the history

    def test_what_is_banned_stays_banned(self) -> None:
        scores = row(BANNED, 1.0)
        penalized = penalize_repetition(scores, history([0], vocab=2), torch.tensor([0.5]))
        assert penalized.tolist() == [[BANNED, 2.0]]

    def test_frequency_counts_generated_tokens_alone(self) -> None:
        # OpenAI: mu[j] - c[j] * alpha_frequency; neither decoder start nor prefix is in c.
        said = history([2, 3, 3], vocab=5)
        said.rows[0].prefix.append(4)
        penalized = penalize_frequency(self.SCORES, said, torch.tensor([0.5]))
        assert penalized.tolist() == [[2.0, -2.0, 2.5, -2.0, 0.5]]

    def test_presence_asks_only_whether_a_token_was_generated(self) -> None:
        # OpenAI: mu[j] - float(c[j] > 0) * alpha_presence
        said = history([2, 3, 3], vocab=5)
        penalized = penalize_presence(self.SCORES, said, torch.tensor([-1.5]))
        assert penalized.tolist() == [[2.0, -2.0, 4.5, 0.5, 0.5]]


def banned(
    tokens: list[int],
    src: tuple[int, ...] = (4,),
    prefix: list[int] | None = None,
    /,
    vocab: int = 10,
    **asked: Any,
) -> set[int]:
    """Ids that a row's parameters forbid after `tokens`."""
    grown = Sequence(list(src), prefix or [1], Decoding(asked.pop("max_new_tokens", 20), **asked))
    grown.tokens = tokens
    spec = replace(SPEC, tgt_vocab_size=vocab, max_tgt=50)
    scores = ProcessorBatch([grown.decoding], spec, CPU)(
        torch.zeros(1, vocab), History([grown], spec, CPU)
    )
    return {i for i in range(vocab) if scores[0, i] == BANNED}


class TestNgrams:
    @pytest.mark.parametrize(
        ("size", "tokens", "expected"),
        [
            (1, [], {1}),  # the decoder start
            (1, [5, 6, 5], {1, 5, 6}),
            (2, [], set()),
            (2, [5, 6, 5], {6}),
            (2, [5, 6, 5, 7, 5], {6, 7}),
            (2, [5, 5], {5}),
            (2, [6, 1], {6}),  # what followed the decoder start
            (3, [5, 6, 7, 5, 6], {7}),
            (3, [5, 6, 7, 6, 5], set()),
            (3, [5, 5, 5], {5}),
            (9, [5, 6, 7], set()),
        ],
    )
    def test_no_ngram_of_the_target_comes_twice(
        self, size: int, tokens: list[int], expected: set[int]
    ) -> None:
        assert banned(tokens, no_repeat_ngram_size=size) == expected

    def test_the_target_prefix_counts(self) -> None:
        assert banned([5], (4,), [1, 5, 6], no_repeat_ngram_size=2) == {6}

    @pytest.mark.parametrize(
        ("size", "tokens", "expected"),
        [
            (1, [], {7, 8, 2}),
            (2, [], set()),
            (2, [7], {8}),
            (2, [8], {7, 2}),
            (3, [7], set()),
            (3, [8, 7], {8}),
            (6, [7, 8, 7, 8], set()),
        ],
    )
    def test_no_ngram_of_the_source_is_copied(
        self, size: int, tokens: list[int], expected: set[int]
    ) -> None:
        assert banned(tokens, (7, 8, 7, 8, 2), encoder_no_repeat_ngram_size=size) == expected

    def test_rows_of_any_length_and_size_side_by_side(self) -> None:
        sizes = [1, 2, 0, 3, 2]
        targets: list[list[int]] = [[5], [5, 6, 5], [5, 5, 5], [5, 6, 7, 5, 6], []]
        rows = [
            Sequence([4], [1], Decoding(20, no_repeat_ngram_size=size), tokens)
            for size, tokens in zip(sizes, targets, strict=True)
        ]
        batch = ProcessorBatch([r.decoding for r in rows], SPEC, CPU)
        scores = batch(torch.zeros(5, 10), History(rows, SPEC, CPU))
        assert [set(s.isneginf().nonzero()[:, 0].tolist()) for s in scores] == [
            {1, 5},
            {6},
            set(),
            {7},
            set(),
        ]


class TestConstraints:
    @pytest.mark.parametrize(
        ("words", "tokens", "expected"),
        [
            (((7,),), [], {7}),
            (((7,), (8,)), [5], {7, 8}),
            (((5, 7),), [], set()),
            (((5, 7),), [5], {7}),
            (((5, 7),), [5, 6], set()),
            (((5, 7), (5, 8), (6, 9)), [5], {7, 8}),
            (((5, 6, 7),), [5, 6], {7}),
            (((5, 6, 7),), [6], set()),
            (((1, 7),), [], {7}),  # the decoder start is history
            (((2,),), [5], set()),  # </s> alone is never banned
            (((5, 2),), [5], {2}),
            (((7,), (7,)), [], {7}),
        ],
    )
    def test_bad_words_are_never_completed(
        self, words: tuple[tuple[int, ...], ...], tokens: list[int], expected: set[int]
    ) -> None:
        assert banned(tokens, bad_words=words) == expected

    @pytest.mark.parametrize(("tokens", "expected"), [([], {2}), ([5], {2}), ([5, 5], set())])
    def test_the_end_is_banned_until_enough_was_said(
        self, tokens: list[int], expected: set[int]
    ) -> None:
        assert banned(tokens, min_new_tokens=2) == expected

    def test_a_prefix_does_not_count_as_said(self) -> None:
        assert banned([5], (4,), [1, 6, 6], min_new_tokens=2) == {2}

    def test_a_bias_is_added(self) -> None:
        asked = Decoding(9, logit_bias=((3, 1.5), (0, -2.0)))
        batch = ProcessorBatch([asked, Decoding(9)], replace(SPEC, tgt_vocab_size=4), CPU)
        scores = batch(torch.ones(2, 4), history([], [], vocab=4))
        assert scores.tolist() == [[-1.0, 1.0, 1.0, 2.5], [1.0, 1.0, 1.0, 1.0]]

    @pytest.mark.parametrize(
        ("tokens", "prefix", "allowed"),
        [([], [1], {7}), ([7], [1], set(range(10))), ([], [1, 5], set(range(10)))],
    )
    def test_the_first_token_is_forced_right_behind_the_decoder_start(
        self, tokens: list[int], prefix: list[int], allowed: set[int]
    ) -> None:
        forbidden = banned(tokens, (4,), prefix, forced_bos_token_id=7)
        assert set(range(10)) - forbidden == allowed

    @pytest.mark.parametrize(
        ("tokens", "allowed"), [([], set(range(10))), ([5], set(range(10))), ([5, 5], {2})]
    )
    def test_the_last_token_that_the_length_allows_is_forced(
        self, tokens: list[int], allowed: set[int]
    ) -> None:
        forbidden = banned(tokens, forced_eos_token_id=2, max_new_tokens=3)
        assert set(range(10)) - forbidden == allowed

    def test_the_last_position_is_a_last_token_too(self) -> None:
        grown = Sequence([4], [1] * 6, Decoding(20, forced_eos_token_id=2), [5, 5])
        scores = ProcessorBatch([grown.decoding], SPEC, CPU)(
            torch.zeros(1, 10), History([grown], SPEC, CPU)
        )
        assert scores[0].isneginf().sum() == 9  # max_tgt is 8: the third token is the last

    def test_forcing_overrules_every_ban_and_the_end_overrules_the_beginning(self) -> None:
        forced: dict[str, Any] = {"forced_bos_token_id": 7, "forced_eos_token_id": 2}
        everything: dict[str, Any] = {"bad_words": ((7,),), "min_new_tokens": 5}
        assert set(range(10)) - banned([], **forced, **everything) == {7}
        assert set(range(10)) - banned([], **forced, max_new_tokens=1) == {2}


def test_parameters_apply_in_the_documented_order() -> None:
    assert [processor.field for processor in PROCESSORS] == [
        "logit_bias",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words",
        "min_new_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "renormalize_logits",
    ]


def test_every_parameter_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "decoding.md").read_text(encoding="utf-8")
    for name in Decoding.__dataclass_fields__:
        if name not in ("sample", "sequence_number", "logprobs"):  # do_sample, a count, details
            assert f"`{name}`" in text, name


ASKED: dict[str, Any] = {
    "logit_bias": ((3, 1.0),),
    "bad_words": ((3,), (5, 4)),
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "min_new_tokens": 9,
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 3,
    "top_k": 5,
    "renormalize_logits": True,
}
"""Values of some effect; of other parameters 0.5 is one."""


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda processor: processor.field)
def test_only_logits_that_are_spare_are_overwritten(processor: Processor) -> None:
    asked: Any = {processor.field: ASKED.get(processor.field, 0.5)}
    batch = ProcessorBatch([Decoding(9, **asked)], SPEC, CPU)
    logits = torch.randn(1, 10)
    copy = logits.clone()
    scores = batch(logits, history([5, 4, 5]))
    assert torch.equal(logits, copy)
    assert torch.equal(batch(logits, history([5, 4, 5]), spare=True), scores)
    assert torch.equal(logits, copy) != processor.writes


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda processor: processor.field)
def test_no_python_loop_runs_over_the_vocabulary_or_the_rows(processor: Processor) -> None:
    value = ASKED.get(processor.field, 0.5)

    def lines(rows: int, vocab: int) -> int:
        spec = replace(SPEC, tgt_vocab_size=vocab)
        said = history(*[[5, 4, 5]] * rows, vocab=vocab)
        _ = said.target, said.generated, said.source, said.tail(1)  # ids to tensors
        _ = said.generated_lengths, said.last_step
        prepared = processor.prepare([value] * rows, spec, CPU)
        count = 0

        def trace(frame: Any, event: str, arg: Any) -> Any:
            nonlocal count
            if not frame.f_code.co_filename.endswith("decoding.py"):
                return None  # a finaliser of something else
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            processor.apply(torch.randn(rows, vocab), said, prepared)
        finally:
            sys.settrace(before)
        return count

    assert lines(2, 12) == lines(40, 5000)


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
        (replace(SPEC, eos_ids=(2, 5)), 3, 1, [4, 5], 9, "eos_token"),
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
