"""Messages made of pydantic's errors."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError

from seqserve.errors import InvalidRequestError
from seqserve.parameters import MANY, ONE, GenerationParameters
from seqserve.schemas import GenerateRequest
from service.validation import describe, field_at, interval, parse_json, path, shown


class Bounded(BaseModel):
    open: float = Field(0.5, gt=0, lt=1)
    half: float = Field(1, gt=0, le=1)
    closed: int = Field(1, ge=1, le=2**53 - 1)
    low: int = Field(1, ge=1)
    above: float = Field(1.0, gt=0)
    high: int = Field(1, le=3)
    below: float = Field(1.0, lt=3)
    free: int = 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("open", "in (0, 1)"),
        ("half", "in (0, 1]"),
        ("closed", "in [1, 9007199254740991]"),
        ("low", "at least 1"),
        ("above", "above 0"),
        ("high", "at most 3"),
        ("below", "below 3"),
        ("free", None),
    ],
)
def test_bounds_in_words(name: str, words: str | None) -> None:
    assert interval(Bounded.model_fields[name].metadata) == words


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (("parameters", MANY, 3, "top_p"), "parameters[3].top_p"),
        (("inputs", ONE), "inputs"),
        (("input_ids", MANY, 0, 2), "input_ids[0][2]"),
        ((), ""),
    ],
)
def test_paths_leave_union_tags_out(keys: tuple[str | int, ...], text: str) -> None:
    assert path(keys) == text


def test_long_values_are_cut() -> None:
    assert shown("ab") == '"ab"'
    assert shown("x" * 1000) == '"' + "x" * 79 + "... (1002 characters)"
    assert len(shown(object())) < 120
    assert shown(2**70) == str(2**70)


def test_the_field_of_an_error_is_found_inside_unions_and_lists() -> None:
    field = field_at(GenerateRequest, ("parameters", MANY, 1, "top_p"))
    assert field is GenerationParameters.model_fields["top_p"]
    assert field_at(GenerateRequest, ("input_ids", ONE, 1)) is None
    assert field_at(GenerateRequest, ("nothing", "here")) is None
    assert field_at(None, ("inputs",)) is None


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (
            {"inputs": "a", "parameters": {"top_p": 1.5}},
            "parameters.top_p must be in (0, 1], got 1.5",
            "parameters.top_p",
        ),
        ({"inputs": 1}, "inputs must be a string, or a list of them, got 1", "inputs"),
        ({"inputs": "a", "strem": False}, "strem is not a known field; did you mean stream?", None),
        (
            {"inputs": "a", "\n\u001b[31m": 1},
            '"\\n\\u001b[31m" is not a known field',
            "\n\u001b[31m",
        ),
    ],
)
def test_messages_name_field_and_value(body: Any, message: str, param: str | None) -> None:
    with pytest.raises(ValidationError) as caught:
        GenerateRequest.model_validate(body)
    error = describe(caught.value.errors(), GenerateRequest)
    assert str(error) == message
    assert error.param == (param or "strem")
    assert error.status == 422


def test_json_is_read_strictly() -> None:
    assert parse_json(b'{"a": [1, 2.5, "\\u0000"]}') == {"a": [1, 2.5, "\0"]}
    for body in (b"", b"NaN", b"[Infinity]", b'"\\ud800"', b"\xff", b"[1,]", b"{'a': 1}"):
        with pytest.raises(InvalidRequestError) as caught:
            parse_json(body)
        assert caught.value.status == 400
