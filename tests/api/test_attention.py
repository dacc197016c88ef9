"""POST /attention, against the formula written out in numpy over the tensors of the checkpoint."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load, load_file

from model.loader import LoadedModel
from service.app import create_app
from service.settings import Settings
from tests.builders import TINY

from .conftest import Api, serving

pytestmark = pytest.mark.anyio

Array = np.ndarray
MAPS = ("encoder", "decoder", "cross")


class Spelled:
    """The native model's forward pass in float64, one source and target at a time."""

    def __init__(self, model: LoadedModel) -> None:
        tensors = load_file(model.directory / "model.safetensors")
        self.tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def maps(self, src: list[int], tgt: list[int]) -> dict[str, Array]:
        """Attention weights ``[layers, heads, query, key]``."""
        maps: dict[str, list[Array]] = {name: [] for name in MAPS}
        x = self.embed("encoder", src)
        for layer in (f"encoder.layers.{i}" for i in range(TINY["encoder_layers"])):
            h = self.norm(f"{layer}.residuals.0.norm", x)
            x = x + self.attend(f"{layer}.attention", h, h, maps["encoder"])
            x = x + self.feed_forward(layer, self.norm(f"{layer}.residuals.1.norm", x))
        memory = self.norm("encoder.norm", x)
        x = self.embed("decoder", tgt)
        for layer in (f"decoder.layers.{i}" for i in range(TINY["decoder_layers"])):
            h = self.norm(f"{layer}.residuals.0.norm", x)
            x = x + self.attend(f"{layer}.self_attention", h, h, maps["decoder"], causal=True)
            h = self.norm(f"{layer}.residuals.1.norm", x)
            x = x + self.attend(f"{layer}.cross_attention", h, memory, maps["cross"])
            x = x + self.feed_forward(layer, self.norm(f"{layer}.residuals.2.norm", x))
        return {name: np.stack(layers) for name, layers in maps.items()}

    def attend(
        self, name: str, x: Array, context: Array, maps: list[Array], causal: bool = False
    ) -> Array:
        query, key, value = (
            self.linear(f"{name}.{part}", of)
            for part, of in (("query", x), ("key", context), ("value", context))
        )
        width = TINY["dim"] // TINY["heads"]
        heads, merged = [], []
        for head in range(TINY["heads"]):
            own = slice(head * width, (head + 1) * width)
            scores = query[:, own] @ key[:, own].T / math.sqrt(width)
            for q in range(len(scores)) if causal else ():
                scores[q, q + 1 :] = -np.inf
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            heads.append(weights)
            merged.append(weights @ value[:, own])
        maps.append(np.stack(heads))
        return self.linear(f"{name}.output", np.concatenate(merged, axis=1))

    def feed_forward(self, layer: str, x: Array) -> Array:
        hidden = np.maximum(self.linear(f"{layer}.feed_forward.expand", x), 0)
        return self.linear(f"{layer}.feed_forward.contract", hidden)

    def embed(self, side: str, ids: list[int]) -> Array:
        dim = TINY["dim"]
        table = self.tensors[f"{side}.embedding.tokens.weight"]
        positions = [
            [
                (math.cos if d % 2 else math.sin)(p / 10000 ** ((d - d % 2) / dim))
                for d in range(dim)
            ]
            for p in range(len(ids))
        ]
        return table[ids] * math.sqrt(dim) + np.array(positions).reshape(len(ids), dim)

    def linear(self, name: str, x: Array) -> Array:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]

    def norm(self, name: str, x: Array) -> Array:
        centred = x - x.mean(1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
        return scaled * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]


@pytest.fixture(scope="module")
def spelled(native: LoadedModel) -> Spelled:
    return Spelled(native)


def check(answer: Any, expected: dict[str, Array], atol: float = 1e-5) -> None:
    for name in MAPS:
        np.testing.assert_allclose(np.array(answer[name]), expected[name], atol=atol)


async def test_weights_are_the_formula_s(api: Api, spelled: Spelled) -> None:
    answer = await api.post("/attention", inputs="hello", targets="HH AH L")
    assert answer["source_tokens"] == ["h", "e", "l", "l", "o", "</s>"]
    assert answer["target_tokens"] == ["<s>", "HH", "AH", "L"]
    assert len(answer["source_ids"]) == 6
    assert answer["target_ids"][0] == 1
    expected = spelled.maps(answer["source_ids"], answer["target_ids"])
    assert expected["encoder"].shape == (2, 4, 6, 6)
    assert expected["cross"].shape == (2, 4, 4, 6)
    check(answer, expected)
    peaks = expected["cross"].argmax(-1)
    assert len(np.unique(peaks)) > 2  # not all the same: a wrong head would show


