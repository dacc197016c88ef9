"""Everything that wants a GPU in one run of a few minutes: tests, then the speed of decoding.

    python -m benchmarks.gpu --write benchmarks/GPU.md

A random model of Marian base's shape decodes greedily, 24 source tokens and 32 new ones a row, with
steps as they are and as CUDA graphs, by turns. Nothing is fetched: torch, pytest and this project
are enough.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.models import MARIAN_BASE, write_model
from benchmarks.timing import by_turns
from model.config import EngineConfig
from model.engine import Engine
from model.loader import LoadedModel, load_model
from model.sequence import Decoding
from model.sequence import Sequence as Row

SRC, NEW = 24, 32
BATCHES = (1, 8, 32, 64, 256)
DTYPES = ("float32", "bfloat16", "float16")
STEPS, GRAPHS = "steps", "graphs"
SPREAD = 3.0


def decode(engine: Engine, rows: int) -> list[list[int]]:
    """The answers of so many rows at once."""
    draw = torch.Generator().manual_seed(rows)
    sources = torch.randint(4, MARIAN_BASE.src_vocab_size, (rows, SRC), generator=draw).tolist()
    decoding = Decoding(NEW, min_new_tokens=NEW)
    batch = [Row(source, [MARIAN_BASE.bos_id], decoding) for source in sources]
    for row in batch:
        engine.submit(row)
    for _ in engine.run():
        pass
    return [row.tokens for row in batch]


def table(directory: Path, rounds: int) -> Iterator[str]:
    yield "| dtype | batch | steps, tokens a second | graphs | ratio | rows answered alike |"
    yield "|---|--:|--:|--:|--:|--:|"
    for dtype in DTYPES:
        model = load_model(directory, "cuda", dtype)
        engines = {
            name: Engine(model, EngineConfig(max_rows=max(BATCHES), lookahead=0, cuda_graphs=on))
            for name, on in ((STEPS, False), (GRAPHS, True))
        }
        for batch in BATCHES:
            yield line(model, engines, batch, rounds)


def line(model: LoadedModel, engines: dict[str, Engine], batch: int, rounds: int) -> str:
    plain, recorded = (decode(engines[name], batch) for name in (STEPS, GRAPHS))
    alike = sum(a == b for a, b in zip(plain, recorded, strict=True))
    works = {name: partial(decode, engine, batch) for name, engine in engines.items()}
    timed = by_turns(works, rounds)
    speeds = (batch * NEW / timed.median(name) for name in (STEPS, GRAPHS))
    cells = [model.dtype, str(batch), *(f"{speed:,.0f}" for speed in speeds)]
    return f"| {' | '.join(cells)} | {timed.speedup(GRAPHS, STEPS):.2f} | {alike} of {batch} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table there as well")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "cuda", "tests"])
    head = [
        "# Decoding on a GPU",
        "",
        f"`python -m benchmarks.gpu`, torch {torch.__version__}, {torch.cuda.get_device_name()}. "
        f"Tests marked `cuda`: exit status {tests.returncode}.",
        "",
    ]
    lines = list(head)
    print("\n".join(head))
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), MARIAN_BASE, SPREAD)
        for row in table(Path(directory), options.rounds):
            print(row, flush=True)
            lines.append(row)
    if options.write:
        options.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
