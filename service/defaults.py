"""What a model asks for where a request says nothing."""

from __future__ import annotations

from typing import Any, Literal

from model.config import GenerationDefaults
from seqserve.errors import InvalidRequestError
from seqserve.parameters import GenerationParameters

SAMPLING = {"do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p"}
SEARCH = {"num_beams", "length_penalty", "early_stopping"}
ADDED = {"bad_words", "renormalize_logits"}
"""Taken from the model whatever a request says: see `service.planning.Planner`."""


def with_defaults(
    parameters: GenerationParameters, defaults: GenerationDefaults, place: str
) -> GenerationParameters:
    """The request's parameters, and the model's for those that it leaves open.

    Field by field the request wins. First of all it decides between sampling, beam search and
    greedy decoding, so that a default of one kind never meets a wish of another: a request that
    samples gets no beams from the model, one with `num_beams` or `do_sample: false` no sampling,
    one with `num_beams: 1` no `length_penalty`.

    Args:
        place: how an error message calls the parameters.

    Raises:
        InvalidRequestError: the request does not fit the beams that it leaves to the model.
    """
    samples = parameters.samples or _samples_by_default(parameters, defaults)
    taken = {
        name: value
        for name, value in defaults.stated.items()
        if getattr(parameters, name, None) is None
        and name not in ADDED | (SEARCH if samples else SAMPLING)
    }
    if (parameters.num_beams or taken.get("num_beams", 1)) == 1:
        taken = {name: value for name, value in taken.items() if name not in SEARCH}
    update: dict[str, Any] = taken | ({"do_sample": True} if samples else {})
    merged = parameters.model_copy(update=update)
    try:
        merged.check_beams()
    except ValueError as error:
        param = f"{place}.{str(error).split(' ', 1)[0]}"
        raise InvalidRequestError(f"{place}.{error}", param) from error
    return merged


def default_decoding(defaults: GenerationDefaults) -> Literal["greedy", "beam_search", "sampling"]:
    """How a request without parameters picks its tokens."""
    merged = with_defaults(GenerationParameters(), defaults, "parameters")
    if merged.samples:
        return "sampling"
    return "beam_search" if (merged.num_beams or 1) > 1 else "greedy"


def _samples_by_default(parameters: GenerationParameters, defaults: GenerationDefaults) -> bool:
    return (
        bool(defaults.do_sample) and parameters.do_sample is None and parameters.num_beams is None
    )
