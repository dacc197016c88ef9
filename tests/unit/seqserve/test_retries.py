"""Pauses between tries; the clients' tests have when there are any."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest

from seqserve.errors import NoConnectionError
from seqserve.failures import wait_of
from seqserve.retries import JITTER, LONGEST_PAUSE, Tries

REFUSED = httpx.ConnectError("refused")


def test_pauses_double_up_to_a_bound() -> None:
    tries = Tries(10, None)
    pauses = [tries.pause_after_failure(REFUSED) for _ in range(10)]
    for pause, least in zip(pauses, [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30], strict=True):
        assert least <= pause <= least * (1 + JITTER)
    assert max(pauses) <= LONGEST_PAUSE * (1 + JITTER)
    with pytest.raises(NoConnectionError):
        tries.pause_after_failure(REFUSED)


def test_callers_that_fail_together_do_not_come_back_together() -> None:
    pauses = {round(Tries(1, None).pause_after_failure(REFUSED), 4) for _ in range(100)}
    assert len(pauses) > 50


def test_what_the_server_asks_for_is_the_least_pause() -> None:
    busy = httpx.Response(503, headers={"retry-after": "40"})
    pauses = [Tries(1, None).pause_after_answer(busy) for _ in range(100)]
    assert 40 <= min(pauses) <= max(pauses) <= 50


def test_an_error_names_its_cause() -> None:
    with pytest.raises(NoConnectionError) as caught:
        Tries(0, None).pause_after_failure(REFUSED)
    assert caught.value.__cause__ is REFUSED


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, None),
        ("", None),
        ("3", 3.0),
        ("0.5", 0.5),
        ("-4", 0.0),
        ("inf", None),
        ("nan", None),
        ("soon", None),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("Thu, 01 Jan 1970 00:00:00 -0000", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(text: str | None, seconds: float | None) -> None:
    assert wait_of(text) == seconds


def test_a_date_to_come_is_so_many_seconds_away() -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    assert wait_of(date) == pytest.approx(90, abs=5)
