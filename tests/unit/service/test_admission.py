"""Who may enter the queue, and when the others are told to come back."""

from __future__ import annotations

import pytest

from model.sequence import Decoding, Forward, Sequence
from seqserve.errors import InvalidRequestError, OverloadedError
from service.admission import Admission, Work, tokens_of


def row(tokens: int) -> Sequence:
    """A sequence that reserves so many tokens."""
    return Sequence([5] * (tokens - 3), [1], Decoding(2))


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_source_prefix_and_new_tokens_count() -> None:
    assert tokens_of([Sequence([5] * 4, [1, 6], Decoding(10)), Forward([5] * 3, [1, 2])]) == 21


def test_a_full_queue_names_limit_taken_and_wanted() -> None:
    queue = Admission(max_works=3, max_tokens=100)
    queue.enter([row(5), row(5)])
    with pytest.raises(OverloadedError) as refused:
        queue.enter([row(5), row(5)])
    assert str(refused.value) == (
        "the queue is full: 2 of 3 places are taken, the request needs 2 (max_queue)"
    )
    queue.enter([row(70)])
    queue.leave([row(5)], finished=True)
    with pytest.raises(OverloadedError) as refused:
        queue.enter([row(40)])
    assert str(refused.value) == (
        "the queue is full: 75 of 100 tokens are taken, the request needs 40 (max_queue_tokens)"
    )


def test_what_is_refused_takes_nothing() -> None:
    queue = Admission(max_works=9, max_tokens=10)
    queue.enter([row(8)])
    with pytest.raises(OverloadedError):
        queue.enter([row(3)])
    assert (queue.works.taken, queue.tokens.taken) == (1, 8)


@pytest.mark.parametrize(
    ("works", "words"),
    [
        ([row(5)] * 4, r"4 places of the queue, at most 3 are allowed \(max_queue\)"),
        ([row(101)], r"101 tokens of the queue, at most 100 are allowed \(max_queue_tokens\)"),
    ],
)
def test_what_can_never_fit_is_the_request_s_fault(works: list[Work], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        Admission(max_works=3, max_tokens=100).enter(works)


def test_when_to_come_back_follows_from_what_finished() -> None:
    clock = Clock()
    queue = Admission(max_works=10, max_tokens=10_000, clock=clock)
    queue.enter([row(5)] * 10)
    for _ in range(5):  # one every two seconds
        clock.now += 2.0
        queue.leave([row(5)], finished=True)
        queue.enter([row(5)])
    with pytest.raises(OverloadedError) as refused:
        queue.enter([row(5)] * 3)
    assert refused.value.retry_after == 6


def test_what_was_cancelled_frees_its_place_and_says_nothing_of_the_pace() -> None:
    clock = Clock()
    queue = Admission(max_works=2, max_tokens=10_000, clock=clock)
    for _ in range(3):
        queue.enter([row(5)] * 2)
        clock.now += 0.1
        queue.leave([row(5)] * 2, finished=False)
    queue.enter([row(5)] * 2)
    with pytest.raises(OverloadedError) as refused:
        queue.enter([row(5)])
    assert refused.value.retry_after == 10
