"""Batches without a server: in order, bounded, errors in their places."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import cast

import pytest

from model.config import ModelSpec
from model.engine import Engine
from model.tokenizer import build_tokenizer
from seqserve.errors import SeqserveError
from seqserve.schemas import GenerateRequest, GenerateResponse
from service.batch import Batch, Prefetched
from service.generation import Generator
from service.vocabulary import Vocabulary
from tests.fake_engine import FakeEngine

LETTERS = build_tokenizer(["abcdefghij"], "char")
NUMBERS = build_tokenizer(["n0 n1 n2 n3 n4 n5 n6 n7 n8"], "whitespace")
SPEC = ModelSpec("test", 14, 13, 0, (1,), (2,), 3, 8, 60, 50)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(max_rows=4)


def batch(engine: FakeEngine, window: int = 8) -> Batch:
    generator = Generator(
        SPEC, Vocabulary("source", 14, LETTERS), Vocabulary("target", 13, NUMBERS)
    )
    return Batch(generator, cast("Engine", engine), window)


def request(tokens: int, text: str = "abc") -> GenerateRequest:
    body = {"inputs": text, "parameters": {"max_new_tokens": tokens, "details": True}}
    return GenerateRequest.model_validate(body)


def lengths(answers: list[GenerateResponse | SeqserveError]) -> list[int]:
    return [
        a.details.generated_tokens if isinstance(a, GenerateResponse) and a.details else -1
        for a in answers
    ]


def test_answers_come_in_order_whatever_they_take(engine: FakeEngine) -> None:
    wanted = [9, 1, 5, 2, 7, 3, 1, 1, 8, 4] * 5
    answers = list(batch(engine).run(request(n) for n in wanted))
    assert lengths(answers) == wanted
    assert max(engine.rows_by_step) == 4


def test_errors_and_empty_inputs_stand_in_their_places(engine: FakeEngine) -> None:
    engine.poison = {LETTERS.encode(["j"])[0][0]}
    items = [
        request(2),
        SeqserveError("line 2 is bad"),
        request(2, text="a" * 30),
        request(2, text=""),
        request(2, text="j"),
        request(3),
    ]
    answers = list(batch(engine).run(items))
    assert lengths(answers) == [2, -1, -1, 0, -1, 3]
    assert [str(a) for a in answers if isinstance(a, SeqserveError)] == [
        "line 2 is bad",
        "inputs has 31 tokens, the model takes at most 8 (max_source_tokens); "
        "parameters.truncate cuts it",
        "logits are not finite",
    ]


def test_no_more_than_a_window_is_held(engine: FakeEngine) -> None:
    taken = 0

    def endless() -> Iterator[GenerateRequest]:
        nonlocal taken
        for _ in itertools.count():
            taken += 1
            yield request(3)

    answers = batch(engine, window=8).run(endless())
    for _ in range(20):
        next(answers)
    assert taken <= 20 + 2 * 8 + 2


def test_answers_do_not_wait_for_more_input(engine: FakeEngine) -> None:
    asked_again = threading.Event()

    def slow() -> Iterator[GenerateRequest]:
        yield request(3)
        asked_again.wait(5)  # only after the first answer
        yield request(1)

    answers = batch(engine).run(slow())
    assert lengths([next(answers)]) == [3]
    asked_again.set()
    assert lengths(list(answers)) == [1]


def test_reading_ahead_ends_with_the_input() -> None:
    source = Prefetched([request(1)], ahead=2)
    assert source.take(wait=True)
    assert source.take(wait=True) is None
    assert source.take(wait=True) is None
