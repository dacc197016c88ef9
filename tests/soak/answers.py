"""Answers in one form, and where two of them differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from seqserve.arrays import read_attention, read_logits
from tests.soak.traffic import Question
from tests.soak.wire import Reply

ATOL, RTOL = 1e-4, 1e-5
"""Numbers of an answer agree within these."""

TIMES = ("queue_time", "inference_time")
"""What a stream's details say of the run, not of the answer."""

Path = tuple[str | int, ...]


class UnreadableError(ValueError):
    """An answer of status 200 that is none."""


def parts(question: Question, reply: Reply) -> list[Any]:
    """An answer as a list with one part for each input (or target), as JSON has them.

    Raises:
        UnreadableError: it is not what the question's endpoint answers with.
    """
    try:
        if question.streamed:
            return [_stream(reply.body)]
        if reply.headers["content-type"] == "application/octet-stream":
            return _tensors(question, reply.body)
        answer = json.loads(reply.body)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise UnreadableError(f"{type(error).__name__}: {error}") from error
    return answer if isinstance(answer, list) else [answer]


def events(body: bytes) -> list[Any]:
    """The server-sent events of a stream."""
    *lines, rest = body.split(b"\n\n")
    if rest or not all(line.startswith(b"data: ") for line in lines):
        raise UnreadableError(f"the stream is cut off: {body[-80:]!r}")
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def _stream(body: bytes) -> list[list[Any]]:
    """``[sequences][events]``: how sequences take turns depends on their company."""
    sequences: dict[int, list[Any]] = {}
    for event in events(body):
        if event["details"]:
            for name in TIMES:
                event["details"].pop(name)
        sequences.setdefault(event["sequence"], []).append(event)
    for number, told in sequences.items():
        _check_sequence(number, told)
    if not sequences:
        raise UnreadableError("the stream has no event")
    return [sequences[number] for number in sorted(sequences)]


def _check_sequence(number: int, told: list[Any]) -> None:
    """Its last event, and only that, ends it; its pieces make up its text."""
    ends = [event["details"] is not None for event in told]
    if ends != [False] * (len(told) - 1) + [True]:
        raise UnreadableError(f"sequence {number} of the stream ends {sum(ends)} times")
    pieces = "".join(
        event["token"]["text"] for event in told if event["token"] and not event["token"]["special"]
    )
    text = told[-1]["generated_text"]
    if not text.endswith(pieces):  # return_full_text puts the prefix before them
        raise UnreadableError(f"sequence {number}: the pieces {pieces!r} do not make up {text!r}")


def _tensors(question: Question, body: bytes) -> list[Any]:
    if question.path == "/attention":
        read: list[Any] = list(read_attention(body, "numpy"))
    else:
        read = list(read_logits(body, question.body["positions"] == "last", "numpy"))
    return [
        {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in asdict(answer).items()}
        for answer in read
    ]


def with_the_seed_drawn(question: Question, served: list[Any]) -> Question:
    """A question that left its seed to the server, with the one that the answer names."""
    parameters = question.body.get("parameters")
    if not isinstance(parameters, dict) or not parameters.get("do_sample"):
        return question
    [part] = served
    details = part[0][-1]["details"] if question.streamed else part["details"]
    seeded = {**parameters, "seed": details["seed"]}
    return replace(question, body={**question.body, "parameters": seeded})


# --- comparison ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A place where two answers are not the same."""

    place: Path
    alone: Any
    served: Any

    def __str__(self) -> str:
        where = ".".join(map(str, self.place))
        return f"at {where}: {_short(self.alone)} alone, {_short(self.served)} served"


def differences(alone: Any, served: Any, place: Path = ()) -> Iterator[Difference]:
    """Places that differ: numbers by more than rounding, everything else at all."""
    if isinstance(alone, dict) and isinstance(served, dict) and alone.keys() == served.keys():
        for name in alone:
            yield from differences(alone[name], served[name], (*place, name))
    elif isinstance(alone, list) and isinstance(served, list) and len(alone) == len(served):
        for i, (a, b) in enumerate(zip(alone, served, strict=True)):
            yield from differences(a, b, (*place, i))
    elif isinstance(alone, float) and isinstance(served, float):
        # A perplexity is the exponential of a log-probability: what is ATOL there is a share here.
        share = ATOL if place and place[-1] == "perplexity" else RTOL
        if not math.isclose(alone, served, rel_tol=share, abs_tol=ATOL):
            yield Difference(place, alone, served)
    elif type(alone) is not type(served) or alone != served:
        yield Difference(place, alone, served)


RANKED = {"/next": "tokens", "/logits": "ids", "/generate": "top_tokens"}
"""Endpoint -> where its answers list candidates by rank."""


def swapped_ranks(question: Question, found: list[Difference]) -> bool:
    """Whether two answers differ only in which of nearly equal candidates is named first: their
    values, rank by rank, agree."""
    path = "/generate" if question.streamed else question.path
    return path in RANKED and all(
        RANKED[path] in d.place and not isinstance(d.alone, float) for d in found
    )


def decisions(part: Any) -> list[list[int]]:
    """``[sequences][tokens]`` that one part of a /generate answer consists of."""
    if isinstance(part, list):  # a stream
        return [[event["token"]["id"] for event in told if event["token"]] for told in part]
    several = part.get("sequences") or [part]
    return [[token["id"] for token in one["details"]["tokens"]] for one in several]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
