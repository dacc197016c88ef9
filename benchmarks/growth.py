"""How a decoding step's time grows with live rows, and with the lengths of sources and targets.

    python -m benchmarks.growth --plot docs/pictures/growth.svg

A random model of Marian base's shape on the CPU. A line is fitted to each; what a row takes
of memory is said beside it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.models import MARIAN_BASE, write_model
from benchmarks.timing import by_turns
from model.cache import RequestMemory
from model.config import EngineConfig
from model.loader import LoadedModel, load_model
from model.sequence import Decoding
from model.sequence import Sequence as Row
from model.steppers import CachedStepper
from model.transformer import Transformer

ROWS, SRC, TGT = 8, 24, 16
"""What stays where something else grows."""

GROWN = {
    "rows": (1, 2, 4, 8, 16, 32, 64),
    "source tokens": (8, 64, 128, 256, 384, 512),
    "target tokens": (8, 64, 128, 256, 384, 500),
}


@dataclass(frozen=True)
class Growth:
    """A step's milliseconds against a size, and the line through them.

    Attributes:
        at_zero, each: of the line, in ms.
        explained: share of the variance that the line explains (R²).
    """

    name: str
    sizes: Sequence[int]
    milliseconds: Sequence[float]

    @property
    def each(self) -> float:
        return float(np.polyfit(self.sizes, self.milliseconds, 1)[0])

    @property
    def at_zero(self) -> float:
        return float(np.polyfit(self.sizes, self.milliseconds, 1)[1])

    @property
    def explained(self) -> float:
        return float(np.corrcoef(self.sizes, self.milliseconds)[0, 1] ** 2)


@torch.inference_mode()
def prepared(model: LoadedModel, rows: int, src: int, tgt: int) -> tuple[CachedStepper, list[Row]]:
    """Live rows of these lengths."""
    network = model.network
    assert isinstance(network, Transformer)
    stepper = CachedStepper(network, model.spec, EngineConfig(max_encoder_cache_bytes=0))
    batch = [Row([4 + i % 99, *[5] * (src - 1)], [1, *[7] * tgt], Decoding(1)) for i in range(rows)]
    stepper.join(batch)
    return stepper, batch


@torch.inference_mode()
def step(stepper: CachedStepper, rows: list[Row]) -> None:
    """One step, which leaves the lengths as they are."""
    stepper.step(rows)
    stepper.targets.pool.lengths = [length - 1 for length in stepper.targets.pool.lengths]


def measure(model: LoadedModel, name: str, sizes: Sequence[int], rounds: int) -> Growth:
    """Times of all sizes, by turns."""
    fixed = {"rows": ROWS, "source tokens": SRC, "target tokens": TGT}
    works = {
        str(size): partial(step, *prepared(model, *{**fixed, name: size}.values()))
        for size in sizes
    }
    timed = by_turns(works, rounds, least_seconds=0.1)
    return Growth(name, sizes, [1e3 * timed.median(str(size)) for size in sizes])


def plot(found: Sequence[Growth], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3), layout="constrained")
    for axes, growth in zip(figure.subplots(1, len(found)), found, strict=True):
        ends = np.array([0, growth.sizes[-1]])
        axes.plot(ends, growth.at_zero + growth.each * ends, color="0.7")
        axes.plot(growth.sizes, growth.milliseconds, "o", color="tab:blue", markersize=4)
        axes.set(xlabel=growth.name, ylim=(0, None), xlim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("ms a step")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "int8"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, as an SVG or PNG")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), MARIAN_BASE)
        model = load_model(Path(directory), "cpu", options.dtype)
    found = [measure(model, name, sizes, options.rounds) for name, sizes in GROWN.items()]
    print(f"{options.dtype}, {torch.get_num_threads()} threads; else {ROWS} rows, {SRC} source and")
    print(f"{TGT} target tokens\n\n| grows | ms a step | line | R² |\n|---|---|---|--:|")
    for growth in found:
        times = ", ".join(
            f"{size}: {ms:.1f}" for size, ms in zip(growth.sizes, growth.milliseconds, strict=True)
        )
        line = f"{growth.at_zero:.1f} + {growth.each:.3f} each"
        print(f"| {growth.name} | {times} | {line} | {growth.explained:.3f} |")
    assert isinstance(model.network, Transformer)
    memory = RequestMemory.of(model.network, model.spec)
    print(f"\nA row takes {memory.per_source_token:,} bytes a source token, and")
    print(f"{memory.per_target_token:,} a target token; {memory.longest / 2**20:.0f} MiB at most.")
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
