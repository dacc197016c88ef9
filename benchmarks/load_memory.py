"""Memory that loading a model takes, for every layout of its weights and two dtypes.

    python -m benchmarks.load_memory
    python -m benchmarks.load_memory --megabytes 4000 --directory /mnt/disk

A checkpoint of M2M100's shape, random float32, is written tensor by tensor; a fresh process loads
it while this one watches its anonymous memory (`RssAnon`). Pages of a mapped file are not
anonymous: the system drops them when it needs room and reads them again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from model.families import m2m_100
from model.loader import DTYPES, LoadedModel, load_model

Shapes = Mapping[str, tuple[int, ...]]
Load = Callable[[Path, str, str], LoadedModel]

BLOCK = 2**20
"""Numbers drawn at once."""

INTERVAL = 0.001
"""Seconds between two looks at a process that loads."""

SHARDS = 4

# --- checkpoints ---------------------------------------------------------------------------------


def write_config(directory: Path, megabytes: int) -> Shapes:
    """`config.json` of a model of about this size in float32; the shapes of its tensors.

    Half of it is the token table, as in multilingual models of 600 million parameters.
    """
    dim = 1024 if megabytes >= 500 else 512
    layers = max(1, megabytes * 10**6 // 2 // (4 * 28 * dim * dim))  # encoder 12, decoder 16
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), layers)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), dim // 64)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 4 * dim)
    sizes |= {"d_model": dim, "vocab_size": megabytes * 10**6 // 2 // (4 * dim)}
    config: dict[str, Any] = {"model_type": "m2m_100", "max_position_embeddings": 1024, **sizes}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    plan = m2m_100.blueprint(config, {}, None)
    parameters = dict(plan.network.named_parameters())
    return {name: tuple(parameters[ours].shape) for ours, name in plan.names.items()}


def write_tensors(path: Path, shapes: Shapes, seed: int = 0) -> None:
    """A safetensors file of random float32, of which never more than a block is in memory."""
    sizes = [4 * torch.Size(shape).numel() for shape in shapes.values()]
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        for (name, shape), offsets in zip(shapes.items(), pairwise(ends), strict=True)
    }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # numbers begin at a multiple of eight bytes
    draw = torch.Generator().manual_seed(seed)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for size in sizes:
            for start in range(0, size // 4, BLOCK):
                count = min(BLOCK, size // 4 - start)
                file.write(torch.randn(count, generator=draw).numpy().tobytes())


def write_whole(directory: Path, shapes: Shapes) -> None:
    """`model.safetensors`."""
    write_tensors(directory / "model.safetensors", shapes)


def write_shards(directory: Path, shapes: Shapes) -> None:
    """`model.safetensors.index.json` and its files."""
    weight_map: dict[str, str] = {}
    for i in range(SHARDS):
        file = f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        part = dict(list(shapes.items())[i::SHARDS])
        write_tensors(directory / file, part, seed=i)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_pickle(directory: Path, shapes: Shapes) -> None:
    """`pytorch_model.bin`."""
    path = directory / "tensors.safetensors"
    write_tensors(path, shapes)
    file: Any
    with safe_open(path, framework="pt") as file:  # torch.save writes what is mapped, unread
        tensors = {name: file.get_tensor(name) for name in shapes}
        torch.save(tensors, directory / "pytorch_model.bin")
    path.unlink()


LAYOUTS: Mapping[str, Callable[[Path, Shapes], None]] = {
    "model.safetensors": write_whole,
    "four safetensors shards": write_shards,
    "pytorch_model.bin": write_pickle,
}


def make_checkpoint(directory: Path, layout: str, megabytes: int) -> Path:
    """A directory to load, with weights in one of `LAYOUTS`."""
    LAYOUTS[layout](directory, write_config(directory, megabytes))
    return directory


# --- measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """One load; memory is anonymous, in bytes.

    Attributes:
        size: of the model's parameters.
        before: what the process had before, Python and torch.
        peak: the most seen while loading.
    """

    size: int
    before: int
    peak: int

    @property
    def growth(self) -> float:
        """What the peak has on top of `before`, in sizes of the model."""
        return (self.peak - self.before) / self.size


def measure(directory: Path, dtype: str, load: Load = load_model) -> Measurement:
    """Load a directory in a process of its own and watch it.

    Args:
        load: called with the directory, "cpu" and the dtype.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_load_and_tell, args=(theirs, load, directory, dtype))
    with ExitStack() as stack:
        process.start()
        stack.callback(process.join)
        stack.callback(ours.close)
        theirs.close()  # so that its end is noticed here
        before = peak = ours.recv()
        ours.send(None)
        while not ours.poll(INTERVAL):
            peak = max(peak, anonymous(process.pid))
        size = ours.recv()
        peak = max(peak, anonymous(process.pid))
    return Measurement(size, before, peak)


def _load_and_tell(pipe: Connection, load: Load, directory: Path, dtype: str) -> None:
    """What the watched process does; it stays until it was looked at."""
    torch.set_num_threads(1)
    pipe.send(anonymous())
    pipe.recv()
    model = load(directory, "cpu", dtype)
    pipe.send(model.parameters * DTYPES[dtype].itemsize)
    with suppress(EOFError):
        pipe.recv()


def anonymous(process: int | None = None) -> int:
    """Bytes of a process' anonymous resident memory; default: this one's."""
    status = Path(f"/proc/{process or 'self'}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


# --- the table -----------------------------------------------------------------------------------


def rows(directory: Path | None, megabytes: int) -> Iterator[str]:
    """The lines of a Markdown table, as they are measured; memory is in megabytes."""
    yield "| weights | dtype | model | before | peak | (peak - before) / model |"
    yield "|---|---|--:|--:|--:|--:|"
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory(dir=directory) as path:
            make_checkpoint(Path(path), layout, megabytes)
            for dtype in ("float32", "bfloat16"):
                m = measure(Path(path), dtype)
                memory = [f"{count / 10**6:,.0f}" for count in (m.size, m.before, m.peak)]
                cells = [layout, dtype, *memory, f"{m.growth:.2f}"]
                yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory that loading a model takes.")
    parser.add_argument("--megabytes", type=int, default=1000, help="of weights in float32")
    parser.add_argument("--directory", type=Path, help="for the checkpoint; default: temporary")
    options = parser.parse_args()
    for row in rows(options.directory, options.megabytes):
        print(row, flush=True)


if __name__ == "__main__":
    main()
