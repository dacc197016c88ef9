"""POST /score."""

from __future__ import annotations

import math
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from model.loader import LoadedModel
from model.transformer import Transformer

from .conftest import Api

pytestmark = pytest.mark.anyio

WORDS = ["hello", "fox", "a", "transformer", "jumps"]


@torch.inference_mode()
def logprobs_of(model: LoadedModel, src: list[int], fed: list[int]) -> np.ndarray:
    """``[tgt, vocab]`` from one plain forward pass."""
    network = model.network
    assert isinstance(network, Transformer)
    lengths = torch.tensor([len(src)])
    logits, _ = network(torch.tensor([src]), torch.tensor([fed]), src_lengths=lengths)
    return np.asarray(logits[0].double().log_softmax(-1))


def source_ids(model: LoadedModel, text: str) -> list[int]:
    assert model.source_tokenizer
    return model.source_tokenizer.encode([text])[0]


async def test_a_text_s_tokens_and_its_end_are_scored(api: Api, native: LoadedModel) -> None:
    answer = await api.post("/score", inputs="hello", targets="HH AH L")
    assert native.target_tokenizer
    labels = native.target_tokenizer.encode(["HH AH L"])[0]
    tokens = answer["tokens"]
    assert [t["id"] for t in tokens] == labels
    assert labels[-1] == native.spec.eos_id
    assert [t["text"] for t in tokens] == ["HH", " AH", " L", "</s>"]
    assert [t["special"] for t in tokens] == [False, False, False, True]
    expected = logprobs_of(native, source_ids(native, "hello"), [1, *labels[:-1]])
    own = expected[range(len(labels)), labels]
    assert [t["logprob"] for t in tokens] == pytest.approx(own, abs=1e-4)
    assert answer["logprob_sum"] == pytest.approx(own.sum(), abs=1e-4)
    assert answer["logprob_mean"] == pytest.approx(own.mean(), abs=1e-4)
    assert answer["perplexity"] == pytest.approx(math.exp(-own.mean()), rel=1e-4)


async def test_ids_are_scored_exactly_as_given(api: Api, native: LoadedModel) -> None:
    answer = await api.post("/score", inputs="hello", target_ids=[13, 6])
    assert [t["id"] for t in answer["tokens"]] == [13, 6]  # no end
    ended = await api.post("/score", inputs="hello", target_ids=[13, 6, 2, 7])
    assert [t["special"] for t in ended["tokens"]] == [False, False, True, False]
    expected = logprobs_of(native, source_ids(native, "hello"), [1, 13, 6, 2])
    own = expected[range(4), [13, 6, 2, 7]]
    assert [t["logprob"] for t in ended["tokens"]] == pytest.approx(own, abs=1e-4)


@pytest.mark.parametrize("word", WORDS)
async def test_a_greedy_answer_s_log_probabilities_sum_to_its_score(api: Api, word: str) -> None:
    generated = await api.post("/generate", inputs=word, parameters={"details": True})
    tokens = generated["details"]["tokens"]
    score = await api.post("/score", inputs=word, target_ids=[t["id"] for t in tokens])
    assert score["logprob_sum"] == pytest.approx(sum(t["logprob"] for t in tokens), abs=1e-4)
    for scored, told in zip(score["tokens"], tokens, strict=True):
        assert scored["logprob"] == pytest.approx(told["logprob"], abs=1e-4)
        assert (scored["id"], scored["text"]) == (told["id"], told["text"])
        assert scored["special"] == told["special"]


async def test_an_answer_cut_by_the_model_s_limit_can_be_scored(api: Api) -> None:
    ids = [5] * 48  # as many as can be generated
    assert len((await api.post("/score", inputs="a", target_ids=ids))["tokens"]) == 48
    envelope = await api.refused("/score", inputs="a", target_ids=[*ids, 5])
    assert "target_ids has 49 tokens, the model takes at most 48" in envelope["error"]
    assert envelope["param"] == "target_ids"


async def test_pairs_of_unlike_lengths_equal_each_alone(api: Api) -> None:
    targets = ["HH AH", "", "W", "AH K L M N P", "F"]
    answers = await api.post("/score", inputs=WORDS, targets=targets)
    for answer, word, target in zip(answers, WORDS, targets, strict=True):
        alone = await api.post("/score", inputs=word, targets=target)
        assert [t["id"] for t in answer["tokens"]] == [t["id"] for t in alone["tokens"]]
        assert answer["logprob_sum"] == pytest.approx(alone["logprob_sum"], abs=1e-4)
    assert [t["text"] for t in answers[1]["tokens"]] == ["</s>"]


@pytest.mark.one_process
async def test_several_targets_of_one_input_get_a_list(
    api: Api, native: LoadedModel, client: httpx.AsyncClient
) -> None:
    encoded: list[int] = []
    network = native.network
    assert isinstance(network, Transformer)
    hook = network.encoder.register_forward_hook(lambda _, args, __: encoded.append(len(args[0])))
    try:
        body = {"inputs": "zygote", "targets": ["HH AH", "W", "F AA K S"]}
        response = await client.post("/score", json=body)
    finally:
        hook.remove()
    assert len(response.json()) == 3
    assert sum(encoded) == 1
    assert response.headers["x-prompt-tokens"] == "7"
    assert len(await api.post("/score", inputs="hello", targets=["HH"])) == 1
    assert len(await api.post("/score", inputs=["hello"], target_ids=[5])) == 1
    assert "tokens" in await api.post("/score", input_ids=[5, 6, 2], target_ids=[5])


async def test_a_likelier_target_has_the_lower_perplexity(api: Api) -> None:
    generated = (await api.post("/generate", inputs="fox"))["generated_text"]
    good, bad = await api.post("/score", inputs="fox", targets=[generated, "Z Z Z Z"])
    assert good["perplexity"] < bad["perplexity"]


