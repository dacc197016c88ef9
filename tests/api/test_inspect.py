"""POST /logits, /next, /tokenize and /detokenize."""

from __future__ import annotations

import math
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load

from model.loader import LoadedModel
from model.transformer import Transformer
from service.app import create_app
from service.settings import Settings

from .conftest import Api, serving

pytestmark = pytest.mark.anyio


@torch.inference_mode()
def forward(model: LoadedModel, src: list[int], tgt: list[int]) -> np.ndarray:
    """``[tgt, vocab]`` from one plain forward pass."""
    network = model.network
    assert isinstance(network, Transformer)
    lengths = torch.tensor([len(src)])
    logits, _ = network(torch.tensor([src]), torch.tensor([tgt]), src_lengths=lengths)
    return np.asarray(logits[0])


def encode(model: LoadedModel, text: str) -> list[int]:
    assert model.source_tokenizer
    return model.source_tokenizer.encode([text])[0]


def encode_target(model: LoadedModel, text: str) -> list[int]:
    """Behind the decoder start, without the end."""
    assert model.target_tokenizer
    return [*model.spec.decoder_start_ids, *model.target_tokenizer.encode([text])[0][:-1]]


def close(actual: Any, expected: np.ndarray) -> bool:
    return np.allclose(np.array(actual, dtype=np.float32), expected, atol=1e-4, rtol=1e-5)


# --- /logits -------------------------------------------------------------------------------------


async def test_logits_of_the_first_step_equal_the_forward_pass(
    api: Api, native: LoadedModel
) -> None:
    answer = await api.post("/logits", inputs="hello")
    assert answer["target_ids"] == [1]
    assert close(answer["logits"], forward(native, encode(native, "hello"), [1])[0])


@pytest.mark.parametrize("positions", ["last", "all"])
async def test_logits_behind_a_target_equal_the_forward_pass(
    api: Api, native: LoadedModel, positions: str
) -> None:
    answer = await api.post("/logits", inputs="fox", targets="F AA K", positions=positions)
    fed = encode_target(native, "F AA K")
    expected = forward(native, encode(native, "fox"), fed)
    assert answer["target_ids"] == fed
    assert close(answer["logits"], expected if positions == "all" else expected[-1])


async def test_pairs_of_unlike_lengths_equal_each_alone(api: Api, native: LoadedModel) -> None:
    inputs, targets = ["hello", "a", "jumps"], ["HH", "AH K L M N", ""]
    answers = await api.post("/logits", inputs=inputs, targets=targets, positions="all")
    for answer, source, target in zip(answers, inputs, targets, strict=True):
        fed = encode_target(native, target)
        assert answer["target_ids"] == fed
        assert close(answer["logits"], forward(native, encode(native, source), fed))


async def test_several_targets_of_one_input_get_a_list(api: Api) -> None:
    targets = ["HH AH", "W", "F AA K S"]
    answers = await api.post("/logits", inputs="hello", targets=targets)
    assert len(answers) == 3
    for answer, target in zip(answers, targets, strict=True):
        alone = await api.post("/logits", inputs="hello", targets=target)
        assert close(answer["logits"], np.array(alone["logits"]))
    assert len(await api.post("/logits", inputs=["hello"], targets=targets)) == 3
    assert len(await api.post("/logits", inputs="hello", targets=["HH"])) == 1


async def test_target_ids_are_taken_as_given(api: Api, native: LoadedModel) -> None:
    answer = await api.post("/logits", inputs="hello", target_ids=[13, 6, 2], positions="all")
    assert answer["target_ids"] == [1, 13, 6, 2]
    assert len(answer["logits"]) == 4
    first = await api.post("/logits", inputs="hello", target_ids=[[]])
    assert first[0]["target_ids"] == [1]


async def test_top_k_gives_the_largest_logits_in_falling_order(api: Api) -> None:
    whole = await api.post("/logits", inputs="hello", targets="HH AH", positions="all")
    top = await api.post("/logits", inputs="hello", targets="HH AH", positions="all", top_k=3)
    assert top.keys() == {"target_ids", "ids", "values"}
    for row, ids, values in zip(whole["logits"], top["ids"], top["values"], strict=True):
        assert ids == sorted(range(len(row)), key=lambda i: -row[i])[:3]
        assert values == pytest.approx([row[i] for i in ids], abs=1e-5)
    last = await api.post("/logits", inputs="hello", top_k=1000)
    assert len(last["ids"]) == len(whole["logits"][0])


