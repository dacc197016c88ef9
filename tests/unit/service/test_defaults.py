"""What a model asks for, and what of it a request keeps."""

from __future__ import annotations

from typing import Any

import pytest

from model.config import GenerationDefaults
from seqserve.errors import InvalidRequestError
from seqserve.parameters import GenerationParameters
from service.defaults import default_decoding, with_defaults

SEARCHES = GenerationDefaults(
    num_beams=4, length_penalty=2.0, early_stopping=True, no_repeat_ngram_size=3, temperature=0.7
)
SAMPLES = GenerationDefaults(do_sample=True, temperature=0.7, top_k=5, min_new_tokens=2)


def merged(defaults: GenerationDefaults, **request: Any) -> dict[str, Any]:
    """The fields that are set."""
    found = with_defaults(GenerationParameters(**request), defaults, "parameters")
    return found.model_dump(exclude_none=True, exclude_defaults=True)


BEAMS = {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "no_repeat_ngram_size": 3}
DRAWN = {"do_sample": True, "temperature": 0.7, "no_repeat_ngram_size": 3}
DRAWS = {"do_sample": True, "temperature": 0.7, "top_k": 5, "min_new_tokens": 2}


@pytest.mark.parametrize(
    ("defaults", "request_", "expected"),
    [
        (GenerationDefaults(), {}, {}),
        (SEARCHES, {}, BEAMS),
        (SEARCHES, {"num_beams": 2}, BEAMS | {"num_beams": 2}),
        (SEARCHES, {"early_stopping": False}, BEAMS | {"early_stopping": False}),
        (SEARCHES, {"num_beams": 1}, {"num_beams": 1, "no_repeat_ngram_size": 3}),
        (SEARCHES, {"length_penalty": 0.5}, BEAMS | {"length_penalty": 0.5}),
        (SEARCHES, {"num_return_sequences": 3}, BEAMS | {"num_return_sequences": 3}),
        (SEARCHES, {"do_sample": False}, BEAMS | {"do_sample": False}),
        (SEARCHES, {"seed": 1}, DRAWN | {"seed": 1}),
        (SEARCHES, {"temperature": 1.5}, DRAWN | {"temperature": 1.5}),
        (SAMPLES, {}, DRAWS),
        (SAMPLES, {"top_k": 0, "seed": 1}, DRAWS | {"top_k": 0, "seed": 1}),
        (SAMPLES, {"num_return_sequences": 3}, DRAWS | {"num_return_sequences": 3}),
        (SAMPLES, {"num_beams": 3}, {"num_beams": 3, "min_new_tokens": 2}),
        (SAMPLES, {"num_beams": 1}, {"num_beams": 1, "min_new_tokens": 2}),
        (SAMPLES, {"do_sample": False}, {"do_sample": False, "min_new_tokens": 2}),
    ],
)
def test_the_request_wins_field_by_field(
    defaults: GenerationDefaults, request_: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert merged(defaults, **request_) == expected


@pytest.mark.parametrize(
    ("defaults", "request_", "message"),
    [
        (
            SEARCHES,
            {"num_return_sequences": 5},
            "num_return_sequences must be at most num_beams, 4",
        ),
        (GenerationDefaults(), {"num_return_sequences": 2}, "num_return_sequences must be at most"),
        (GenerationDefaults(), {"length_penalty": 2.0}, "length_penalty needs num_beams above 1"),
    ],
)
def test_what_does_not_fit_the_models_beams_is_refused(
    defaults: GenerationDefaults, request_: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^parameters\.{message}") as caught:
        merged(defaults, **request_)
    assert caught.value.param == f"parameters.{message.split(' ')[0]}"


@pytest.mark.parametrize(
    ("defaults", "expected"),
    [
        (GenerationDefaults(), "greedy"),
        (GenerationDefaults(temperature=0.7, num_beams=1), "greedy"),
        (SEARCHES, "beam_search"),
        (SAMPLES, "sampling"),
    ],
)
def test_how_tokens_are_picked_by_default(defaults: GenerationDefaults, expected: str) -> None:
    assert default_decoding(defaults) == expected
