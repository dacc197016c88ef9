"""What became of requests around faults, as a table on a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.soak.report import percentile

BEGIN, END = "<!-- faults: make test-cluster writes them -->", "<!-- end of the faults -->"

HEAD = [
    "| what happens under load | requests | of them with an error at first | lost or wrong "
    "| p50 / p99 / longest, retries included | until as many replicas were up as should be |",
    "|---|---|---|---|---|---|",
]


@dataclass
class Episode:
    """What became of the requests around one fault.

    Attributes:
        seconds: each request took, retries included.
        errors: kind of the first error that a request got -> how many got it.
        wrong: requests with an answer that no version gives.
        lost: requests that retries did not help either.
        recovered: seconds until all replicas were up again, or were of the new version.
        harmless: what happened is no reason for an error, not even for one that a retry helps.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    lost: list[str] = field(default_factory=list)
    recovered: float = 0.0
    harmless: bool = False

    @property
    def broken(self) -> bool:
        """Whether a promise was."""
        failed = self.harmless and self.errors
        return bool(self.wrong or self.lost or failed or not self.seconds)


def as_markdown(episodes: Sequence[Episode]) -> str:
    """A line for each."""
    return "\n".join([*HEAD, *map(_line, episodes)])


def _line(episode: Episode) -> str:
    kinds = ", ".join(f"{n} × `{kind}`" for kind, n in sorted(episode.errors.items()))
    p50, p99 = (percentile(episode.seconds, share) for share in (50, 99))
    times = f"{p50:,.0f} / {p99:,.0f} / {1e3 * max(episode.seconds, default=0.0):,.0f} ms"
    bad = "; ".join([*episode.lost, *([f"{episode.wrong} wrong"] * bool(episode.wrong))])
    cells = [
        episode.name,
        f"{len(episode.seconds):,}",
        kinds or "none",
        bad or "none",
        times,
        f"{episode.recovered:.0f} s",
    ]
    return f"| {' | '.join(cells)} |"