async def test_numbers_are_the_shortest_digits_of_a_float32(
    client: httpx.AsyncClient, native: LoadedModel
) -> None:
    text = (await client.post("/logits", json={"inputs": "hello"})).text
    file = (await client.post("/logits", json={"inputs": "hello", "format": "safetensors"})).content
    exact = load(file)["logits"][0, 0]
    digits = text.split('"logits":[')[1].rstrip("]}").split(",")
    assert [np.float32(d) for d in digits] == list(exact)
    assert all(len(d.lstrip("-").replace(".", "").lstrip("0")) <= 9 for d in digits)


@pytest.mark.parametrize("asked", ["field", "header"])
async def test_safetensors_hold_padded_tensors(
    client: httpx.AsyncClient, native: LoadedModel, asked: str
) -> None:
    body: dict[str, Any] = {
        "inputs": ["hello", "a"],
        "targets": ["HH AH L", "W"],
        "positions": "all",
    }
    headers = {"accept": "application/octet-stream"} if asked == "header" else {}
    if asked == "field":
        body["format"] = "safetensors"
    response = await client.post("/logits", json=body, headers=headers)
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.headers["x-prompt-tokens"] == "8"
    tensors = load(response.content)
    assert tensors["logits"].dtype == np.float32
    assert tensors["logits"].shape == (2, 4, native.spec.tgt_vocab_size)
    assert tensors["target_lengths"].tolist() == [4, 2]
    assert tensors["target_ids"].tolist()[1] == [1, 28, 0, 0]
    assert not tensors["logits"][1, 2:].any()
    fed = encode_target(native, "HH AH L")
    assert close(tensors["logits"][0], forward(native, encode(native, "hello"), fed))


async def test_safetensors_of_the_last_position_and_of_top_k(client: httpx.AsyncClient) -> None:
    body = {"inputs": "hello", "targets": ["HH AH", "W"], "format": "safetensors"}
    last = load((await client.post("/logits", json=body)).content)
    assert last["logits"].shape[:2] == (2, 1)
    assert last["target_ids"].shape == (2, 3)
    top = load((await client.post("/logits", json={**body, "top_k": 4})).content)
    assert top.keys() == {"values", "ids", "target_ids", "target_lengths"}
    assert top["ids"].shape == top["values"].shape == (2, 1, 4)


async def test_a_format_in_the_body_wins_over_the_header(client: httpx.AsyncClient) -> None:
    response = await client.post(
        "/logits",
        json={"inputs": "hello", "format": "json"},
        headers={"accept": "application/octet-stream"},
    )
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"inputs": ["a", "b"], "targets": ["x"]}, "targets", "1 targets, 2 inputs"),
        ({"inputs": ["a", "b"], "targets": "x"}, "targets", "1 targets, 2 inputs"),
        ({"inputs": "a", "targets": "x", "target_ids": [5]}, "targets", "exclude each other"),
        ({"inputs": "a", "targets": []}, "targets", "at least one element"),
        ({"inputs": "a", "target_ids": [5, 99]}, "target_ids[1]", "must be an id in [0, 31)"),
        ({"inputs": "a", "target_ids": [[5], [99]]}, "target_ids[1][0]", "got 99"),
        ({"inputs": "a", "target_ids": [5] * 48}, "target_ids", "49 tokens"),
        ({"inputs": "b" * 60}, "inputs", "61 tokens, the model takes at most 48"),
        ({"input_ids": [[5], []]}, "input_ids[1]", "at least one token"),
        ({"inputs": "a", "positions": "first"}, "positions", 'must be "last" or "all"'),
        ({"inputs": "a", "format": "xml"}, "format", '"json" or "safetensors" or null'),
        ({"inputs": "a", "top_k": 0}, "top_k", "must be at least 1, got 0"),
        ({"inputs": "a", "parameters": {}}, "parameters", "not a known field"),
    ],
    ids=str,
)
async def test_bad_bodies_are_refused_by_name(
    api: Api, body: dict[str, Any], param: str, message: str
) -> None:
    envelope = await api.refused("/logits", **body)
    assert message in envelope["error"]
    assert envelope["param"] == param


