"""Tokens a second without a server: seqserve, CTranslate2 and transformers on the same work.

    python -m benchmarks.offline --shape marian-base --batch 1 --batch 8

Sources of 24 random tokens, 32 generated, `</s>` forbidden until then. Where other work runs beside
it, `--threads 1 --cpu-seconds` counts the process's own seconds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ctranslate2
import torch
from transformers import AutoModelForSeq2SeqLM

from benchmarks.checkpoints import CT2_DTYPES, SHAPES, build
from benchmarks.timing import Clock, Timed, Work, by_turns
from model.config import EngineConfig
from model.engine import Engine
from model.loader import LoadedModel, load_model
from model.sequence import Decoding, Sequence

SOURCE_TOKENS = 24
NEW_TOKENS = 32
ROOT = Path(__file__).parent.parent / "build" / "benchmarks"


def sources(batch: int, eos: int) -> list[list[int]]:
    """Random ids that every shape's vocabulary has, `</s>` last."""
    generator = torch.Generator().manual_seed(batch)
    drawn = torch.randint(10, 31000, (batch, SOURCE_TOKENS - 1), generator=generator).tolist()
    return [[*row, eos] for row in drawn]


def ours(loaded: LoadedModel, batch: list[list[int]], beams: int) -> Work:
    """seqserve's engine."""
    decoding = Decoding(NEW_TOKENS, min_new_tokens=NEW_TOKENS, num_beams=beams)
    config = EngineConfig(max_rows=max(64, beams * len(batch)), max_encoder_cache_bytes=0)
    engine = Engine(loaded, config)

    def work() -> None:
        for src in batch:
            engine.submit(Sequence(src, list(loaded.spec.decoder_start_ids), decoding))
        events = sum(1 for _ in engine.run())
        assert events == NEW_TOKENS * len(batch), events

    return work


def ct2(translator: Any, batch: list[list[int]], beams: int) -> Work:
    """CTranslate2's own batch translation."""
    tokens = [[f"t{i}" for i in row] for row in batch]
    return lambda: translator.translate_batch(
        tokens,
        beam_size=beams,
        max_decoding_length=NEW_TOKENS,
        min_decoding_length=NEW_TOKENS,
        max_batch_size=0,
    )


def reference(model: Any, batch: list[list[int]], beams: int) -> Work:
    """transformers' generate."""
    ids = torch.tensor(batch)
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}

    @torch.inference_mode()
    def work() -> None:
        model.generate(ids, num_beams=beams, **options)

    return work


class Contest:
    """One shape, loaded by everybody."""

    def __init__(self, shape: str, threads: int, clock: Clock) -> None:
        self.clock = clock
        directories = build(shape, ROOT)
        checkpoint = directories["checkpoint"]
        self.ours = {d: load_model(checkpoint, "cpu", d) for d in (*CT2_DTYPES, "bfloat16")}
        self.ct2 = {
            d: ctranslate2.Translator(str(directories[d]), compute_type=d, intra_threads=threads)
            for d in CT2_DTYPES
        }
        self.reference = AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval()

    def run(self, size: int, beams: int, rounds: int) -> Timed:
        """Everybody decodes the same batch by turns."""
        batch = sources(size, self.ours["float32"].spec.eos_id or 0)
        works = {
            **{f"seqserve {d}": ours(m, batch, beams) for d, m in self.ours.items()},
            **{f"CTranslate2 {d}": ct2(t, batch, beams) for d, t in self.ct2.items()},
            "transformers float32": reference(self.reference, batch, beams),
        }
        return by_turns(works, rounds, clock=self.clock)


def row(timed: Timed, size: int, beams: int) -> str:
    """A line of the table: our tokens a second, and how many times the peers' they are."""
    rate = {name: size * NEW_TOKENS / timed.median(name) for name in timed.seconds}
    cells = [f"{beams}", f"{size}"]
    for dtype in CT2_DTYPES:
        mine, theirs = f"seqserve {dtype}", f"CTranslate2 {dtype}"
        cells += [
            f"{rate[mine]:.0f}",
            f"{rate[theirs]:.0f}",
            f"**{timed.speedup(mine, theirs):.2f}**",
        ]
    plain = "transformers float32"
    cells += [f"{rate[plain]:.0f}", f"{timed.speedup('seqserve float32', plain):.2f}"]
    cells += [f"{rate['seqserve bfloat16']:.0f}"]
    return f"| {' | '.join(cells)} |"


COLUMNS = (
    *("beams", "batch", "float32", "CTranslate2", "ratio", "int8", "CTranslate2", "ratio"),
    *("transformers", "ratio", "bfloat16"),
)
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--beams", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cpu-seconds", action="store_true", help="see above")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables there as well")
    options = parser.parse_args()
    if options.cpu_seconds and options.threads > 1:
        parser.error("--cpu-seconds adds threads up: give --threads 1")
    torch.set_num_threads(options.threads)
    lines = []
    for line in report(options):
        print(line, flush=True)
        lines.append(line)
    if options.write:
        options.write.write_text("\n".join(lines) + "\n")


def report(options: argparse.Namespace) -> Iterator[str]:
    """The lines of a page with a table for each shape."""
    yield "# Speed beside other engines"
    yield ""
    yield from conditions(options)
    clock = time.process_time if options.cpu_seconds else time.perf_counter
    for shape in options.shape or SHAPES:
        contest = Contest(shape, options.threads, clock)
        yield ""
        yield f"## {shape}, tokens a second"
        yield ""
        yield from HEADER.splitlines()
        for beams in options.beams or [1, 4]:
            for size in options.batch or ([1, 8, 32, 64] if beams == 1 else [1, 8, 32]):
                yield row(contest.run(size, beams, options.rounds), size, beams)


def conditions(options: argparse.Namespace) -> Iterator[str]:
    """What the figures depend on."""
    packages = ", ".join(f"{p} {version(p)}" for p in ("torch", "ctranslate2", "transformers"))
    seconds = "CPU seconds of the process" if options.cpu_seconds else "Seconds"
    yield f"`python -m benchmarks.offline`, {packages}, {cpu()}."
    yield f"Threads: {options.threads}. {seconds}, medians of {options.rounds} rounds by turns."
    yield "A ratio is how many times as fast seqserve is in the same number format."


def cpu() -> str:
    """The processor's own name, and the extensions that decide on int8 and bfloat16."""
    said = dict.fromkeys(Path("/proc/cpuinfo").read_text().splitlines())
    name = next((line.partition(": ")[2] for line in said if line.startswith("model name")), "CPU")
    flags = next((line.split() for line in said if line.startswith("flags")), [])
    telling = [flag for flag in ("avx2", "avx512_vnni", "amx_int8", "amx_bf16") if flag in flags]
    return f"{name} ({', '.join(telling)})"


if __name__ == "__main__":
    main()
