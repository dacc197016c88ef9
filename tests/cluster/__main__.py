"""Kill parts of a cluster under load: `python -m tests.cluster --write docs/scaling.md`.

Exits with status 1 if a promise of docs/scaling.md was broken.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.pages import write_between
from tests.builders import make_native_model
from tests.cluster.report import BEGIN, END, as_markdown
from tests.cluster.serving import ENVIRONMENT


def main() -> int:
    """The exit status: 0 if every promise held."""
    options = _options()
    # A short path: the names of Unix sockets have 107 bytes at most.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-") as directory:
        os.environ.update({**ENVIRONMENT, "RAY_TMPDIR": directory})
        from tests.cluster.faults import run  # Ray reads its environment when it is imported

        versions = [make_native_model(Path(directory) / str(n), seed=n) for n in range(2)]
        episodes = run(versions)
    figures = as_markdown(episodes)
    print(figures)
    if options.write:
        write_between(options.write, BEGIN, END, figures)
    return 1 if any(episode.broken for episode in episodes) else 0


def _options() -> argparse.Namespace:
    assert __doc__
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into a page")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
