"""Who may enter a model's queue: bounded by count and by tokens, refused at once when full."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from model.sequence import Forward
from model.sequence import Sequence as Row
from seqserve.errors import InvalidRequestError, OverloadedError
from service.rates import FinishRate

Work = Row | Forward


class Bound:
    """One limit of a queue.

    Args:
        unit: what is counted, for messages.
        setting: that sets the limit, for messages.

    Attributes:
        taken: by works that were accepted and have not left.
    """

    def __init__(self, limit: int, unit: str, setting: str) -> None:
        self.limit = limit
        self.unit = unit
        self.setting = setting
        self.taken = 0
        self.finished = FinishRate()

    def check(self, wanted: int, now: float) -> None:
        """Refuse what does not fit.

        Raises:
            InvalidRequestError: it would not fit into an empty queue either.
            OverloadedError: it does not fit now; tells when to come back.
        """
        if wanted > self.limit:
            raise InvalidRequestError(
                f"the request needs {wanted} {self.unit} of the queue, "
                f"at most {self.limit} are allowed ({self.setting})"
            )
        if (over := self.taken + wanted - self.limit) > 0:
            raise OverloadedError(
                f"the queue is full: {self.taken} of {self.limit} {self.unit} are taken, "
                f"the request needs {wanted} ({self.setting})",
                retry_after=self.finished.seconds_until(over, now),
            )

    def leave(self, amount: int, finished: bool, now: float) -> None:
        """So much is free again; what was cancelled says nothing of the pace."""
        self.taken -= amount
        if finished:
            self.finished.record(amount, now)


class Admission:
    """The places of one model's queue.

    Args:
        max_works: accepted and not yet answered, at most.
        max_tokens: likewise: source, prefix and new tokens that these may come to.
        clock: seconds.
    """

    def __init__(
        self, max_works: int, max_tokens: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.works = Bound(max_works, "places", "max_queue")
        self.tokens = Bound(max_tokens, "tokens", "max_queue_tokens")
        self._clock = clock

    def enter(self, works: Sequence[Work]) -> None:
        """Take places for all works or for none.

        Raises:
            InvalidRequestError: they can never fit.
            OverloadedError: they do not fit now.
        """
        now, tokens = self._clock(), tokens_of(works)
        self.works.check(len(works), now)
        self.tokens.check(tokens, now)
        self.works.taken += len(works)
        self.tokens.taken += tokens

    def leave(self, works: Sequence[Work], finished: bool) -> None:
        """Free the places of works.

        Args:
            finished: whether they ran to their end.
        """
        now = self._clock()
        self.works.leave(len(works), finished, now)
        self.tokens.leave(tokens_of(works), finished, now)


def tokens_of(works: Iterable[Work]) -> int:
    """Tokens that works may come to."""
    return sum(work.reserved_tokens for work in works)
