"""How good a model is on pairs: its outputs against references.

References:
    Guo et al., "On Calibration of Modern Neural Networks", 2017
    (https://arxiv.org/abs/1706.04599), for the expected calibration error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.config import EngineConfig
from model.engine import Engine
from model.loader import LoadedModel
from model.sequence import Decoding, FailureEvent, TokenEvent
from model.sequence import Sequence as Row

Pair = tuple[str, str]
"""A source and a target."""


CALIBRATION_BINS = 10


@dataclass(frozen=True)
class Answer:
    """What a model says to a source.

    Attributes:
        text: the output.
        probability: of all its tokens, `</s>` included.
    """

    text: str
    probability: float


@dataclass(frozen=True)
class Evaluation:
    """Decoding of the dev sources with the averaged weights.

    Attributes:
        epoch: after how many epochs.
        sources: number of sources.
        error_rate: share of sources whose output equals none of their references.
        token_error_rate: edit distance to the nearest reference over reference length, in tokens.
        calibration_error: of the outputs' probabilities, see `calibration_error`.
    """

    epoch: int
    sources: int
    error_rate: float
    token_error_rate: float
    calibration_error: float


def evaluate(
    model: LoadedModel,
    pairs: Sequence[Pair],
    epoch: int = 0,
    units: Callable[[str], list[str]] = str.split,
    num_beams: int = 1,
) -> Evaluation:
    """Error rates over pairs; a source is right if the output equals any of its targets.

    Args:
        model: with tokenizers on both sides.
        pairs: a source may occur several times, each time with another target.
        units: what a text's tokens are, for the token error rate.
        num_beams: of the search; 1 decodes greedily.
    """
    references: dict[str, list[list[str]]] = {}
    for source, target in pairs:
        references.setdefault(source, []).append(units(target))
    answers = translate(model, list(references), num_beams)
    right: list[bool] = []
    edits = length = 0
    for answer, accepted in zip(answers, references.values(), strict=True):
        found = units(answer.text)
        distance, size = min((edit_distance(found, r), len(r)) for r in accepted)
        right.append(distance == 0)
        edits += distance
        length += size
    sources = len(references)
    return Evaluation(
        epoch,
        sources,
        error_rate=right.count(False) / max(1, sources),
        token_error_rate=edits / max(1, length),
        calibration_error=calibration_error([a.probability for a in answers], right),
    )


def translate(model: LoadedModel, texts: Sequence[str], num_beams: int = 1) -> list[Answer]:
    """Likeliest outputs, through the engine that serves; a source over the model's length is cut.

    Args:
        num_beams: of the search; 1 decodes greedily.
    """
    assert model.source_tokenizer is not None
    assert model.target_tokenizer is not None
    spec = model.spec
    decoding = Decoding(spec.default_max_new_tokens, num_beams=num_beams, logprobs=True)
    rows = [
        Row(ids[: spec.max_src], list(spec.decoder_start_ids), decoding)
        for ids in model.source_tokenizer.encode(texts)
    ]
    engine = Engine(model, EngineConfig(max_rows=256))
    for row in rows:
        engine.submit(row)
    logprobs = dict.fromkeys(rows, 0.0)
    for event in engine.run():
        if isinstance(event, FailureEvent):
            raise event.error
        if isinstance(event, TokenEvent):
            assert event.logprob is not None
            logprobs[event.sequence] += event.logprob
    decode = model.target_tokenizer.decode
    return [Answer(decode(row.tokens), math.exp(logprobs[row])) for row in rows]


def calibration_error(probabilities: Sequence[float], right: Sequence[bool]) -> float:
    """Expected calibration error: how far probabilities are from the share of right answers.

    ``sum_b (n_b / n) |share right in b - mean probability in b|`` over ten bins of equal width
    (Guo et al., equation 3). 0 is a model whose answers of probability 0.8 are right 8 times of 10.

    Args:
        probabilities: of the answers, 0 to 1.
        right: which of them are.
    """
    gaps = [0.0] * CALIBRATION_BINS
    for probability, is_right in zip(probabilities, right, strict=True):
        gaps[min(int(probability * CALIBRATION_BINS), CALIBRATION_BINS - 1)] += (
            is_right - probability
        )
    return sum(map(abs, gaps)) / max(1, len(right))


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Levenshtein distance."""
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        current = [i]
        for j, y in enumerate(b, start=1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (x != y)))
        previous = current
    return previous[-1]
