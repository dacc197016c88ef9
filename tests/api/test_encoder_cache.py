"""Sources that come again are not encoded again, and nobody sees it in an answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from model.loader import LoadedModel, load_model
from model.transformer import Transformer
from service.app import create_app
from service.settings import Settings
from tests.builders import make_native_model

from .conftest import Api, serving

pytestmark = pytest.mark.anyio

OF_A_TOKEN = 32 * 4
"""Bytes: the tiny model's width in float32."""


@contextmanager
def counting(model: LoadedModel) -> Iterator[list[int]]:
    """Sources in each run of the encoder."""
    network = model.network
    assert isinstance(network, Transformer)
    runs: list[int] = []
    hook = network.encoder.register_forward_hook(lambda _, args, __: runs.append(len(args[0])))
    try:
        yield runs
    finally:
        hook.remove()


async def figures(client: httpx.AsyncClient, model: int = 0) -> dict[str, int]:
    info = (await client.get("/info")).json()
    cache: dict[str, int] = info["models"][model]["encoder_cache"]
    return cache


async def test_a_source_that_comes_again_is_not_encoded_again(native: LoadedModel) -> None:
    async with serving(create_app(Settings(), {"m": native})) as client:
        api = Api(client)
        with counting(native) as runs:
            first = await api.post("/generate", inputs="hello", parameters={"details": True})
            assert runs == [1]
            assert await figures(client) == {
                "hits": 0,
                "misses": 1,
                "bytes": 6 * OF_A_TOKEN,
                "max_bytes": 64 * 2**20,
            }
            again = await api.post("/generate", inputs="hello", parameters={"details": True})
            prefix = {"target_prefix": "HH AH"}
            await api.post("/generate", inputs="hello", parameters=prefix)
            await api.post("/generate", inputs="hello", parameters={"num_beams": 3})
            await api.post("/next", inputs="hello", target_prefix=["HH", "HH AH", "W"])
            await api.post("/logits", inputs="hello", targets=["HH", "W"])
            await api.post("/score", inputs="hello", targets="HH")
            assert runs == [1]
        assert (await figures(client))["hits"] == 6
        assert (await figures(client))["misses"] == 1
        assert again == first


async def test_of_a_list_only_new_sources_are_encoded(native: LoadedModel) -> None:
    async with serving(create_app(Settings(), {"m": native})) as client:
        api = Api(client)
        await api.post("/score", inputs=["hello", "fox"], targets=["HH", "F"])
        with counting(native) as runs:
            await api.post("/score", inputs=["fox", "jumps", "fox"], targets=["F", "CH", "W"])
        assert sum(runs) == 1
        found = await figures(client)
        assert (found["hits"], found["misses"]) == (1, 3)


async def test_zero_turns_it_off(native: LoadedModel) -> None:
    off = Settings(max_encoder_cache_bytes=0)
    async with serving(create_app(off, {"m": native})) as client:
        api = Api(client)
        with counting(native) as runs:
            for _ in range(3):
                await api.post("/generate", inputs="hello")
        assert runs == [1, 1, 1]
        assert await figures(client) == {"hits": 0, "misses": 0, "bytes": 0, "max_bytes": 0}


async def test_the_least_recently_used_source_makes_room(native: LoadedModel) -> None:
    room = Settings(max_encoder_cache_bytes=10 * OF_A_TOKEN)
    async with serving(create_app(room, {"m": native})) as client:
        api = Api(client)

        async def encoded(word: str) -> bool:
            with counting(native) as runs:
                await api.post("/score", inputs=word, targets="HH")
            assert (await figures(client))["bytes"] <= 10 * OF_A_TOKEN
            return bool(runs)

        assert await encoded("fox")  # 4 tokens
        assert await encoded("dog")  # 8
        assert not await encoded("fox")
        assert await encoded("cat")  # dog leaves
        assert not await encoded("fox")
        assert await encoded("dog")
        assert await encoded("transformer")  # too large to be kept
        assert await encoded("transformer")
        assert not await encoded("dog")


async def test_answers_are_the_same_with_and_without(native: LoadedModel) -> None:
    words = ["hello", "fox", "a", "jumps", "transformer", "hello", "quick", "fox"]
    targets = ["HH AH", "F", "W K", "", "T R AE N S", "W", "K W", "F AA K S"]
    parameters = [{"details": True, "num_beams": 1 + i % 3} for i in range(len(words))]
    answers: list[list[Any]] = []
    for size in (0, 2**20):
        settings = Settings(max_encoder_cache_bytes=size)
        async with serving(create_app(settings, {"m": native})) as client:
            api = Api(client)
            for _ in range(2):  # the second time, all are known
                generated = await api.post("/generate", inputs=words, parameters=parameters)
                logits = await api.post("/logits", inputs=words, targets=targets, positions="all")
                answers.append([generated, logits])
            alone = [
                await api.post("/logits", inputs=word, targets=target, positions="all")
                for word, target in zip(words, targets, strict=True)
            ]
            answers.append([generated, alone])
    expected, *others = answers
    for generated, logits in others:
        texts = [answer["generated_text"] for answer in generated]
        assert texts == [answer["generated_text"] for answer in expected[0]]
        for found, own in zip(logits, expected[1], strict=True):
            np.testing.assert_allclose(found["logits"], own["logits"], atol=1e-4, rtol=1e-5)


async def test_models_do_not_share_sources(native: LoadedModel, tmp_path: Path) -> None:
    other = load_model(make_native_model(tmp_path, seed=3), "cpu")
    async with serving(create_app(Settings(), {"a": native, "b": other})) as client:
        api = Api(client)
        one = await api.post("/next", model="a", inputs="hello")
        with counting(other) as runs:
            two = await api.post("/next", model="b", inputs="hello")
        assert runs == [1]
        assert one != two
        assert (await figures(client, 1))["hits"] == 0
        assert await api.post("/next", model="a", inputs="hello") == one
        assert await api.post("/next", model="b", inputs="hello") == two


async def test_a_source_that_grows_with_its_target_has_no_cache(tutorial: LoadedModel) -> None:
    async with serving(create_app(Settings(), {"m": tutorial})) as client:
        api = Api(client)
        body = {"input_ids": [5, 9], "parameters": {"max_new_tokens": 3, "details": True}}
        assert await api.post("/generate", **body) == await api.post("/generate", **body)
        assert (await client.get("/info")).json()["models"][0]["encoder_cache"] is None
