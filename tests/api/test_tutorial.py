"""The tutorial's model: ids only, and the source is what is continued."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from model.loader import LoadedModel
from model.transformer import Transformer

from .conftest import Api

pytestmark = pytest.mark.anyio


@torch.inference_mode()
def last_logits(model: LoadedModel, ids: list[int]) -> np.ndarray:
    """The same ids on both sides."""
    network = model.network
    assert isinstance(network, Transformer)
    both = torch.tensor([ids])
    logits, _ = network(both, both, src_lengths=torch.tensor([len(ids)]))
    return np.asarray(logits[0, -1])


async def post(api: Api, path: str, **body: Any) -> Any:
    return await api.post(path, model="tutorial", **body)


async def test_generate_continues_the_source(api: Api, tutorial: LoadedModel) -> None:
    source = [3, 1, 4, 1, 5]
    parameters = {"max_new_tokens": 6, "details": True}
    answer = await post(api, "/generate", input_ids=source, parameters=parameters)
    assert answer["generated_text"] is None
    grown = list(source)
    for token in answer["details"]["tokens"]:
        assert token["text"] is None
        assert token["id"] == int(last_logits(tutorial, grown).argmax())
        grown.append(token["id"])
    assert len(grown) == 11


async def test_the_block_is_the_limit_of_source_and_answer_together(api: Api) -> None:
    answer = await post(api, "/generate", input_ids=[1] * 38, parameters={"details": True})
    assert answer["details"]["generated_tokens"] == 2
    assert answer["details"]["finish_reason"] == "length"
    full = await post(api, "/generate", input_ids=[1] * 40, parameters={"details": True})
    assert full["details"]["generated_tokens"] == 0
    envelope = await api.refused(
        "/generate", model="tutorial", input_ids=[1] * 38, parameters={"max_new_tokens": 3}
    )
    assert "at most 2" in envelope["error"]
    envelope = await api.refused("/generate", model="tutorial", input_ids=[1] * 41)
    assert "41 tokens" in envelope["error"]
    assert "at most 40" in envelope["error"]


async def test_without_targets_the_source_is_the_target(api: Api, tutorial: LoadedModel) -> None:
    answer = await post(api, "/logits", input_ids=[7, 8, 9])
    assert answer["target_ids"] == [7, 8, 9]
    assert np.allclose(answer["logits"], last_logits(tutorial, [7, 8, 9]), atol=1e-4)
    every = await post(api, "/logits", input_ids=[7, 8, 9], positions="all")
    assert len(every["logits"]) == 3


async def test_targets_can_differ_from_the_source(api: Api) -> None:
    answer = await post(api, "/logits", input_ids=[7, 8, 9], target_ids=[2, 3], top_k=2)
    assert answer["target_ids"] == [2, 3]
    envelope = await api.refused("/logits", model="tutorial", input_ids=[7], target_ids=[[]])
    assert "at least one token" in envelope["error"]


async def test_next_agrees_with_generate_also_behind_a_prefix(api: Api) -> None:
    parameters = {"max_new_tokens": 1, "details": True, "target_prefix_ids": [6, 2]}
    generated = await post(api, "/generate", input_ids=[5, 9], parameters=parameters)
    following = await post(api, "/next", input_ids=[5, 9], target_prefix_ids=[6, 2])
    assert following["tokens"][0]["id"] == generated["details"]["tokens"][0]["id"]
    assert following["tokens"][0]["text"] is None


async def test_an_empty_source_has_an_empty_answer(api: Api) -> None:
    assert await post(api, "/generate", input_ids=[[]]) == [{"generated_text": None}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"inputs": "hello"}, "inputs"),
        ("/generate", {"inputs": ["hello"]}, "inputs"),
        ("/logits", {"inputs": "hello"}, "inputs"),
        ("/logits", {"input_ids": [1], "targets": "x"}, "targets"),
        ("/next", {"inputs": "hello"}, "inputs"),
        ("/next", {"input_ids": [1], "target_prefix": "x"}, "target_prefix"),
        ("/tokenize", {"inputs": "hello"}, "inputs"),
        ("/detokenize", {"input_ids": [1]}, "input_ids"),
    ],
)
async def test_text_is_refused_without_a_tokenizer(
    api: Api, path: str, body: dict[str, Any], param: str
) -> None:
    envelope = await api.refused(path, model="tutorial", **body)
    assert "tokenizer" in envelope["error"]
    assert envelope["param"] == param


async def test_a_text_prefix_is_refused_without_a_tokenizer(api: Api) -> None:
    envelope = await api.refused(
        "/generate", model="tutorial", input_ids=[1], parameters={"target_prefix": "x"}
    )
    assert envelope["param"] == "parameters.target_prefix"
