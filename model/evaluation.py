"""How good a model is on pairs: greedy outputs against references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.config import EngineConfig
from model.engine import Engine
from model.loader import LoadedModel
from model.sequence import Decoding, FailureEvent
from model.sequence import Sequence as Row

Pair = tuple[str, str]
"""A source and a target."""


@dataclass(frozen=True)
class Evaluation:
    """Greedy decoding of the dev sources with the averaged weights.

    Attributes:
        epoch: after how many epochs.
        sources: number of sources.
        error_rate: share of sources whose output equals none of their references.
        token_error_rate: edit distance to the nearest reference over reference length, in tokens.
    """

    epoch: int
    sources: int
    error_rate: float
    token_error_rate: float


def evaluate(
    model: LoadedModel,
    pairs: Sequence[Pair],
    epoch: int = 0,
    units: Callable[[str], list[str]] = str.split,
) -> Evaluation:
    """Greedy error rates over pairs; a source is right if the output equals any of its targets.

    Args:
        model: with tokenizers on both sides.
        pairs: a source may occur several times, each time with another target.
        units: what a text's tokens are, for the token error rate.
    """
    references: dict[str, list[list[str]]] = {}
    for source, target in pairs:
        references.setdefault(source, []).append(units(target))
    outputs = translate(model, list(references))
    wrong = edits = length = 0
    for output, accepted in zip(outputs, references.values(), strict=True):
        found = units(output)
        distance, size = min((edit_distance(found, r), len(r)) for r in accepted)
        wrong += distance > 0
        edits += distance
        length += size
    sources = len(references)
    return Evaluation(epoch, sources, wrong / max(1, sources), edits / max(1, length))


def translate(model: LoadedModel, texts: Sequence[str]) -> list[str]:
    """Greedy outputs, through the engine that serves; a source over the model's length is cut."""
    assert model.source_tokenizer is not None
    assert model.target_tokenizer is not None
    spec = model.spec
    decoding = Decoding(max_new_tokens=spec.default_max_new_tokens)
    rows = [
        Row(ids[: spec.max_src], list(spec.decoder_start_ids), decoding)
        for ids in model.source_tokenizer.encode(texts)
    ]
    engine = Engine(model, EngineConfig(max_rows=256))
    for row in rows:
        engine.submit(row)
    for event in engine.run():
        if isinstance(event, FailureEvent):
            raise event.error
    return [model.target_tokenizer.decode(row.tokens) for row in rows]


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Levenshtein distance."""
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        current = [i]
        for j, y in enumerate(b, start=1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (x != y)))
        previous = current
    return previous[-1]
