"""Error rates over pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.evaluation import (
    Answer,
    Evaluation,
    calibration_error,
    edit_distance,
    evaluate,
    translate,
)
from model.loader import load_model
from tests.builders import make_native_model


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ("kitten", "sitting", 3),
        ("", "abc", 3),
        ("abc", "", 3),
        ("", "", 0),
        ("flaw", "lawn", 2),
        ("intention", "execution", 5),
        ("abc", "abc", 0),
    ],
)
def test_edit_distance_equals_the_textbook(a: str, b: str, distance: int) -> None:
    assert edit_distance(list(a), list(b)) == distance
    assert edit_distance(list(b), list(a)) == distance


def test_a_source_is_right_if_any_of_its_references_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(make_native_model(tmp_path), "cpu")
    answers = {"a": Answer("X", 0.9), "b": Answer("X Y Z", 0.3), "c": Answer("", 0.35)}
    monkeypatch.setattr(
        "model.evaluation.translate", lambda _, texts, beams: [answers[text] for text in texts]
    )
    pairs = [("a", "W W"), ("a", "X"), ("b", "X Y"), ("b", "P Q R S"), ("c", "X Y")]
    evaluation = evaluate(model, pairs, epoch=4)
    # a is right (1 token); b misses its nearest by 1 of 2 tokens; c by 2 of 2.
    # b and c share a bin with none right of 0.65 expected; a's bin has one right of 0.9.
    expected = [pytest.approx(share) for share in (2 / 3, 3 / 5, (0.65 + 0.1) / 3)]
    assert evaluation == Evaluation(4, 3, *expected)


@pytest.mark.parametrize(
    ("probabilities", "right", "error"),
    [
        # bin 0: 0 right of 0.05; bin 5: 1 of 0.55; bin 9: 1 of 1.9. (0.05 + 0.45 + 0.9) / 4
        ([0.05, 0.92, 0.98, 0.55], [False, True, False, True], 0.35),
        ([0.5, 0.5], [True, False], 0.0),  # right as often as it says
        ([1.0, 1.0], [True, True], 0.0),
        ([1.0, 0.0], [False, True], 1.0),
        ([], [], 0.0),
    ],
)
def test_calibration_error_equals_the_sum_by_hand(
    probabilities: list[float], right: list[bool], error: float
) -> None:
    assert calibration_error(probabilities, right) == pytest.approx(error)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_an_answer_s_probability_is_that_of_its_tokens(tmp_path: Path, num_beams: int) -> None:
    model = load_model(make_native_model(tmp_path), "cpu")
    source, target = model.source_tokenizer, model.target_tokenizer
    assert source is not None
    assert target is not None
    (answer,) = translate(model, ["d"], num_beams)
    (tokens,) = target.encode([answer.text])
    assert 1 < len(tokens) < model.spec.default_max_new_tokens  # it ended by itself
    tgt = torch.tensor([[*model.spec.decoder_start_ids, *tokens[:-1]]])
    logits, _ = model.network(torch.tensor(source.encode(["d"])), tgt)
    logprobs = logits[0].log_softmax(dim=-1)[range(len(tokens)), tokens]
    assert answer.probability == pytest.approx(logprobs.sum().exp().item(), rel=1e-4)
