"""From pydantic's errors to messages that name the field and the value received.

`describe` turns the first of pydantic's errors into `InvalidRequestError`, for example
"parameters.top_p must be in (0, 1], got 1.5". Bounds come from the field's own declaration.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import annotated_types
import orjson
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from seqserve.errors import InvalidRequestError
from seqserve.parameters import FOREIGN_NO_OPS, MANY, ONE, GenerationParameters

SHOWN_CHARACTERS = 80
"""A longer value is cut in a message."""

PLAIN_NAME = re.compile(r"[\w-]{1,80}", re.ASCII)
"""Names of fields that messages show as they are; others are quoted, escaped and cut."""

EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""pydantic's error type -> what the value must be."""

LENGTHS = {"too_long": "entries", "string_too_long": "characters"}
"""pydantic's error type -> what there is too much of."""


def parse_json(body: bytes) -> Any:
    """Strict JSON: no NaN or Infinity, no lone surrogates, valid UTF-8.

    Raises:
        InvalidRequestError: status 400.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", status=400) from error


def describe(
    errors: Sequence[Mapping[str, Any]], body: type[BaseModel] | None
) -> InvalidRequestError:
    """The first error as an exception.

    Args:
        errors: `ValidationError.errors()`, locations relative to the body.
        body: class that was validated, for the bounds of its fields.
    """
    error = errors[0]
    keys = list(error["loc"])
    place = path(keys)
    if error["type"] == "value_error":
        return _disagreement(place, str(error["ctx"]["error"]))
    if error["type"] == "missing" and not keys:
        return InvalidRequestError("the body is empty, expected a JSON object", status=400)
    if error["type"] == "missing":
        return InvalidRequestError(f"{place} is missing", place)
    if error["type"] == "extra_forbidden":
        return _unknown(path(keys[:-1]), str(keys[-1]), error["input"], _model_at(body, keys[:-1]))
    if error["type"] in LENGTHS:
        unit, limit = LENGTHS[error["type"]], error["ctx"]["max_length"]
        got = error["ctx"].get("actual_length") or len(error["input"])
        return InvalidRequestError(f"{place} must have at most {limit} {unit}, got {got}", place)
    requirement = _requirement(error, field_at(body, keys), keys)
    message = f"{place or 'the body'} must be {requirement}, got {shown(error['input'])}"
    return InvalidRequestError(message, place or None)


def path(keys: Iterable[str | int]) -> str:
    """`("parameters", "<many>", 3, "top_p")` -> `parameters[3].top_p`."""
    text = ""
    for key in keys:
        if isinstance(key, int):
            text += f"[{key}]"
        elif key not in (ONE, MANY):
            text += f".{key}" if text else key
    return text


def shown(value: Any) -> str:
    """A value as JSON, cut where it is long."""
    try:
        text = orjson.dumps(value).decode()
    except (TypeError, ValueError):
        text = reprlib.repr(value)  # bounded in depth too, unlike repr
    return cut(text)


def cut(text: str) -> str:
    """A text, its end left out where it is long."""
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters)"


def field_at(body: type[BaseModel] | None, keys: Sequence[str | int]) -> FieldInfo | None:
    """The declaration of the field that an error's location ends in."""
    named = [key for key in keys if isinstance(key, str) and key not in (ONE, MANY)]
    inside = len(keys) and isinstance(keys[-1], int)  # an element: the field's bounds are not its
    model = _model_at(body, named[:-1])
    if model is None or not named or inside:
        return None
    return model.model_fields.get(named[-1])


def interval(metadata: Iterable[Any]) -> str | None:
    """Bounds in words: "in (0, 1]", "at least 0"; None where there are none."""
    low = high = None
    opening, closing = "[", "]"
    for bound in metadata:
        if isinstance(bound, annotated_types.Gt | annotated_types.Ge):
            opening = "(" if isinstance(bound, annotated_types.Gt) else "["
            low = bound.gt if isinstance(bound, annotated_types.Gt) else bound.ge
        if isinstance(bound, annotated_types.Lt | annotated_types.Le):
            closing = ")" if isinstance(bound, annotated_types.Lt) else "]"
            high = bound.lt if isinstance(bound, annotated_types.Lt) else bound.le
    if low is not None and high is not None:
        return f"in {opening}{low:.16g}, {high:.16g}{closing}"
    if low is not None:
        return f"{'above' if opening == '(' else 'at least'} {low:.16g}"
    if high is not None:
        return f"{'below' if closing == ')' else 'at most'} {high:.16g}"
    return None


def _requirement(
    error: Mapping[str, Any], field: FieldInfo | None, keys: Sequence[str | int]
) -> str:
    kind = error["type"]
    if kind in EXPECTED:
        or_list = ", or a list of them" if keys and keys[-1] == ONE else ""
        return EXPECTED[kind] + or_list
    if kind == "literal_error":
        return _choices(field) or error["ctx"]["expected"]
    if kind == "too_short":
        return "a list of at least one element"
    bounds = interval(field.metadata) if field else None
    return bounds or error["msg"].removeprefix("Input should be ")


def _choices(field: FieldInfo | None) -> str | None:
    """The values of a `Literal` as JSON: `"last" or "all"`."""
    if field is None:
        return None
    values = _literals(field.annotation)
    return " or ".join("null" if value is None else shown(value) for value in values) or None


def _literals(annotation: Any) -> list[Any]:
    if annotation is type(None):
        return [None]
    found: list[Any] = []
    for argument in get_args(annotation):
        literal = isinstance(argument, str | bool)
        found.extend([argument] if literal else _literals(argument))
    return found


def _disagreement(place: str, message: str) -> InvalidRequestError:
    """Messages of model validators begin with the field at fault."""
    name = message.split(" ", 1)[0]
    param = f"{place}.{name}" if place else name
    return InvalidRequestError(f"{place}.{message}" if place else message, param)


def _unknown(
    parent: str, name: str, value: Any, model: type[BaseModel] | None
) -> InvalidRequestError:
    inside = f"{parent}." if parent else ""
    spelled = name if PLAIN_NAME.fullmatch(name) else shown(name)
    place, param = inside + spelled, inside + cut(name)
    if model and issubclass(model, GenerationParameters) and name in FOREIGN_NO_OPS:
        no_op = shown(FOREIGN_NO_OPS[name])
        message = f"{place} must be {no_op} or left out (not supported here), got {shown(value)}"
        return InvalidRequestError(message, param)
    fields = model.model_fields if model and spelled is name else ()
    close = difflib.get_close_matches(name, fields, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return InvalidRequestError(f"{place} is not a known field{hint}", param)


def _model_at(body: type[BaseModel] | None, keys: Sequence[str | int]) -> type[BaseModel] | None:
    model = body
    for key in keys:
        if model is None:
            return None
        if isinstance(key, str) and key not in (ONE, MANY):
            field = model.model_fields.get(key)
            model = _model_in(field.annotation) if field else None
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model class somewhere inside a union or list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(argument) for argument in get_args(annotation))
    return next((model for model in found if model), None)