async def test_answers_of_too_many_numbers_are_refused_with_advice(native: LoadedModel) -> None:
    settings = Settings(max_json_values=100, max_tensor_values=200)
    async with serving(create_app(settings, {"m": native})) as client:
        api = Api(client)
        body: dict[str, Any] = {"inputs": "a", "target_ids": [5] * 4, "positions": "all"}
        envelope = await api.refused("/logits", **body)
        assert "155 numbers, at most 100" in envelope["error"]
        assert "safetensors" in envelope["error"]
        fits = await client.post("/logits", json={**body, "format": "safetensors"})
        assert fits.status_code == 200
        body["target_ids"] = [5] * 8
        envelope = await api.refused("/logits", **body, format="safetensors")
        assert "279 numbers, at most 200" in envelope["error"]
        await api.post("/logits", **{**body, "top_k": 5})
        envelope = await api.refused("/score", inputs="a", target_ids=[[5] * 17] * 3)
        assert "102 numbers, at most 100" in envelope["error"]
        await api.post("/score", inputs="a", target_ids=[[5] * 25] * 2)


# --- /next ---------------------------------------------------------------------------------------


async def test_next_tokens_are_the_likeliest_with_their_names(
    api: Api, native: LoadedModel
) -> None:
    answer = await api.post("/next", inputs="hello", target_prefix="HH", top_k=4)
    logits = forward(native, encode(native, "hello"), encode_target(native, "HH"))[-1]
    logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    order = np.argsort(-logits)[:4]
    assert [t["id"] for t in answer["tokens"]] == order.tolist()
    for token in answer["tokens"]:
        assert native.target_tokenizer
        assert token["text"] == native.target_tokenizer.token(token["id"])
        assert token["logit"] == pytest.approx(float(logits[token["id"]]), abs=1e-4)
        assert token["logprob"] == pytest.approx(float(logprobs[token["id"]]), abs=1e-4)


async def test_next_begins_with_what_generate_takes(api: Api) -> None:
    generated = await api.post("/generate", inputs="fox", parameters={"details": True})
    following = await api.post("/next", inputs=["fox"])
    assert following[0]["tokens"][0]["id"] == generated["details"]["tokens"][0]["id"]
    assert len(following[0]["tokens"]) == 10


async def test_probabilities_of_all_tokens_sum_to_one(api: Api) -> None:
    answer = await api.post("/next", inputs="fox", top_k=1000)
    assert sum(math.exp(t["logprob"]) for t in answer["tokens"]) == pytest.approx(1.0, abs=1e-4)


async def test_one_prefix_serves_all_inputs_or_each_has_its_own(api: Api) -> None:
    same = await api.post("/next", inputs=["fox", "dog"], target_prefix="F")
    own = await api.post("/next", inputs=["fox", "dog"], target_prefix_ids=[[11], [11, 5]])
    assert same[0] == own[0]
    assert same[1] != own[1]
    envelope = await api.refused("/next", inputs=["a", "b"], target_prefix=["x", "y", "z"])
    assert envelope["param"] == "target_prefix"
    envelope = await api.refused("/next", inputs="a", target_prefix_ids=[5, 99])
    assert envelope["param"] == "target_prefix_ids[1]"
    envelope = await api.refused("/next", inputs="a", target_prefix_ids=[5] * 48)
    assert "49 tokens" in envelope["error"]
    assert envelope["param"] == "target_prefix_ids"


