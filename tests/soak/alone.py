"""What every question is answered without company, and whether a difference is rounding.

The answers alone come from a server that has nothing else to do, over one connection, one input at
a time. Where an answer in company has other tokens, the same input is decoded in this process with
noise of up to half of the margin rule's 1e-4 on every logit: a decision that such noise can turn
was nearer than the margin, any other difference is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import EngineConfig
from model.engine import Engine
from model.loader import LoadedModel, load_model
from model.sequence import Sequence as Row
from model.sequence import TokenEvent
from seqserve.schemas import GenerateRequest
from service.served import generator_of
from tests.soak.answers import decisions, differences, parts, swapped_ranks
from tests.soak.traffic import Call, Question
from tests.soak.wire import make_in_turn

MARGIN = 1e-4
"""A decision with a smaller margin in the run alone may fall either way: it is rounding."""

REPLAYS = 16

ENDED = -1
"""Stands behind the last token of a sequence; no token's id."""

PER_INPUT = ("inputs", "input_ids", "targets", "target_ids", "target_prefix", "parameters")
"""Fields that a list of inputs may have one of for each."""


def single_inputs(question: Question) -> list[Question]:
    """A list of inputs as questions of one input each; anything else as it is."""
    body = question.body
    many = isinstance(body.get("inputs"), list) or isinstance(
        (body.get("input_ids") or [0])[0], list
    )
    if not many:
        return [question]
    each = {name: body[name] for name in PER_INPUT if isinstance(body.get(name), list)}
    return [
        replace(question, body={**body, **{name: values[i] for name, values in each.items()}})
        for i in range(len(body.get("inputs") or body["input_ids"]))
    ]


class Oracle:
    """Asks questions of a server that nobody else uses."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.asked = 0
        self._known: dict[str, list[Any]] = {}

    async def answer(self, question: Question) -> list[Any]:
        """The parts of the answer, each computed alone."""
        return [part for single in single_inputs(question) for part in await self._ask(single)]

    async def _ask(self, question: Question) -> list[Any]:
        if question.key not in self._known:
            self.asked += 1
            call = Call(
                -self.asked,
                question.kind,
                "POST",
                question.path,
                frozenset({200}),
                question.encoded,
                question.headers,
                question=question,
            )
            [(_, reply)] = await make_in_turn(self.host, self.port, [call])
            if reply.status != 200:
                raise RuntimeError(f"alone: {reply.status} {reply.reason} {reply.body[:200]!r}")
            self._known[question.key] = parts(question, reply)
        return self._known[question.key]


@dataclass(frozen=True)
class Verdict:
    """What a comparison came to: neither is set where the answers are the same."""

    rounding: str = ""
    wrong: str = ""


class Judge:
    """Compares answers, and knows rounding from error.

    Args:
        directories: of the models, by name.
    """

    def __init__(self, directories: Mapping[str, Path]) -> None:
        self._directories = directories
        self._models: dict[str, LoadedModel] = {}

    def compare(self, question: Question, alone: list[Any], served: list[Any]) -> Verdict:
        found = list(differences(alone, served))
        if not found:
            return Verdict()
        if swapped_ranks(question, found) or self._may_fall_so(question, alone, served):
            return Verdict(rounding=str(found[0]))
        return Verdict(wrong=str(found[0]))

    def _may_fall_so(self, question: Question, alone: list[Any], served: list[Any]) -> bool:
        """Whether, where tokens differ, a decision within the margin may have been the first."""
        if not question.path.startswith("/generate") or len(alone) != len(served):
            return False
        turned = [
            (single, openings)
            for single, one, other in zip(single_inputs(question), alone, served, strict=True)
            if (openings := differing_openings(decisions(one), decisions(other)))
        ]
        return bool(turned) and all(
            any(agrees(replayed, openings) for replayed in self._replays(single))
            for single, openings in turned
        )

    def _replays(self, question: Question) -> Iterator[list[list[int]]]:
        fields = {k: v for k, v in question.body.items() if k != "stream"}
        request = GenerateRequest.model_validate(fields)
        for seed in range(REPLAYS):
            yield replay(self._model(question.body["model"]), request, seed)

    def _model(self, name: str) -> LoadedModel:
        if name not in self._models:
            self._models[name] = load_model(self._directories[name], "cpu")
        return self._models[name]


def differing_openings(
    alone: Sequence[Sequence[int]], served: Sequence[Sequence[int]]
) -> dict[int, list[int]]:
    """Of each sequence served otherwise, its tokens up to the first that differs.

    >>> differing_openings([[4, 5], [7, 8, 9], [4]], [[4, 5], [7, 6, 9], [4, 5]])
    {1: [7, 6], 2: [4, 5]}
    """
    found = {}
    for number, pair in enumerate(zip_longest(alone, served, fillvalue=())):
        one, other = ([*tokens, ENDED] for tokens in pair)
        if one != other:
            same = takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))
            found[number] = other[: len(list(same)) + 1]
    return found


def agrees(replayed: Sequence[list[int]], openings: Mapping[int, list[int]]) -> bool:
    """Whether sequences begin with these openings."""
    return all(
        number < len(replayed) and [*replayed[number], ENDED][: len(opening)] == opening
        for number, opening in openings.items()
    )


def replay(model: LoadedModel, request: GenerateRequest, seed: int) -> list[list[int]]:
    """The tokens of each sequence when every logit is off by up to half the margin."""
    generator = generator_of(model)
    [plan] = generator.plan(request)
    engine = Engine(model, EngineConfig())
    draw = torch.Generator().manual_seed(seed)
    engine.stepper.step = partial(_noisy, engine.stepper.step, draw)  # type: ignore[method-assign]
    events: dict[Row, list[TokenEvent]] = {row: [] for row in plan.sequences}
    for row in plan.sequences:
        engine.submit(row)
    for event in engine.run():
        assert isinstance(event, TokenEvent)
        events[event.sequence].append(event)
    return decisions(generator.answer(plan, events).model_dump())


def _noisy(step: Any, draw: torch.Generator, rows: Any, first: int = 0) -> Tensor:
    logits: Tensor = step(rows, first)
    return logits + (torch.rand(logits.shape, generator=draw) - 0.5) * MARGIN
