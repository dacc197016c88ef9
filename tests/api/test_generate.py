"""POST /generate."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx
import pytest

from model.config import EngineConfig
from model.engine import Engine
from model.loader import LoadedModel
from model.sequence import Decoding, Sequence
from seqserve.schemas import GenerateResponse

from .conftest import Api

pytestmark = pytest.mark.anyio

WORDS = ["hello", "world", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "a"]


def greedy(model: LoadedModel, text: str, max_new_tokens: int) -> list[int]:
    """Tokens straight from an engine."""
    assert model.source_tokenizer
    [src] = model.source_tokenizer.encode([text])
    sequence = Sequence(src, list(model.spec.decoder_start_ids), Decoding(max_new_tokens))
    engine = Engine(model, EngineConfig())
    engine.submit(sequence)
    list(engine.run())
    return sequence.tokens


def ids(answer: dict[str, Any]) -> list[int]:
    """Tokens of an answer with details."""
    return [token["id"] for token in answer["details"]["tokens"]]


# --- shapes --------------------------------------------------------------------------------------


async def test_a_text_gets_an_object_with_the_engine_s_own_answer(
    api: Api, native: LoadedModel
) -> None:
    assert native.target_tokenizer
    expected = native.target_tokenizer.decode(greedy(native, "hello", 12))
    answer = await api.post("/generate", inputs="hello", parameters={"max_new_tokens": 12})
    assert answer == {"generated_text": expected}
    assert expected


async def test_a_list_gets_the_same_answers_in_order(api: Api) -> None:
    alone = [await api.post("/generate", inputs=word) for word in WORDS]
    assert await api.post("/generate", inputs=WORDS) == alone
    assert len({answer["generated_text"] for answer in alone}) > len(WORDS) // 2


async def test_a_list_of_one_gets_a_list_of_one(api: Api) -> None:
    assert await api.post("/generate", inputs=["hello"]) == [
        await api.post("/generate", inputs="hello")
    ]


async def test_ids_are_taken_as_given(api: Api, native: LoadedModel) -> None:
    assert native.source_tokenizer
    ids = native.source_tokenizer.encode(["hello", "fox"])
    texts = await api.post("/generate", inputs=["hello", "fox"])
    assert await api.post("/generate", input_ids=ids) == texts
    assert await api.post("/generate", input_ids=ids[0]) == texts[0]
    without_end = await api.post(
        "/generate", input_ids=ids[0][:-1], parameters={"details": True, "max_new_tokens": 1}
    )
    assert without_end["details"]["input_tokens"] == 5


@pytest.mark.parametrize("body", [{"inputs": ""}, {"inputs": ["", "fox"]}, {"input_ids": [[]]}])
async def test_an_empty_source_has_an_empty_answer(api: Api, body: dict[str, Any]) -> None:
    answer = await api.post("/generate", **body, parameters={"details": True})
    first = answer[0] if isinstance(answer, list) else answer
    assert first["generated_text"] == ""
    assert first["details"]["tokens"] == []
    assert first["details"]["finish_reason"] == "eos_token"


@pytest.mark.one_process  # /info has the figures of the replica that is asked
async def test_an_empty_source_does_not_run_the_model(api: Api) -> None:
    before = (await api.client.get("/info")).json()["models"][0]["batches"]["steps"]
    await api.post("/generate", inputs=["", ""])
    assert (await api.client.get("/info")).json()["models"][0]["batches"]["steps"] == before


async def test_concurrent_requests_keep_their_answers(api: Api) -> None:
    alone = [await api.post("/generate", inputs=word) for word in WORDS]
    together = await asyncio.gather(*(api.post("/generate", inputs=word) for word in WORDS))
    assert list(together) == alone


@pytest.mark.one_process  # likewise
async def test_concurrent_requests_share_steps(api: Api) -> None:
    async def batches() -> dict[str, Any]:
        found: dict[str, Any] = (await api.client.get("/info")).json()["models"][0]["batches"]
        return found

    def shared(figures: dict[str, Any]) -> int:
        return sum(steps for rows, steps in figures["histogram"].items() if rows != "1")

    before = await batches()
    await asyncio.gather(*(api.post("/generate", inputs=word) for word in WORDS))
    after = await batches()
    assert shared(after) > shared(before)
    assert sum(after["histogram"].values()) == after["steps"]


# --- details -------------------------------------------------------------------------------------


async def test_details_say_how_the_answer_came_about(api: Api) -> None:
    answer = await api.post("/generate", inputs="hello", parameters={"details": True})
    details = GenerateResponse.model_validate(answer).details
    assert details
    assert details.input_tokens == 6
    assert details.unknown_tokens == 0
    assert not details.truncated
    assert details.generated_tokens == len(details.tokens)
    assert details.seed is None
    assert details.score is None
    assert details.prefill == []
    assert details.top_tokens is None
    assert "top_tokens" not in answer["details"]
    assert all(t.logprob is not None and math.isfinite(t.logprob) for t in details.tokens)
    assert (details.finish_reason == "eos_token") == (details.tokens[-1].text == "</s>")


async def test_token_texts_concatenate_to_the_generated_text(api: Api) -> None:
    for answer in await api.post("/generate", inputs=WORDS, parameters={"details": True}):
        tokens = answer["details"]["tokens"]
        text = "".join(token["text"] for token in tokens if not token["special"])
        assert text == answer["generated_text"]


async def test_top_tokens_begin_with_the_greedy_choice(api: Api) -> None:
    answer = await api.post("/generate", inputs="hello", parameters={"top_n_tokens": 3})
    details = answer["details"]
    for token, top in zip(details["tokens"], details["top_tokens"], strict=True):
        assert top[0]["id"] == token["id"]
        assert top[0]["logprob"] == token["logprob"]
        assert len(top) == 3
        assert sorted(top, key=lambda t: -t["logprob"]) == top


async def test_more_top_tokens_than_the_vocabulary_has_are_all_of_it(
    api: Api, native: LoadedModel
) -> None:
    parameters = {"top_n_tokens": 100, "max_new_tokens": 1}
    answer = await api.post("/generate", inputs="hello", parameters=parameters)
    assert len(answer["details"]["top_tokens"][0]) == native.spec.tgt_vocab_size


async def test_the_steps_of_a_beam_search_hold_all_its_hypotheses(api: Api) -> None:
    parameters = {"num_beams": 3, "num_return_sequences": 3, "beam_steps": True}
    answer = await api.post("/generate", inputs="hello", parameters=parameters)
    live: list[list[dict[str, Any]]] = [[]]
    ended: dict[tuple[int, ...], float] = {}
    for step in answer["details"]["beam_steps"]:
        paths = [[*live[beam["parent"]], beam] for beam in step]
        assert len(live) <= 3
        live = [path for path in paths if not path[-1]["finished"]]
        scores = [path[-1]["score"] for path in live]
        assert scores == sorted(scores, reverse=True)
        for path in paths:
            logprobs = [beam["token"]["logprob"] for beam in path]
            assert path[-1]["score"] == pytest.approx(sum(logprobs) / len(path), abs=1e-5)
            if path[-1]["finished"]:
                ended[tuple(beam["token"]["id"] for beam in path)] = path[-1]["score"]
    assert len(ended) > 3, "more than are returned"
    best = sorted(ended, key=lambda tokens: -ended[tokens])[:3]
    returned = [tuple(ids(sequence)) for sequence in answer["sequences"]]
    assert returned == best
    assert [ended[tokens] for tokens in best] == [s["score"] for s in answer["sequences"]]


async def test_unknown_characters_are_counted(api: Api) -> None:
    answer = await api.post("/generate", inputs="h€llo★", parameters={"details": True})
    assert answer["details"]["unknown_tokens"] == 2


async def test_control_characters_are_text(api: Api) -> None:
    answer = await api.post("/generate", inputs="a\u0000\u001bb", parameters={"details": True})
    assert answer["details"]["input_tokens"] == 5


# --- lengths -------------------------------------------------------------------------------------


async def test_max_new_tokens_bounds_the_answer(api: Api) -> None:
    parameters = {"max_new_tokens": 2, "details": True}
    answer = await api.post("/generate", inputs="hello", parameters=parameters)
    assert answer["details"]["generated_tokens"] == 2
    assert answer["details"]["finish_reason"] == "length"


async def test_no_new_tokens_is_an_empty_answer(api: Api) -> None:
    parameters = {"max_new_tokens": 0, "details": True}
    answer = await api.post("/generate", inputs="hello", parameters=parameters)
    assert answer["generated_text"] == ""
    assert answer["details"]["finish_reason"] == "length"


async def test_more_new_tokens_than_fit_are_refused_with_both_numbers(api: Api) -> None:
    envelope = await api.refused("/generate", inputs="a", parameters={"max_new_tokens": 49})
    assert "must be at most 48" in envelope["error"]
    assert "got 49" in envelope["error"]
    assert envelope["param"] == "parameters.max_new_tokens"
    await api.post("/generate", inputs="a", parameters={"max_new_tokens": 48})


async def test_the_default_length_gives_way_to_a_prefix(api: Api) -> None:
    prefix = [6] * 47
    answer = await api.post(
        "/generate", inputs="a", parameters={"target_prefix_ids": prefix, "details": True}
    )
    assert answer["details"]["generated_tokens"] <= 1
    envelope = await api.refused(
        "/generate", inputs="a", parameters={"target_prefix_ids": [6] * 48}
    )
    assert "49 tokens" in envelope["error"]
    assert "48" in envelope["error"]


async def test_a_source_too_long_is_refused_with_both_counts(api: Api) -> None:
    envelope = await api.refused("/generate", inputs=["a", "b" * 60])
    assert envelope["param"] == "inputs[1]"
    assert "61 tokens" in envelope["error"]
    assert "at most 48" in envelope["error"]


async def test_truncate_cuts_and_keeps_the_end_token(api: Api) -> None:
    cut = await api.post(
        "/generate", inputs="hello" * 20, parameters={"truncate": 6, "details": True}
    )
    whole = await api.post("/generate", inputs="hello", parameters={"details": True})
    assert cut["details"]["truncated"]
    assert cut["details"]["input_tokens"] == 6
    assert ids(cut) == ids(whole)


async def test_truncating_what_is_short_enough_changes_nothing(api: Api) -> None:
    answer = await api.post(
        "/generate", inputs="hello", parameters={"truncate": 6, "details": True}
    )
    assert not answer["details"]["truncated"]


# --- sampling ------------------------------------------------------------------------------------


async def test_a_seed_draws_the_same_tokens_wherever_it_stands(api: Api) -> None:
    parameters = {"temperature": 1.5, "seed": 7, "details": True}
    alone = await api.post("/generate", inputs="hello", parameters=parameters)
    assert alone["details"]["seed"] == 7
    mixed = await api.post("/generate", inputs=["fox", "hello", "hello"], parameters=parameters)
    assert ids(mixed[1]) == ids(mixed[2]) == ids(alone)
    other = await api.post("/generate", inputs="hello", parameters={**parameters, "seed": 8})
    assert ids(other) != ids(alone)


async def test_a_seed_that_was_drawn_is_returned_and_repeats_the_answer(api: Api) -> None:
    first = await api.post(
        "/generate", inputs="hello", parameters={"temperature": 1.5, "details": True}
    )
    seed = first["details"]["seed"]
    assert 0 <= seed < 2**53
    again = await api.post(
        "/generate",
        inputs="hello",
        parameters={"temperature": 1.5, "details": True, "seed": seed},
    )
    assert ids(again) == ids(first)


async def test_draws_without_a_seed_differ(api: Api) -> None:
    answers = await api.post("/generate", inputs=["hello"] * 8, parameters={"do_sample": True})
    assert len({answer["generated_text"] for answer in answers}) > 1


@pytest.mark.parametrize("temperature", [1e-7, 1e-30, 1e-38, 1e-44, 1e-320])
async def test_the_lowest_temperatures_draw_the_likeliest_token(
    api: Api, temperature: float
) -> None:
    parameters = {"temperature": temperature, "seed": 1}
    assert await api.post("/generate", inputs=WORDS, parameters=parameters) == await api.post(
        "/generate", inputs=WORDS
    )


async def test_top_k_1_is_greedy(api: Api) -> None:
    greedy = await api.post("/generate", inputs="hello")
    assert greedy == await api.post("/generate", inputs="hello", parameters={"top_k": 1})


# --- parameters ----------------------------------------------------------------------------------


async def test_a_list_of_parameters_pairs_up_with_the_inputs(api: Api) -> None:
    answers = await api.post(
        "/generate",
        inputs=["hello", "hello"],
        parameters=[{"max_new_tokens": 1, "details": True}, {"max_new_tokens": 3}],
    )
    assert answers[0]["details"]["generated_tokens"] == 1
    assert "details" not in answers[1]
    assert answers[1]["generated_text"].startswith(answers[0]["generated_text"])


async def test_a_prefix_is_continued(api: Api) -> None:
    whole = await api.post("/generate", inputs="hello", parameters={"details": True})
    words = whole["generated_text"].split()
    rest = await api.post(
        "/generate",
        inputs="hello",
        parameters={"target_prefix": " ".join(words[:2]), "details": True},
    )
    assert ids(rest) == ids(whole)[2:]
    assert " ".join(words[:2]) + rest["generated_text"] == whole["generated_text"]


async def test_the_prefix_is_in_the_text_only_on_request(api: Api) -> None:
    parameters = {"target_prefix": "HH AH", "return_full_text": True}
    full = await api.post("/generate", inputs="hello", parameters=parameters)
    rest = await api.post("/generate", inputs="hello", parameters={"target_prefix": "HH AH"})
    assert full["generated_text"] == "HH AH" + rest["generated_text"]


async def test_fields_that_ask_for_nothing_are_accepted(api: Api) -> None:
    parameters = {
        "watermark": False,
        "best_of": 1,
        "num_beams": 1,
        "stop": [],
        "typical_p": None,
        "repetition_penalty": 1.0,
        "temperature": None,
    }
    plain = await api.post("/generate", inputs="hello")
    assert await api.post("/generate", inputs="hello", parameters=parameters) == plain
    assert await api.post("/generate", inputs="hello", stream=False, timeout=None) == plain
    assert await api.post("/generate", inputs="hello", stream=None, parameters=None) == plain


# --- around --------------------------------------------------------------------------------------


async def test_headers_carry_times_and_counts(client: httpx.AsyncClient) -> None:
    response = await client.post("/generate", json={"inputs": ["hello", "fox"]})
    assert float(response.headers["x-queue-time"]) >= 0
    assert float(response.headers["x-inference-time"]) > 0
    assert response.headers["x-prompt-tokens"] == "10"
    assert int(response.headers["x-generated-tokens"]) > 0


async def test_the_first_model_is_the_default(api: Api) -> None:
    named = await api.post("/generate", model="native", inputs="hello")
    assert named == await api.post("/generate", inputs="hello")


async def test_a_model_that_is_not_there_is_named_with_those_that_are(api: Api) -> None:
    envelope = await api.refused("/generate", 404, model="bart", inputs="hello")
    assert envelope["error_type"] == "not_found"
    assert '"bart"' in envelope["error"]
    assert "native, tutorial" in envelope["error"]


async def test_a_timeout_in_the_body_or_the_header_ends_the_request(
    client: httpx.AsyncClient,
) -> None:
    body = {"inputs": ["hello"] * 500}
    for response in (
        await client.post("/generate", json={**body, "timeout": 1e-4}),
        await client.post("/generate", json=body, headers={"x-request-timeout": "0.0001"}),
    ):
        assert response.status_code == 504
        assert response.json()["error_type"] == "deadline"
    long = await client.post(
        "/generate", json={"inputs": "a", "timeout": 50}, headers={"x-request-timeout": "0.0001"}
    )
    assert long.status_code == 200


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf"])
async def test_a_bad_timeout_header_is_refused(client: httpx.AsyncClient, value: str) -> None:
    response = await client.post(
        "/generate", json={"inputs": "a"}, headers={"x-request-timeout": value}
    )
    assert response.status_code == 422
    assert response.json()["param"] == "x-request-timeout"
    overruled = await client.post(
        "/generate", json={"inputs": "a", "timeout": 5}, headers={"x-request-timeout": value}
    )
    assert overruled.status_code == 422
