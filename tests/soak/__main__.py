"""Soak a server: `python -m tests.soak --requests 20000`.

Starts `seqserve serve` with the shipped model and a small generated one, sends it requests of every
kind with every misfortune, and exits with 1 if one promise of docs/reliability.md was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.pages import write_between
from service.settings import DEFAULT_MODEL
from tests.builders import make_native_model
from tests.soak.report import BEGIN, END, as_json, as_markdown
from tests.soak.run import soak


def main() -> int:
    """The exit status: 0 if every promise held."""
    options = _options()
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel("WARNING")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        small = make_native_model(Path(directory), max_src=48, max_tgt=200)
        models = {"g2p-en": DEFAULT_MODEL, "small": small}
        report = asyncio.run(soak(models, options.requests, options.seed))
    figures = as_markdown(report)
    print(json.dumps(as_json(report), indent=2) if options.json else figures)
    if options.write:
        write_between(options.write, BEGIN, END, f"\n{figures}\n")
    return 1 if report.broken else 0


def _options() -> argparse.Namespace:
    assert __doc__
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the traffic (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into a page")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
