"""What may become of a call around a signal, and what may not."""

from __future__ import annotations

import pytest

from tests.soak.restarts import PROMPT, Interrupted, enter
from tests.soak.traffic import Call
from tests.soak.wire import Reply

CALL = Call(1, "greedy", "POST", "/generate", frozenset({200}))
SIGNAL = 100.0
BEFORE, UNDER_WAY, AFTER = (90.0, 5.0), (95.0, 10.0), (101.0, 1.0)
"""When a call began, and how long it took."""


@pytest.mark.parametrize(
    ("reply", "term", "kill"),
    [
        (Reply("answered", 200), True, True),
        (Reply("answered", 503), True, True),
        (Reply("answered", 500), False, False),
        (Reply("lost"), False, True),
        (Reply("hung"), False, False),
    ],
)
def test_a_call_under_way_is_answered_unless_its_server_was_killed(
    reply: Reply, term: bool, kill: bool
) -> None:
    for killed, fine in ((False, term), (True, kill)):
        found = Interrupted()
        reply.began, reply.seconds = UNDER_WAY
        enter(found, SIGNAL, CALL, reply, killed=killed)
        assert bool(found.broken) is not fine
        assert (found.before, found.after) == (0, 0)


def test_a_caller_learns_soon_that_its_server_was_killed() -> None:
    found = Interrupted()
    enter(found, SIGNAL, CALL, Reply("lost", began=95.0, seconds=6.0 + PROMPT), killed=True)
    assert (found.lost, len(found.broken)) == (1, 1)


def test_what_was_answered_before_the_signal_counts_as_such_and_must_be_an_answer() -> None:
    found = Interrupted()
    for status in (200, 503):
        began, seconds = BEFORE
        reply = Reply("answered", status, began=began, seconds=seconds)
        enter(found, SIGNAL, CALL, reply, killed=False)
    assert (found.before, len(found.broken)) == (2, 1)


def test_a_call_made_after_the_signal_need_not_be_let_in() -> None:
    found = Interrupted()
    began, seconds = AFTER
    for reply in (Reply("lost"), Reply("answered", 503), Reply("hung")):
        reply.began, reply.seconds = began, seconds
        enter(found, SIGNAL, CALL, reply, killed=False)
    assert (found.after, len(found.broken)) == (3, 1)
