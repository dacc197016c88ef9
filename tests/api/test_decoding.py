"""Decoding parameters through POST /generate."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from service.vocabulary import Vocabulary

from .conftest import Api

pytestmark = pytest.mark.anyio

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def ids(answer: dict[str, Any]) -> list[int]:
    return [token["id"] for token in answer["details"]["tokens"]]


async def test_a_beam_search_returns_its_best_first(api: Api) -> None:
    parameters = {"num_beams": 5, "num_return_sequences": 3, "details": True}
    answer = await api.post("/generate", inputs="hello", parameters=parameters)
    scores = [sequence["score"] for sequence in answer["sequences"]]
    assert scores == sorted(scores, reverse=True)
    assert len({sequence["generated_text"] for sequence in answer["sequences"]}) == 3
    best = answer["sequences"][0]
    assert (answer["generated_text"], answer["details"]) == (
        best["generated_text"],
        best["details"],
    )
    for sequence in answer["sequences"]:
        details = sequence["details"]
        logprobs = [token["logprob"] for token in details["tokens"]]
        assert details["score"] == sequence["score"]
        assert sum(logprobs) / len(logprobs) == pytest.approx(sequence["score"], abs=1e-4)


async def test_one_sequence_is_not_a_list(api: Api) -> None:
    answer = await api.post("/generate", inputs="hello", parameters={"num_beams": 2})
    assert answer.keys() == {"generated_text"}


async def test_draws_differ_and_their_seed_draws_them_again(api: Api) -> None:
    parameters = {"do_sample": True, "num_return_sequences": 4, "details": True}
    answer = await api.post("/generate", inputs="hello", parameters=parameters)
    drawn = [ids(sequence) for sequence in answer["sequences"]]
    assert len(set(map(tuple, drawn))) > 1
    [seed] = {sequence["details"]["seed"] for sequence in answer["sequences"]}
    again = await api.post("/generate", inputs="hello", parameters={**parameters, "seed": seed})
    assert [ids(sequence) for sequence in again["sequences"]] == drawn
    first = {"seed": seed, "details": True}
    assert ids(await api.post("/generate", inputs="hello", parameters=first)) == drawn[0]


async def test_empty_inputs_have_as_many_empty_answers(api: Api) -> None:
    answer = await api.post(
        "/generate", inputs="", parameters={"num_beams": 2, "num_return_sequences": 2}
    )
    assert [s["generated_text"] for s in answer["sequences"]] == ["", ""]


async def test_constraints_hold(api: Api) -> None:
    plain = await api.post("/generate", inputs="hello", parameters={"details": True})
    first, second = ids(plain)[:2]
    word = plain["generated_text"].split(" ")[0]

    async def with_parameters(**parameters: Any) -> list[int]:
        parameters["details"] = True
        return ids(await api.post("/generate", inputs="hello", parameters=parameters))

    assert first not in await with_parameters(bad_words=[word])
    assert (await with_parameters(bad_words=[[first, second]]))[0] == first
    assert (await with_parameters(bad_words=[[first, second]]))[1] != second
    assert (await with_parameters(logit_bias={str(first): -100}))[0] != first
    assert (await with_parameters(logit_bias={"9": 100}, max_new_tokens=3)) == [9, 9, 9]
    assert (await with_parameters(forced_bos_token_id=9))[0] == 9
    forced = await with_parameters(forced_eos_token_id=9, max_new_tokens=5, min_new_tokens=5)
    assert (len(forced), forced[-1]) == (5, 9)
    unrepeated = await with_parameters(no_repeat_ngram_size=1, max_new_tokens=20)
    assert len(set(unrepeated)) == len(unrepeated)


@pytest.mark.one_process
async def test_inputs_that_share_parameters_have_them_read_once(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A thousand bad words for a thousand inputs would hold the event loop up for many seconds.
    calls = []
    encode = Vocabulary.encode_bare

    def counted(self: Vocabulary, texts: Sequence[str], param: str) -> list[list[int]]:
        calls.append(len(texts))
        return encode(self, texts, param)

    monkeypatch.setattr(Vocabulary, "encode_bare", counted)
    parameters = {"bad_words": ["S", [5], "Z L"], "max_new_tokens": 2}
    answers = await api.post("/generate", inputs=["a", "b", "c"], parameters=parameters)
    assert calls == [2]
    own = await api.post("/generate", inputs=["a", "b", "c"], parameters=[parameters] * 3)
    assert (own, calls) == (answers, [2] * 4)


async def test_more_draws_than_the_queue_ever_takes_are_refused(api: Api) -> None:
    parameters = {"seed": 1, "num_return_sequences": 64}
    refused = await api.refused("/generate", inputs=["a"] * 65, parameters=parameters)
    assert "come to 4160 draws, at most 4096 are allowed (max_queue)" in refused["error"]


async def test_a_vocabulary_banned_whole_is_an_error_of_that_request_alone(api: Api) -> None:
    everything = [[id] for id in range(31) if id != 2]
    banned = {"bad_words": everything, "min_new_tokens": 1}
    failed, fine = await asyncio.gather(
        api.refused("/generate", status=500, inputs="hello", parameters=banned),
        api.post("/generate", inputs="hello"),
    )
    assert failed["error_type"] == "generation"
    assert "ban every token" in failed["error"]
    assert fine["generated_text"]


def random_request(rng: random.Random) -> dict[str, Any]:
    """An input and parameters of every kind."""
    word = "".join(rng.choices(LETTERS, k=rng.randint(1, 20)))
    parameters: dict[str, Any] = {"max_new_tokens": rng.randint(1, 24), "details": True}
    kind = rng.choice(["greedy", "sample", "beams"])
    if kind == "sample":
        parameters |= {"seed": rng.randrange(10**9), "temperature": rng.uniform(0.5, 2)}
        parameters |= rng.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}])
    if kind == "beams":
        parameters |= {"num_beams": rng.randint(2, 6), "length_penalty": rng.uniform(-1, 2)}
        parameters |= {"early_stopping": rng.choice([True, False, "never"])}
    for name, value in (
        ("repetition_penalty", 1.4),
        ("no_repeat_ngram_size", 2),
        ("frequency_penalty", 0.7),
        ("bad_words", [[5], [6, 7]]),
        ("logit_bias", {"8": 2.0}),
        ("min_new_tokens", 1),
        ("target_prefix_ids", [4, 9, 4]),
        ("stop", ["H A"]),
        ("forced_bos_token_id", 10),
    ):
        if rng.random() < 0.15:
            parameters[name] = value
    return {"inputs": word, "parameters": parameters}


async def test_200_mixed_requests_get_the_same_tokens_together_and_one_at_a_time(api: Api) -> None:
    rng = random.Random(0)
    requests = [random_request(rng) for _ in range(200)]
    alone = [await api.post("/generate", **request) for request in requests]
    together = await asyncio.gather(*(api.post("/generate", **request) for request in requests))
    assert [ids(answer) for answer in together] == [ids(answer) for answer in alone]
    assert len({tuple(ids(answer)) for answer in alone}) > 150, "outputs must vary"
