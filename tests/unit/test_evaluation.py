"""Error rates over pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.evaluation import Evaluation, edit_distance, evaluate
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
    answers = {"a": "X", "b": "X Y Z", "c": ""}
    monkeypatch.setattr(
        "model.evaluation.translate", lambda model, texts: [answers[text] for text in texts]
    )
    pairs = [("a", "W W"), ("a", "X"), ("b", "X Y"), ("b", "P Q R S"), ("c", "X Y")]
    evaluation = evaluate(model, pairs, epoch=4)
    # a is right (1 token); b misses its nearest by 1 of 2 tokens; c by 2 of 2.
    assert evaluation == Evaluation(4, 3, pytest.approx(2 / 3), pytest.approx(3 / 5))
