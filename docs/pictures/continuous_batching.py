"""Draw continuous batching as it happened: `python docs/pictures/continuous_batching.py`.

Words arrive at random at the shipped model's engine, which has room for six rows. Each bar is a
word, from the step in which it joined to the step with which it left, in the row it took; what is
written in a bar is what the engine answered.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from html import escape
from pathlib import Path

from model.config import EngineConfig
from model.engine import Engine, StepTrace
from model.loader import load_model
from model.sequence import Decoding, Sequence

ROOT = Path(__file__).parents[2]
WORDS = [
    "welcome",
    "encyclopedia",
    "tea",
    "mountain",
    "river",
    "characteristically",
    "go",
    "telephone",
    "imagination",
    "sun",
    "pronunciation",
    "cat",
    "butterfly",
    "electricity",
    "oak",
    "harmony",
    "responsibility",
    "dew",
    "planet",
    "laboratory",
]
ROWS, STEP, HEIGHT, LEFT, TOP = 6, 22, 30, 70, 46
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")


@dataclass
class Bar:
    """A word's stay: in which row, from which step to which."""

    word: str
    row: int
    first: int
    last: int = -1
    answer: str = ""


def run() -> tuple[list[Bar], int]:
    """Decode the words as they arrive -> their bars, and the number of steps."""
    model = load_model(ROOT / "weights" / "g2p-en", "cpu")
    assert model.source_tokenizer
    assert model.target_tokenizer
    bars: dict[Sequence, Bar] = {}
    free = set(range(ROWS))

    def note(trace: StepTrace) -> None:
        for sequence in trace.joined:
            row = min(free)
            free.remove(row)
            bars[sequence] = Bar(words[sequence], row, trace.step)
        for sequence in trace.left:
            bars[sequence].last = trace.step
            free.add(bars[sequence].row)

    engine = Engine(model, EngineConfig(max_rows=ROWS), note)
    arrivals = random.Random(4)
    waiting = list(zip(WORDS, model.source_tokenizer.encode(WORDS), strict=True))
    words: dict[Sequence, str] = {}
    steps = 0
    while waiting or engine.has_work:
        while waiting and (steps == 0 or arrivals.random() < 0.4):
            word, ids = waiting.pop(0)
            sequence = Sequence(ids, [1], Decoding(max_new_tokens=22))
            words[sequence] = word
            engine.submit(sequence)
            if len(words) < 5:
                continue
            break
        engine.step()
        steps += 1
    for sequence, bar in bars.items():
        bar.answer = model.target_tokenizer.decode(sequence.tokens)
    return list(bars.values()), steps


def draw(bars: list[Bar], steps: int) -> str:
    """The bars as SVG, readable on light and dark pages."""
    width, height = LEFT + steps * STEP + 12, TOP + ROWS * HEIGHT + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11" role="img">',
        "<title>Words join and leave a running batch between decoding steps</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="14" font-weight="600" fill="#222">'
        f"{len(bars)} words, {ROWS} rows, {steps} steps: a row that ends is taken by the next word"
        "</text>",
    ]
    for row in range(ROWS):
        y = TOP + row * HEIGHT
        parts.append(f'<text x="12" y="{y + 18}" fill="#666">row {row + 1}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{y + 2}" width="{steps * STEP}" height="{HEIGHT - 4}" '
            'fill="#f3f3f3"/>'
        )
    for number, bar in enumerate(bars):
        parts.extend(_bar(bar, COLOURS[number % len(COLOURS)]))
    axis = TOP + ROWS * HEIGHT + 20
    parts.extend(
        f'<text x="{LEFT + step * STEP}" y="{axis}" fill="#666" text-anchor="middle">{step}</text>'
        for step in range(0, steps + 1, 5)
    )
    parts.append(f'<text x="12" y="{axis}" fill="#666">step</text></svg>')
    return "\n".join(parts) + "\n"


def _bar(bar: Bar, colour: str) -> list[str]:
    x, y = LEFT + bar.first * STEP, TOP + bar.row * HEIGHT + 2
    length = (bar.last - bar.first + 1) * STEP
    inside = f'clip-path="inset(0 0 0 0)" x="{x + 5}"'
    shown = bar.word if len(bar.word) * 6.2 < length - 8 else bar.word[: max(1, length // 7 - 1)]
    label = f"{bar.word}: {bar.answer}"
    return [
        f'<g><title>{escape(label)}</title><rect x="{x + 1}" y="{y}" width="{length - 2}" '
        f'height="{HEIGHT - 4}" rx="4" fill="{colour}"/>',
        f'<text {inside} y="{y + 17}" fill="#fff">{escape(shown)}</text></g>',
    ]


if __name__ == "__main__":
    picture = Path(__file__).with_suffix(".svg")
    picture.write_text(draw(*run()))
    print(f"wrote {picture.relative_to(ROOT)}")
