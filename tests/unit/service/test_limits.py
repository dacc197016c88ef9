"""What a body may ask for, told before it is validated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model.loader import load_model
from seqserve.errors import InvalidRequestError
from service.limits import check_body, within
from service.settings import Settings
from tests.builders import make_native_model

SETTINGS = Settings(max_inputs=2, max_characters=3)

MANY = [str(number) for number in range(1001)]


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        {"inputs": "abc"},
        {"inputs": ["abc", "abc"]},
        {"input_ids": [1] * 9},
        {"input_ids": [[1] * 9] * 2},
        {"prompt": [1] * 9},
        {"parameters": {"generate_parameters": 5}},
        {"inputs": 5, "parameters": 5},
        {"inputs": ["a"], "parameters": [5, {}]},
        {"inputs": "a", "parameters": {"target_prefix": ["long enough"] * 0}},
        {"inputs": "a", "other": ["abcd"] * 9},
        {"parameters": {"logit_bias": dict.fromkeys(MANY[1:], 1)}},
        {"parameters": {"logit_bias": [1] * 1001}},
    ],
)
def test_what_is_within_the_limits_or_wrong_otherwise_passes(body: Any) -> None:
    check_body(body, SETTINGS)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"inputs": ["a"] * 3}, "inputs", "inputs has 3 entries, at most 2 are allowed"),
        ({"input_ids": [[]] * 3}, "input_ids", "at most 2 are allowed (max_inputs)"),
        ({"target_ids": [[]] * 3}, "target_ids", "has 3 entries"),
        ({"prompt": ["a"] * 3}, "prompt", "prompt has 3 entries"),
        ({"prompt": [[]] * 3}, "prompt", "prompt has 3 entries"),
        ({"prompt": ["a", "abcd"]}, "prompt[1]", "prompt[1] has 4 characters"),
        ({"parameters": [{}] * 3}, "parameters", "has 3 entries"),
        ({"tgt_lang": ["a"] * 3}, "tgt_lang", "has 3 entries"),
        ({"inputs": "abcd"}, "inputs", "inputs has 4 characters, at most 3 are allowed"),
        ({"inputs": ["a", "abcd"]}, "inputs[1]", "inputs[1] has 4 characters"),
        ({"targets": ["abcd"]}, "targets[0]", "(max_characters)"),
        (
            {"parameters": {"target_prefix": "abcd"}},
            "parameters.target_prefix",
            "parameters.target_prefix has 4 characters",
        ),
        (
            {"parameters": [{}, {"target_prefix": "abcd"}]},
            "parameters[1].target_prefix",
            "parameters[1].target_prefix has 4 characters",
        ),
        (dict.fromkeys(MANY, 1), None, "the body must have at most 1000 entries, got 1001"),
        ({"parameters": dict.fromkeys(MANY, 1)}, "parameters", "parameters must have at most 1000"),
        ({"logit_bias": dict.fromkeys(MANY, 1)}, "logit_bias", "logit_bias must have at most 1000"),
        (
            {"parameters": [{}, {"logit_bias": dict.fromkeys(MANY, 1)}]},
            "parameters[1].logit_bias",
            "parameters[1].logit_bias must have at most 1000 entries, got 1001",
        ),
        (
            {"parameters": {"generate_parameters": {"logit_bias": dict.fromkeys(MANY, 1)}}},
            "parameters.generate_parameters.logit_bias",
            "got 1001",
        ),
    ],
)
def test_too_much_is_refused_with_value_and_limit(
    body: Any, param: str | None, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_body(body, SETTINGS)
    assert caught.value.param == param
    assert message in str(caught.value)


def test_a_model_is_served_within_the_settings(tmp_path: Path) -> None:
    model = load_model(make_native_model(tmp_path), "cpu")
    assert within(model, Settings()).spec == model.spec
    small = within(model, Settings(max_source_tokens=5, max_target_tokens=4)).spec
    assert (small.max_src, small.max_tgt, small.default_max_new_tokens) == (5, 4, 4)
    large = within(model, Settings(max_source_tokens=10**6, max_target_tokens=10**6)).spec
    assert large == model.spec
