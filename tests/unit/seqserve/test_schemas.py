"""The one rule for shapes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from seqserve.parameters import GenerationParameters
from seqserve.schemas import GenerateRequest, LogitsRequest, NextRequest


@pytest.mark.parametrize(
    ("body", "is_list", "count", "places"),
    [
        ({"inputs": "a"}, False, 1, ["inputs"]),
        ({"inputs": ["a"]}, True, 1, ["inputs[0]"]),
        ({"inputs": ["a", "b"]}, True, 2, ["inputs[0]", "inputs[1]"]),
        ({"input_ids": [5, 6]}, False, 1, ["input_ids"]),
        ({"input_ids": [[5, 6]]}, True, 1, ["input_ids[0]"]),
        ({"input_ids": [[]]}, True, 1, ["input_ids[0]"]),
        ({"input_ids": [[5], [6], [7]]}, True, 3, ["input_ids[0]", "input_ids[1]", "input_ids[2]"]),
    ],
)
def test_one_input_is_an_object_a_list_a_list(
    body: dict[str, Any], is_list: bool, count: int, places: list[str]
) -> None:
    request = GenerateRequest.model_validate(body)
    assert request.is_list is is_list
    assert request.count == count
    assert [request.place(i) for i in range(count)] == places


def test_parameters_are_for_all_or_for_each() -> None:
    for_all = GenerateRequest.model_validate({"inputs": ["a", "b"], "parameters": {"top_k": 3}})
    assert [for_all.parameters_of(i).top_k for i in (0, 1)] == [3, 3]
    assert for_all.parameters_place(1) == "parameters"
    each = GenerateRequest.model_validate({"inputs": ["a", "b"], "parameters": [{}, {"top_k": 3}]})
    assert [each.parameters_of(i).top_k for i in (0, 1)] == [None, 3]
    assert each.parameters_place(1) == "parameters[1]"
    none = GenerateRequest.model_validate({"inputs": "a"})
    assert none.parameters_of(0) == GenerationParameters()


@pytest.mark.parametrize(
    ("body", "is_list", "targets"),
    [
        ({"inputs": "a"}, False, None),
        ({"inputs": "a", "targets": "x"}, False, 1),
        ({"inputs": "a", "targets": ["x"]}, True, 1),
        ({"inputs": "a", "targets": ["x", "y"]}, True, 2),
        ({"inputs": ["a"], "targets": ["x", "y"]}, True, 2),
        ({"inputs": ["a", "b"], "targets": ["x", "y"]}, True, 2),
        ({"inputs": "a", "target_ids": [5]}, False, 1),
        ({"inputs": "a", "target_ids": [[5], []]}, True, 2),
    ],
)
def test_targets_pair_up_or_are_several_for_one_input(
    body: dict[str, Any], is_list: bool, targets: int | None
) -> None:
    request = LogitsRequest.model_validate(body)
    assert request.is_list is is_list
    assert request.target_count == targets


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (LogitsRequest, {"inputs": ["a", "b"], "targets": ["x", "y", "z"]}),
        (LogitsRequest, {"inputs": ["a", "b"], "target_ids": [5]}),
        (NextRequest, {"inputs": ["a", "b"], "target_prefix": ["x", "y", "z"]}),
        (NextRequest, {"inputs": "a", "target_prefix": "x", "target_prefix_ids": [5]}),
        (GenerateRequest, {"inputs": ["a", "b"], "parameters": [{}]}),
        (GenerateRequest, {"inputs": ["a"], "stream": True}),
    ],
)
def test_counts_that_do_not_match_are_refused(kind: Any, body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(body)