async def test_prefixes_of_unlike_lengths_equal_each_alone(api: Api, native: LoadedModel) -> None:
    inputs = ["hello", "a", "jumps", "transformer", "fox"]
    prefixes = ["HH AH L", "", "CH", "T R AE N S F AO", "F"]
    assert native.target_tokenizer
    ids = [encode_target(native, prefix)[1:] for prefix in prefixes]
    by_text = await api.post("/next", inputs=inputs, target_prefix=prefixes, top_k=31)
    by_ids = await api.post("/next", inputs=inputs, target_prefix_ids=ids, top_k=31)
    assert by_text == by_ids
    for answer, word, prefix in zip(by_text, inputs, prefixes, strict=True):
        logits = forward(native, encode(native, word), encode_target(native, prefix))[-1]
        assert [t["id"] for t in answer["tokens"]] == np.argsort(-logits).tolist()
        assert close([t["logit"] for t in answer["tokens"]], np.sort(logits)[::-1])
        alone = await api.post("/next", inputs=word, target_prefix=prefix, top_k=1)
        assert alone["tokens"][0]["id"] == answer["tokens"][0]["id"]


async def test_several_prefixes_of_one_input_get_a_list(api: Api) -> None:
    prefixes = ["F", "", "F AA K"]
    answers = await api.post("/next", inputs="fox", target_prefix=prefixes)
    for answer, prefix in zip(answers, prefixes, strict=True):
        alone = await api.post("/next", inputs="fox", target_prefix=prefix)
        assert [t["id"] for t in answer["tokens"]] == [t["id"] for t in alone["tokens"]]
    ids = await api.post("/next", inputs=["fox"], target_prefix_ids=[[11], [], [11, 5, 17]])
    assert len(ids) == 3
    assert len(await api.post("/next", inputs="fox", target_prefix=["F"])) == 1


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"inputs": "a", "target_prefix": "x", "target_prefix_ids": [5]}, "target_prefix", "exclu"),
        ({"inputs": "a", "target_prefix": []}, "target_prefix", "at least one element"),
        ({"inputs": "a", "target_prefix_ids": []}, "target_prefix_ids", "at least one element"),
        (
            {"inputs": ["a", "b"], "target_prefix_ids": [[5]] * 3},
            "target_prefix_ids",
            "has 3 entries, but there are 2 inputs",
        ),
        ({"inputs": "a", "target_prefix_ids": [[5], [31]]}, "target_prefix_ids[1][0]", "got 31"),
        ({"inputs": "a", "target_prefix_ids": [[], [5] * 48]}, "target_prefix_ids[1]", "49 tokens"),
        ({"inputs": "a", "target_prefix": ["", "K " * 48]}, "target_prefix[1]", "49 tokens"),
        ({"inputs": "a", "target_prefix": ["K"] * 1025}, "target_prefix", "at most 1024"),
        ({"inputs": "a", "top_k": 0}, "top_k", "must be at least 1"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_bad_prefixes_are_refused_by_name(
    api: Api, body: dict[str, Any], param: str, message: str
) -> None:
    envelope = await api.refused("/next", **body)
    assert message in envelope["error"]
    assert envelope["param"] == param


# --- /tokenize, /detokenize ----------------------------------------------------------------------


async def test_tokenize_shows_what_generate_feeds_the_model(api: Api) -> None:
    answer = await api.post("/tokenize", inputs="Cab€")
    assert answer["tokens"] == ["c", "a", "b", "<unk>", "</s>"]
    from_ids = await api.post("/generate", input_ids=answer["ids"])
    assert from_ids == await api.post("/generate", inputs="Cab€")


async def test_tokenize_and_detokenize_are_inverse_on_the_target_side(api: Api) -> None:
    texts = ["HH AH L OW", "F"]
    tokenized = await api.post("/tokenize", inputs=texts, side="target")
    ids = [t["ids"] for t in tokenized]
    assert await api.post("/detokenize", input_ids=ids) == [{"text": text} for text in texts]
    assert await api.post("/detokenize", input_ids=ids[0]) == {"text": texts[0]}


async def test_detokenize_can_read_the_source_side(api: Api) -> None:
    ids = (await api.post("/tokenize", inputs="fox"))["ids"]
    assert await api.post("/detokenize", input_ids=ids, side="source") == {"text": "fox"}


async def test_detokenize_refuses_foreign_ids(api: Api) -> None:
    envelope = await api.refused("/detokenize", input_ids=[[5], [5, 31]])
    assert envelope["param"] == "input_ids[1][1]"
    await api.refused("/detokenize", input_ids=[])
    await api.refused("/tokenize", inputs=[])
    assert await api.post("/detokenize", input_ids=[[]]) == [{"text": ""}]
