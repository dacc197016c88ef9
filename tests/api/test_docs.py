"""The examples in docs/api.md are what the server takes and gives."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from seqserve import Client, errors
from seqserve.parameters import GenerationParameters

DOCS = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
EXAMPLE = re.compile(
    r"```sh\ncurl localhost:8000(?P<path>\S+) -d '(?P<body>.*?)'\n```\n```json\n(?P<answer>.*?)```",
    re.DOTALL,
)
NOT_SENT = {"client_gone", "connection", "version"}
"""Errors that no answer has."""

EXAMPLES = [match.groupdict() for match in EXAMPLE.finditer(DOCS)]


def shape(value: Any) -> Any:
    """Keys and types; of a list, those of its first element."""
    if isinstance(value, dict):
        return {key: shape(v) for key, v in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


@pytest.mark.anyio
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e["body"])
async def test_an_example_has_the_answer_s_shape(
    client: httpx.AsyncClient, example: dict[str, str]
) -> None:
    response = await client.post(example["path"], content=example["body"].encode())
    promised = json.loads(example["answer"])
    assert shape(response.json()) == shape(promised)
    if "error" in promised:
        assert {**response.json(), "request_id": ""} == {**promised, "request_id": ""}


def test_there_is_an_example_of_every_endpoint() -> None:
    paths = {example["path"] for example in EXAMPLES}
    assert paths == {
        "/generate",
        "/logits",
        "/next",
        "/score",
        "/attention",
        "/tokenize",
        "/detokenize",
    }


@pytest.mark.parametrize("name", GenerationParameters.model_fields)
def test_every_parameter_is_documented(name: str) -> None:
    assert f"`{name}`" in DOCS


@pytest.mark.parametrize("kind", sorted(errors.ERRORS.keys() - NOT_SENT))
def test_every_error_type_is_documented(kind: str) -> None:
    assert f"`{kind}`" in DOCS


def test_the_client_s_methods_are_documented() -> None:
    methods = inspect.getmembers(Client, inspect.isfunction)
    own = {name for name, _ in methods if not name.startswith("_")} - {"send", "close"}
    for name in sorted(own):
        assert f"client.{name}(" in DOCS
