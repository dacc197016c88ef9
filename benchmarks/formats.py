"""How far a number format moves what a model scores.

    python -m benchmarks.formats weights/g2p-en weights/g2p-en/dev-sample.tsv

The file holds pairs of texts, `source<TAB>target` a line, or a JSON list of objects with
`input_ids` and `greedy_ids`, for models without tokenizers. Every target is scored in float32 and
in the other formats; what is told are differences of log-probabilities, in nats.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from model.config import EngineConfig
from model.engine import Engine
from model.loader import LoadedModel, load_model
from model.sequence import Forward, ForwardEvent
from model.training import read_pairs

FORMATS = ("bfloat16", "int8")

IdPair = tuple[list[int], list[int]]
"""Ids of a source, and of its target without the decoder start."""


def read(path: Path, model: LoadedModel) -> list[IdPair]:
    """The pairs of a file, as ids."""
    start = list(model.spec.decoder_start_ids)
    if path.suffix == ".json":
        told = json.loads(path.read_text(encoding="utf-8"))
        return [(each["input_ids"], each["greedy_ids"][len(start) :]) for each in told]
    pairs = read_pairs(path)
    assert model.source_tokenizer is not None
    assert model.target_tokenizer is not None
    sources = model.source_tokenizer.encode([source for source, _ in pairs])
    targets = model.target_tokenizer.encode([target for _, target in pairs])
    return list(zip(sources, targets, strict=True))


def scores(model: LoadedModel, pairs: Sequence[IdPair]) -> list[torch.Tensor]:
    """The log-probability of each target's tokens ``[target]``."""
    start = list(model.spec.decoder_start_ids)
    passes = [
        Forward(src, [*start, *tgt[:-1]], "all", labels=[*start[1:], *tgt]) for src, tgt in pairs
    ]
    engine = Engine(model, EngineConfig())
    for forward in passes:
        engine.submit(forward)
    found = {}
    for event in engine.run():
        assert isinstance(event, ForwardEvent), event
        assert event.logprobs is not None
        found[event.forward] = event.logprobs[:, 0]
    return [found[forward] for forward in passes]


def differences(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """The largest of a token, the mean of tokens, the largest and the mean of whole targets."""
    tokens = torch.cat([(a - b).abs() for a, b in zip(one, other, strict=True)])
    targets = torch.stack([(a - b).sum().abs() for a, b in zip(one, other, strict=True)])
    return tuple(float(x) for x in (tokens.max(), tokens.mean(), targets.max(), targets.mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("pairs", type=Path)
    options = parser.parse_args()
    plain = load_model(options.model, "cpu")
    pairs = read(options.pairs, plain)
    expected = scores(plain, pairs)
    print(
        "| format | largest of a token | mean | largest of a target | mean |\n|---|---|---|---|---|"
    )
    for dtype in FORMATS:
        found = scores(load_model(options.model, "cpu", dtype), pairs)
        cells = " | ".join(f"{x:.4f}" for x in differences(expected, found))
        print(f"| {dtype} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