async def test_rows_sum_to_one_and_nobody_looks_ahead(api: Api) -> None:
    answer = await api.post("/attention", inputs="jumps", targets="CH UW M P S")
    for name in MAPS:
        np.testing.assert_allclose(np.array(answer[name]).sum(-1), 1, atol=1e-5)
    decoder = np.array(answer["decoder"])
    assert not decoder[..., ~np.tri(6, dtype=bool)].any()
    assert (decoder[..., 0, 0] == 1).all()


async def test_unlike_lengths_together_equal_each_alone(api: Api, spelled: Spelled) -> None:
    inputs = ["hello", "a", "hello", "transformer"]
    targets = ["HH", "AH K L M N", "", "T R AE"]
    answers = await api.post("/attention", inputs=inputs, targets=targets)
    for answer, word, target in zip(answers, inputs, targets, strict=True):
        assert len(answer["source_ids"]) == len(word) + 1
        check(answer, spelled.maps(answer["source_ids"], answer["target_ids"]))
        alone = await api.post("/attention", inputs=word, targets=target)
        assert answer["target_tokens"] == alone["target_tokens"]
        check(answer, {name: np.array(alone[name]) for name in MAPS})


async def test_several_targets_of_one_input_get_a_list(api: Api, spelled: Spelled) -> None:
    targets = ["HH AH L OW", "W", ""]
    answers = await api.post("/attention", inputs="hello", targets=targets)
    assert [len(a["target_ids"]) for a in answers] == [5, 2, 1]
    for answer in answers:
        check(answer, spelled.maps(answer["source_ids"], answer["target_ids"]))
    assert len(await api.post("/attention", inputs=["hello"])) == 1


async def test_without_targets_it_is_the_first_step(api: Api) -> None:
    answer = await api.post("/attention", inputs="hello")
    assert answer["target_tokens"] == ["<s>"]
    assert np.array(answer["cross"]).shape == (2, 4, 1, 6)


async def test_ids_are_taken_as_given(api: Api, spelled: Spelled) -> None:
    answer = await api.post("/attention", input_ids=[9, 3], target_ids=[13, 2])
    assert answer["source_ids"] == [9, 3]
    assert answer["source_tokens"][1] == "<unk>"
    assert answer["target_tokens"] == ["<s>", "HH", "</s>"]
    check(answer, spelled.maps([9, 3], [1, 13, 2]))


async def test_halves_have_the_fewest_digits_that_read_back(client: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"inputs": "fox", "targets": "F AA K"}
    whole = (await client.post("/attention", json=body)).json()
    response = await client.post("/attention", json={**body, "dtype": "float16"})
    for name in MAPS:
        rounded = np.array(whole[name], dtype=np.float32).astype(np.float16)
        half = np.array(response.json()[name])
        assert np.array_equal(half.astype(np.float16), rounded)
        assert [str(v) for v in half.ravel() if v] == [
            str(float(str(v))) for v in rounded.ravel() if v
        ]
    numbers = response.text.split('"cross":')[1].strip("[]}").replace("[", "").replace("]", "")
    digits = [n.lstrip("0.").split("e")[0].replace(".", "") for n in numbers.split(",")]
    assert max(map(len, digits)) <= 5


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("asked", ["field", "header"])
async def test_safetensors_hold_padded_tensors(
    client: httpx.AsyncClient, dtype: str, asked: str
) -> None:
    body: dict[str, Any] = {"inputs": ["hello", "a"], "targets": ["HH", "AH L M"], "dtype": dtype}
    plain = (await client.post("/attention", json=body)).json()
    headers = {"accept": "application/octet-stream"} if asked == "header" else {}
    if asked == "field":
        body["format"] = "safetensors"
    response = await client.post("/attention", json=body, headers=headers)
    assert response.headers["content-type"] == "application/octet-stream"
    tensors = load(response.content)
    assert tensors["encoder"].shape == (2, 2, 4, 6, 6)
    assert tensors["decoder"].shape == (2, 2, 4, 4, 4)
    assert tensors["cross"].shape == (2, 2, 4, 4, 6)
    assert tensors["source_lengths"].tolist() == [6, 2]
    assert tensors["target_lengths"].tolist() == [2, 4]
    assert tensors["source_ids"][1].tolist() == [*plain[1]["source_ids"], 0, 0, 0, 0]
    assert tensors["target_ids"][0].tolist() == [*plain[0]["target_ids"], 0, 0]
    for i, answer in enumerate(plain):
        src, tgt = len(answer["source_ids"]), len(answer["target_ids"])
        for name, queries, keys in (
            ("encoder", src, src),
            ("decoder", tgt, tgt),
            ("cross", tgt, src),
        ):
            found = tensors[name][i]
            assert found.dtype == np.dtype(dtype)
            own = found[:, :, :queries, :keys]
            assert np.array_equal(own, np.array(answer[name], dtype=dtype))
            assert np.count_nonzero(found) == np.count_nonzero(own)  # padding is 0
    size = int.from_bytes(response.content[:8], "little")
    names = json.loads(response.content[8 : 8 + size])["__metadata__"]
    assert json.loads(names["source_tokens"]) == [a["source_tokens"] for a in plain]
    assert json.loads(names["target_tokens"]) == [a["target_tokens"] for a in plain]


