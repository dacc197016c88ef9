"""What guessing tokens ahead (`model.lookahead`) gains and costs; on and off by turns.

    python -m benchmarks.lookahead cost --shape marian-base
    python -m benchmarks.lookahead copy --shape marian-base --batch 1 --batch 8
    python -m benchmarks.lookahead real --model DIR --data pairs.tsv

`cost`: steps that run several positions of each row, against one position of one row.
`copy`: a random network of the shape, where guesses are read off its own answer with a share of
the tokens replaced: copying with edits, which no random network does by itself.
`real`: a trained model on the sources of a file of pairs.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.checkpoints import SHAPES, build
from benchmarks.offline import NEW_TOKENS, ROOT, sources
from benchmarks.timing import Work, by_turns
from model.config import EngineConfig
from model.engine import Engine, StepTrace
from model.loader import LoadedModel, load_model
from model.lookahead import Guide, Lookahead
from model.sequence import Decoding, Sequence
from model.steppers import CachedStepper

WIDTHS = (1, 2, 4, 8, 16)
WRONG = (0.0, 0.1, 0.25, 1.0)
ON = EngineConfig(max_encoder_cache_bytes=0)
OFF = replace(ON, lookahead=0)

Rows = list[Sequence]


class Foretold(Lookahead):
    """Guesses from texts that are given for each source in place of the source."""

    def __init__(self, loaded: LoadedModel, texts: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__((), loaded.spec, ON)
        self._texts = texts

    def guide_for(self, row: Sequence) -> Guide:
        return Guide(self._texts[tuple(row.src)])


def decode(
    loaded: LoadedModel, rows: Rows, config: EngineConfig, lookahead: Lookahead | None = None
) -> list[StepTrace]:
    """Decode rows side by side; what the steps did."""
    traces: list[StepTrace] = []
    engine = Engine(loaded, config, traces.append)
    engine.lookahead = lookahead or engine.lookahead
    for row in rows:
        engine.submit(row)
    for _ in engine.run():
        pass
    return traces


def again(rows: Iterable[Sequence]) -> Rows:
    """The same requests, nothing generated yet."""
    return [Sequence(row.src, row.prefix, row.decoding) for row in rows]


def compare(
    name: str, loaded: LoadedModel, batches: list[Rows], make: Callable[[], Lookahead | None]
) -> None:
    """Time batches one after the other, both ways, and print a line.

    Args:
        make: what guesses in place of the engine's own, if it is not None.
    """

    def all_of(config: EngineConfig, own: bool) -> tuple[list[StepTrace], list[list[int]]]:
        rows = [again(batch) for batch in batches]
        lookahead = None if own else make()
        traces = [trace for batch in rows for trace in decode(loaded, batch, config, lookahead)]
        return traces, [row.tokens for batch in rows for row in batch]

    works: dict[str, Work] = {"on": lambda: all_of(ON, False), "off": lambda: all_of(OFF, True)}
    (steps, found), (plain, expected) = all_of(ON, False), all_of(OFF, True)
    different = sum(a != b for a, b in zip(found, expected, strict=True))
    guessed, right = sum(t.guessed for t in steps), sum(t.foretold for t in steps)
    ratio = by_turns(works, ROUNDS).speedup("on", "off")
    counts = (len(batches[0]), different, len(plain), len(steps), guessed, right)
    print(f"| {name} | {' | '.join(map(str, counts))} | **{ratio:.2f}** |", flush=True)


ROUNDS = 5
HEADER = """
| | batch | different answers | steps off | steps on | guessed | right | off / on |
|---|--:|--:|--:|--:|--:|--:|--:|"""


def copy(loaded: LoadedModel, sizes: list[int]) -> None:
    """A random network whose guesses are right but for a share."""
    # No token twice, as in a text: random networks say the same few ones again and again.
    decoding = Decoding(NEW_TOKENS, min_new_tokens=NEW_TOKENS, no_repeat_ngram_size=1)
    start = list(loaded.spec.decoder_start_ids)
    for size in sizes:
        srcs = sources(size, loaded.spec.eos_id or 0)
        batch = [Sequence(src, start, decoding) for src in srcs]
        decode(loaded, answered := again(batch), OFF)
        for wrong in WRONG:
            texts = {tuple(row.src): edited(row.tokens, wrong) for row in answered}
            compare(f"{wrong:.0%} wrong", loaded, [batch], partial(Foretold, loaded, texts))


def edited(tokens: list[int], share: float) -> list[int]:
    """Tokens of which a share is replaced by random ones."""
    rng = random.Random(len(tokens))
    return [rng.randrange(31000) if rng.random() < share else token for token in tokens]


def real(loaded: LoadedModel, data: Path, sizes: list[int]) -> None:
    """A trained model on 16 sources of its own kind, the engine's own guesses."""
    assert loaded.source_tokenizer
    texts = [line.split("\t")[0] for line in data.read_text("utf-8").splitlines()[:16]]
    decoding = Decoding(loaded.spec.default_max_new_tokens)
    start = list(loaded.spec.decoder_start_ids)
    rows = [Sequence(src, start, decoding) for src in loaded.source_tokenizer.encode(texts)]
    for size in sizes:
        batches = [rows[i : i + size] for i in range(0, len(rows), size)]
        compare(loaded.directory.name, loaded, batches, lambda: None)


@torch.inference_mode()
def cost(loaded: LoadedModel, sizes: list[int]) -> None:
    """Milliseconds of steps with so many positions in each row."""
    print(f"\n| rows | {' | '.join(f'{w} positions' for w in WIDTHS)} |\n{'|--:' * 6}|")
    for size in sizes:
        stepper = loaded.stepper(ON)
        assert isinstance(stepper, CachedStepper)
        prefix = [*loaded.spec.decoder_start_ids, *range(10, 26)]
        srcs = sources(size, loaded.spec.eos_id or 0)
        rows = [Sequence(src, prefix, Decoding(64)) for src in srcs]
        stepper.join(rows)

        def run(width: int, rows: Rows = rows, stepper: CachedStepper = stepper) -> None:
            stepper.verify(rows, [range(50, 49 + width)] * len(rows)).max(dim=-1).indices.tolist()
            stepper.accept([0] * len(rows))

        timed = by_turns({str(width): partial(run, width) for width in WIDTHS}, ROUNDS)
        cells = [
            f"{1e3 * timed.median(str(w)):.1f} ({1 / timed.speedup(str(w), '1'):.2f})"
            for w in WIDTHS
        ]
        print(f"| {size} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["cost", "copy", "real"])
    parser.add_argument("--shape", choices=SHAPES, default="marian-base")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    directory = options.model or build(options.shape, ROOT)["checkpoint"]
    loaded = load_model(directory, "cpu", options.dtype)
    sizes = options.batch or [1, 8]
    print(f"\n{directory.name}, {options.dtype}, one thread")
    if options.what == "cost":
        cost(loaded, sizes)
        return
    print(HEADER)
    if options.what == "copy":
        copy(loaded, sizes)
    else:
        real(loaded, options.data, sizes)


if __name__ == "__main__":
    main()
