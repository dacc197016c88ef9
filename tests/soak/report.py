"""A soak's figures for a reader: a page in Markdown, or JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.soak.ledger import LEFT, Tally, growth
from tests.soak.process import MIB, Footprint
from tests.soak.restarts import Interrupted
from tests.soak.run import EVERY_PLACE, Report

BEGIN, END = "<!-- figures: make soak writes them -->", "<!-- end of the figures -->"
"""What stands around the figures on a page."""

STATUSES: tuple[int | str, ...] = (200, 429, 504, LEFT)
"""Columns of their own; other statuses share one."""


def percentile(seconds: Sequence[float], percent: int) -> float:
    """In milliseconds."""
    if len(seconds) < 2:
        return 1e3 * sum(seconds)
    return 1e3 * statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]


def as_json(report: Report) -> dict[str, Any]:
    """All figures."""
    ledger, compared = report.ledger, report.compared
    return {
        "broken": report.broken,
        "seed": report.seed,
        "requests": report.requests,
        "seconds": report.seconds,
        "kinds": {
            kind: {
                "statuses": {str(status): n for status, n in tally.statuses.items()},
                "p50_ms": percentile(tally.seconds, 50),
                "p99_ms": percentile(tally.seconds, 99),
            }
            for kind, tally in sorted(ledger.kinds.items())
        },
        "statuses": {str(s): ledger.total(s) for s in (*STATUSES, *_others(report))},
        "late_ms": {"p50": percentile(ledger.late, 50), "p99": percentile(ledger.late, 99)},
        "footprint": {name: vars(getattr(report, name)) for name in ("start", "warm", "end")},
        "growth": growth(report.warm, report.end),
        "most_rows": report.busiest,
        "compared": {
            "answers": compared.answers,
            "questions": compared.questions,
            "alone": compared.alone,
            "rounding": compared.rounding,
            "wrong": compared.wrong,
        },
        "terminated": vars(report.terminated),
        "killed": vars(report.killed),
    }


def as_markdown(report: Report) -> str:
    """All figures as tables."""
    verdict = "Every promise held." if not report.broken else "**Broken promises:**\n"
    broken = [f"- {fault}" for fault in report.broken]
    return "\n".join(
        [verdict, *broken, "", *_whole(report), "", *_by_kind(report), "", *_signals(report)]
    )


def _whole(report: Report) -> list[str]:
    ledger, compared = report.ledger, report.compared
    rate = ledger.total() / report.seconds
    rows = [
        ("requests", f"{report.requests:,} in {report.seconds:,.0f} s, {rate:,.0f} a second"),
        (
            "models",
            ", ".join(f"{m} (up to {report.busiest[m]} rows a step)" for m in report.models),
        ),
        ("answered with 200", f"{ledger.total(200):,}"),
        ("429, the queue was full", f"{ledger.total(429):,}"),
        ("504, the deadline passed", _deadlines(report)),
        ("left by their callers", f"{ledger.total(LEFT):,}"),
        ("another status", f"{sum(map(ledger.total, _others(report))):,}"),
        (
            "answers compared with those alone",
            f"{compared.answers:,} to {compared.questions:,} questions; "
            f"{len(compared.wrong)} wrong, {compared.rounding_cases} differ by rounding",
        ),
        ("latency, p50 / p99", _latency(ledger.seconds)),
        (
            "memory: ready / most in the second quarter / in the last",
            f"{_memory(report)}, {growth(report.warm, report.end):+.1%}"
            + ", from too few requests to judge" * (not report.warmed_up),
        ),
        ("open files: ready / after the second quarter / at the end", _three(report, "files")),
        ("threads, likewise", _three(report, "threads")),
        ("rows in use or inputs waiting at the end", ", ".join(report.left_over) or "none"),
        (
            "requests at the end that need every place in a queue",
            f"{ledger.kinds[EVERY_PLACE].statuses[200]} of {len(report.models)} served",
        ),
        ("from SIGTERM to the exit, without work", f"{report.ending:.1f} s"),
        ("machine", f"{_processor()}, Python {platform.python_version()}"),
    ]
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def _by_kind(report: Report) -> list[str]:
    lines = [
        "| requests by kind | all | 200 | 429 | 504 | left | other | p50 / p99 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return lines + [_line(kind, tally) for kind, tally in sorted(report.ledger.kinds.items())]


def _line(kind: str, tally: Tally) -> str:
    counts = [tally.statuses[status] for status in STATUSES]
    others = tally.statuses.total() - sum(counts)
    cells = [f"{n:,}" if n else "" for n in (tally.statuses.total(), *counts, others)]
    return f"| {kind} | {' | '.join(cells)} | {_latency(tally.seconds)} |"


def _signals(report: Report) -> list[str]:
    def line(name: str, of: Interrupted) -> str:
        cells = (of.before, of.answered, of.refused, of.lost, of.after, of.again)
        return f"| {name} | {' | '.join(f'{n:,}' for n in cells)} | {of.seconds:.1f} s |"

    return [
        "| signal under load | answered before it | under way: answered | 503 | lost "
        "| made after it: 503 or not let in | answered again, alike | until the end |",
        "|---|---|---|---|---|---|---|---|",
        line("SIGTERM", report.terminated),
        line("SIGKILL, restart", report.killed),
    ]


def _others(report: Report) -> list[int | str]:
    seen = {status for tally in report.ledger.kinds.values() for status in tally.statuses}
    return sorted(seen - set(STATUSES), key=str)


def _deadlines(report: Report) -> str:
    late = report.ledger.late
    return f"{report.ledger.total(504):,}; late by {_latency(late)} (p50 / p99)"


def _latency(seconds: Sequence[float]) -> str:
    return f"{percentile(seconds, 50):,.0f} / {percentile(seconds, 99):,.0f} ms"


def _prints(report: Report) -> tuple[Footprint, Footprint, Footprint]:
    return report.start, report.warm, report.end


def _memory(report: Report) -> str:
    return " / ".join(f"{each.rss / MIB:,.1f}" for each in _prints(report)) + " MiB"


def _three(report: Report, name: str) -> str:
    return " / ".join(str(getattr(each, name)) for each in _prints(report))


def _processor() -> str:
    """Its name, and how many of its cores the soak was given."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    return f"{cores} core{'s' * (cores > 1)} of {names[0] if names else platform.machine()}"
