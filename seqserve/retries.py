"""When a call is tried again, and how long its tries may take.

Every call of this service may be repeated: a POST asks a model and changes nothing, so a second one
does no harm. (Draws without a seed come out differently each time, as they always do.) Tried again
is what another try can help: a full or unready server (429, 503), and a connection that failed
before an answer came. What has run out of time is not, nor a stream whose first event has come.
"""

from __future__ import annotations

import random
import secrets
import time

import httpx

from seqserve.errors import SeqserveError
from seqserve.failures import check_version, error_of, failure_of

RETRIED_STATUSES = (429, 503)

RETRIED_FAILURES = (
    httpx.NetworkError,
    httpx.RemoteProtocolError,  # an idle connection was closed just as it was taken up again
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
)

FIRST_PAUSE = 0.5
"""Seconds before the second try, where the server does not say; it doubles from try to try."""

LONGEST_PAUSE = 30.0
"""Seconds; longer pauses are made only where the server asks for them."""

JITTER = 0.25
"""Pauses are longer by up to this share: callers refused together do not return together."""

CONNECT_TIMEOUT = 10.0
"""Seconds to reach the server: more means that it is not there."""

GRACE = 1.0
"""Seconds waited beyond the server's own deadline, so that its answer says that time was up."""


class Tries:
    """The tries of one call.

    Args:
        retries: how many may follow the first.
        timeout: seconds for all tries and the pauses between them; None: no bound.

    Attributes:
        request_id: of all of them, so that the server's log can be searched.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, retries: int, timeout: float | None) -> None:
        if retries < 0:
            raise ValueError(f"retries must be at least 0, got {retries}")
        if timeout is not None and not timeout > 0.0:
            raise ValueError(f"timeout must be above 0 seconds, got {timeout}")
        self.request_id = secrets.token_hex(16)
        self._left = retries
        self._pause = FIRST_PAUSE
        self._deadline = None if timeout is None else time.monotonic() + timeout

    def headers(self) -> dict[str, str]:
        """What the server is told of the next try: its id, and when to stop working on it."""
        headers = {"x-request-id": self.request_id}
        seconds = self._seconds()
        return headers if seconds is None else headers | {"x-request-timeout": f"{seconds:.3f}"}

    def timeout(self) -> httpx.Timeout:
        """How long the next try may wait for what."""
        seconds = self._seconds()
        if seconds is None:
            return httpx.Timeout(None, connect=CONNECT_TIMEOUT)
        return httpx.Timeout(seconds + GRACE, connect=min(seconds, CONNECT_TIMEOUT), pool=seconds)

    def pause_after_answer(self, response: httpx.Response) -> float:
        """Seconds until the next try, after a failed answer.

        Raises:
            SeqserveError: the answer's error, where there is no next try.
        """
        check_version(response)
        error = error_of(response)
        return self._pause_after(error, response.status_code in RETRIED_STATUSES)

    def pause_after_failure(self, error: httpx.HTTPError) -> float:
        """Seconds until the next try, where no answer came.

        Raises:
            SeqserveError: what happened, where there is no next try.
        """
        failure = failure_of(error, self.request_id)
        failure.__cause__ = error
        return self._pause_after(failure, isinstance(error, RETRIED_FAILURES))

    def _pause_after(self, error: SeqserveError, helps: bool) -> float:
        pause = error.retry_after
        if pause is None:
            pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        pause *= 1.0 + JITTER * random.random()
        seconds = self._seconds()
        if not helps or not self._left or (seconds is not None and pause >= seconds):
            raise error
        self._left -= 1
        return pause

    def _seconds(self) -> float | None:
        """What is left of the call's time: a millisecond at least, for a try that is due."""
        if self._deadline is None:
            return None
        return max(self._deadline - time.monotonic(), 1e-3)
