"""What one request may ask for, looked at before anything costs time.

Counts and lengths are read from the JSON as it came: to validate a list of 600,000 inputs, or to
tokenise a text of three million characters, takes seconds, only to refuse it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from model.loader import LoadedModel
from seqserve.errors import InvalidRequestError
from service.settings import Settings

TEXTS = ("inputs", "prompt", "q", "targets", "target_prefix")
ID_LISTS = ("input_ids", "prompt", "target_ids", "target_prefix_ids")
FOR_EACH = (*dict.fromkeys((*TEXTS, *ID_LISTS)), "parameters", "src_lang", "tgt_lang")
"""Fields that may have an entry for each input or answer."""

MAX_FIELDS = 1000
"""Of one object; the largest that a schema takes is `logit_bias`."""


def check_body(body: Any, settings: Settings) -> None:
    """Refuse a body that asks for more than the server allows. Other mistakes are left alone.

    Raises:
        InvalidRequestError: names the field, its value, the limit and its setting.
    """
    if not isinstance(body, dict):
        return
    for place, value in _objects(body):
        _check_fields(place, value)
    for name in FOR_EACH:
        _check_count(name, body.get(name), settings.max_inputs)
    for place, text in _texts(body):
        if len(text) > settings.max_characters:
            raise InvalidRequestError(
                f"{place} has {len(text)} characters, at most {settings.max_characters} are "
                "allowed (max_characters)",
                place,
            )


def _check_fields(place: str, value: dict[str, Any]) -> None:
    """pydantic would collect an error for each field, only for the first to be told."""
    if len(value) > MAX_FIELDS:
        raise InvalidRequestError(
            f"{place or 'the body'} must have at most {MAX_FIELDS} entries, got {len(value)}",
            place or None,
        )


def _check_count(name: str, value: Any, limit: int) -> None:
    if not isinstance(value, list) or len(value) <= limit:
        return
    several = list | str if name in TEXTS else list
    if name in ID_LISTS and not isinstance(value[0], several):
        return  # one input, whose length the model limits
    raise InvalidRequestError(
        f"{name} has {len(value)} entries, at most {limit} are allowed (max_inputs)", name
    )


def _texts(body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The texts whose length no schema bounds, and how messages call them."""
    for name in TEXTS:
        yield from _strings(name, body.get(name))
    for place, parameters in _parameters(body):
        yield from _strings(f"{place}.target_prefix", parameters.get("target_prefix"))


def _objects(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects whose number of fields no schema bounds in time, and how messages call them."""
    for place, value in [("", body), *_parameters(body)]:
        yield place, value
        biases = value.get("logit_bias")
        if isinstance(biases, dict):
            yield f"{place}.logit_bias".removeprefix("."), biases


def _parameters(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is asked of the decoding, for all inputs or for each."""
    for place, value in _entries("parameters", body.get("parameters")):
        if isinstance(value, dict):
            yield place, value
            further = value.get("generate_parameters")
            if isinstance(further, dict):
                yield f"{place}.generate_parameters", further


def _strings(place: str, value: Any) -> Iterator[tuple[str, str]]:
    return ((name, text) for name, text in _entries(place, value) if isinstance(text, str))


def _entries(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value, or each one of a list."""
    if isinstance(value, list):
        return ((f"{place}[{i}]", entry) for i, entry in enumerate(value))
    return iter([(place, value)])


def within(loaded: LoadedModel, settings: Settings) -> LoadedModel:
    """A model that takes no longer sources and targets than the settings allow."""
    spec = loaded.spec
    max_src = min(spec.max_src, settings.max_source_tokens or spec.max_src)
    max_tgt = min(spec.max_tgt, settings.max_target_tokens or spec.max_tgt)
    limited = replace(
        spec,
        max_src=max_src,
        max_tgt=max_tgt,
        default_max_new_tokens=min(spec.default_max_new_tokens, max_tgt),
    )
    return replace(loaded, spec=limited)