async def test_answers_of_too_many_numbers_are_refused_with_advice(native: LoadedModel) -> None:
    settings = Settings(max_json_values=600, max_tensor_values=1000)
    async with serving(create_app(settings, {"m": native})) as client:
        api = Api(client)
        body: dict[str, Any] = {"input_ids": [5] * 6, "target_ids": [5] * 3}
        # 8 heads a kind: 8 * (6 * 6 + 4 * 4 + 4 * 6) = 608
        envelope = await api.refused("/attention", **body)
        assert "608 numbers, at most 600 are allowed (max_json_values)" in envelope["error"]
        assert "safetensors" in envelope["error"]
        fits = await client.post("/attention", json={**body, "format": "safetensors"})
        assert fits.status_code == 200
        body = {"input_ids": [[5] * 6, [5]], "target_ids": [[5] * 3, [5]]}
        envelope = await api.refused("/attention", **body, format="safetensors")
        assert "1216 numbers, at most 1000 are allowed (max_tensor_values)" in envelope["error"]
        assert "shorter" in envelope["error"]
        await api.post("/attention", input_ids=[5] * 6, target_ids=[5] * 2)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"targets": "HH"}, "inputs", "must be given"),
        ({"inputs": "a", "targets": "x", "target_ids": [5]}, "targets", "exclude each other"),
        ({"inputs": ["a", "b"], "targets": ["x"]}, "targets", "1 targets, 2 inputs"),
        ({"inputs": "a", "targets": []}, "targets", "at least one element"),
        ({"inputs": "a", "target_ids": [5, 99]}, "target_ids[1]", "must be an id in [0, 31)"),
        ({"inputs": "a", "target_ids": [[5], [99]]}, "target_ids[1][0]", "got 99"),
        ({"inputs": "a", "target_ids": [5] * 48}, "target_ids", "49 tokens"),
        ({"inputs": "a", "target_ids": [[5] * 48]}, "target_ids[0]", "49 tokens"),
        ({"inputs": "b" * 60}, "inputs", "61 tokens, the model takes at most 48"),
        ({"input_ids": [[5], []]}, "input_ids[1]", "at least one token"),
        ({"inputs": "a", "dtype": "bfloat16"}, "dtype", '"float32" or "float16"'),
        ({"inputs": "a", "format": "xml"}, "format", '"json" or "safetensors" or null'),
        ({"inputs": "a", "layers": [0]}, "layers", "not a known field"),
        ({"inputs": ["a"] * 1025}, "inputs", "at most 1024"),
    ],
    ids=str,
)
async def test_bad_bodies_are_refused_by_name(
    api: Api, body: dict[str, Any], param: str, message: str
) -> None:
    envelope = await api.refused("/attention", **body)
    assert message in envelope["error"]
    assert envelope["param"] == param


# --- a model without a tokenizer -----------------------------------------------------------------


async def test_without_a_tokenizer_there_are_ids_and_no_names(api: Api) -> None:
    answer = await api.post("/attention", model="tutorial", input_ids=[5, 9, 7])
    assert answer["source_tokens"] is None
    assert answer["target_tokens"] is None
    assert answer["source_ids"] == answer["target_ids"] == [5, 9, 7]
    assert np.array(answer["encoder"]).shape == (2, 4, 3, 3)
    other = await api.post("/attention", model="tutorial", input_ids=[5, 9], target_ids=[[1], [2]])
    assert [a["target_ids"] for a in other] == [[1], [2]]
    envelope = await api.refused("/attention", model="tutorial", inputs="x")
    assert "tokenizer" in envelope["error"]