@pytest.mark.one_process
async def test_impossible_tokens_are_null_and_so_is_what_they_enter(
    api: Api, native: LoadedModel
) -> None:
    network = native.network
    assert isinstance(network, Transformer)

    def forbid(module: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor([7]), -math.inf)

    hook = network.output.register_forward_hook(forbid)
    try:
        one = await api.post("/score", inputs="hello", target_ids=[13, 7, 6])
        other = await api.post("/score", inputs="hello", target_ids=[13, 6])
    finally:
        hook.remove()
    assert [t["logprob"] is None for t in one["tokens"]] == [False, True, False]
    assert one["logprob_sum"] is one["logprob_mean"] is one["perplexity"] is None
    assert other["logprob_sum"] < 0


@pytest.mark.one_process
async def test_a_perplexity_beyond_float32_is_null(api: Api, native: LoadedModel) -> None:
    network = native.network
    assert isinstance(network, Transformer)

    def push_down(module: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor([7]), -1000.0)

    hook = network.output.register_forward_hook(push_down)
    try:
        answer = await api.post("/score", inputs="hello", target_ids=[7])
    finally:
        hook.remove()
    assert answer["logprob_mean"] < -900
    assert answer["perplexity"] is None


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"inputs": "a"}, "targets", "targets (text) or target_ids (token ids) must be given"),
        ({"targets": "HH"}, "inputs", "must be given"),
        ({"inputs": "a", "targets": "x", "target_ids": [5]}, "targets", "exclude each other"),
        ({"inputs": ["a", "b"], "targets": ["x"]}, "targets", "1 targets, 2 inputs"),
        ({"inputs": ["a", "b"], "targets": "x"}, "targets", "1 targets, 2 inputs"),
        ({"inputs": ["a", "b"], "target_ids": [[5]] * 3}, "target_ids", "3 targets, 2 inputs"),
        ({"inputs": "a", "targets": []}, "targets", "at least one element"),
        ({"inputs": "a", "targets": 5}, "targets", "must be a string, or a list of them"),
        ({"inputs": "a", "target_ids": []}, "target_ids", "at least one element"),
        ({"inputs": "a", "target_ids": [[]]}, "target_ids[0]", "at least one token, got 0"),
        ({"inputs": "a", "target_ids": [[5], []]}, "target_ids[1]", "at least one token"),
        ({"inputs": "a", "target_ids": [5, 31]}, "target_ids[1]", "must be an id in [0, 31)"),
        ({"inputs": "a", "target_ids": [[5], [-1]]}, "target_ids[1][0]", "got -1"),
        ({"inputs": "a", "targets": "K " * 48}, "targets", "49 tokens, the model takes at most 48"),
        ({"inputs": "b" * 60, "targets": "K"}, "inputs", "61 tokens, the model takes at most 48"),
        ({"input_ids": [[]], "targets": "K"}, "input_ids[0]", "at least one token"),
        ({"inputs": "a", "targets": "K", "timeout": -1}, "timeout", "got -1"),
        ({"inputs": "a", "targets": "K", "top_k": 1}, "top_k", "not a known field"),
        ({"inputs": "a", "targets": "K", "parameters": {}}, "parameters", "not a known field"),
        ({"inputs": "a", "targets": ["K"] * 1025}, "targets", "at most 1024"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_bad_bodies_are_refused_by_name(
    api: Api, body: dict[str, Any], param: str, message: str
) -> None:
    envelope = await api.refused("/score", **body)
    assert message in envelope["error"]
    assert envelope["param"] == param


# --- a model that continues its source -----------------------------------------------------------


async def test_the_tutorial_s_model_predicts_a_target_s_tokens_from_the_second_on(
    api: Api, tutorial: LoadedModel
) -> None:
    source, target = [3, 1, 4], [5, 9, 2, 6]
    answer = await api.post("/score", model="tutorial", input_ids=source, target_ids=target)
    own = logprobs_of(tutorial, source, target[:-1])[range(3), target[1:]]
    assert [t["id"] for t in answer["tokens"]] == target[1:]
    assert [t["logprob"] for t in answer["tokens"]] == pytest.approx(own, abs=1e-4)
    assert [(t["text"], t["special"]) for t in answer["tokens"]] == [(None, False)] * 3


async def test_without_targets_the_tutorial_s_model_scores_the_source(
    api: Api, tutorial: LoadedModel
) -> None:
    source = [3, 1, 4, 1]
    answer = await api.post("/score", model="tutorial", input_ids=[source])
    own = logprobs_of(tutorial, source, source[:-1])[range(3), source[1:]]
    assert answer[0]["logprob_sum"] == pytest.approx(own.sum(), abs=1e-4)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input_ids": [3]}, "input_ids", "at least two tokens"),
        ({"input_ids": [3, 4], "target_ids": [5]}, "target_ids", "at least two tokens"),
        ({"input_ids": [3, 4], "target_ids": [[]]}, "target_ids[0]", "at least two tokens"),
        ({"input_ids": [3], "target_ids": [5] * 42}, "target_ids", "42 tokens, the model takes"),
        ({"input_ids": [3], "targets": "x"}, "targets", "tokenizer"),
        ({"inputs": "x", "target_ids": [1, 2]}, "inputs", "tokenizer"),
    ],
    ids=str,
)
async def test_the_tutorial_s_model_refuses_what_it_cannot_score(
    api: Api, body: dict[str, Any], param: str, message: str
) -> None:
    envelope = await api.refused("/score", model="tutorial", **body)
    assert message in envelope["error"]
    assert envelope["param"] == param
