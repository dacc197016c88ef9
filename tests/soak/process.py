"""What a process takes of its machine, as Linux tells it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Footprint:
    """Memory in bytes, open files, threads."""

    rss: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        return cls(
            rss=int(fields["VmRSS"].split()[0]) * KIB,
            files=len(list(Path(f"/proc/{pid}/fd").iterdir())),
            threads=int(fields["Threads"]),
        )
