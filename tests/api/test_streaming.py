"""Server-sent events of POST /generate and /generate_stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from .conftest import Api

pytestmark = pytest.mark.anyio

BEAMS = {"num_beams": 4, "num_return_sequences": 3}


async def stream(
    client: httpx.AsyncClient, path: str = "/generate_stream", **body: Any
) -> list[dict[str, Any]]:
    """The events of a stream."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"]
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(events: list[dict[str, Any]]) -> str:
    tokens = [event["token"] for event in events]
    return "".join(token["text"] for token in tokens if not token["special"])


async def test_events_tell_what_the_whole_answer_tells(client: httpx.AsyncClient, api: Api) -> None:
    parameters = {"details": True, "top_n_tokens": 2, "max_new_tokens": 9}
    whole = await api.post("/generate", inputs="hello", parameters=parameters)
    events = await stream(client, inputs="hello", parameters=parameters)
    assert [event["index"] for event in events] == list(range(len(events)))
    assert [event["token"] for event in events] == whole["details"]["tokens"]
    assert [event["top_tokens"] for event in events] == whole["details"]["top_tokens"]
    *inner, last = events
    assert all(event["generated_text"] is event["details"] is None for event in inner)
    assert last["generated_text"] == whole["generated_text"] == text_of(events)
    details = last["details"]
    assert details.pop("queue_time") >= 0
    assert details.pop("input_length") == details["input_tokens"]
    assert details.pop("inference_time") > 0
    assert details == whole["details"]


async def test_stream_true_and_the_stream_s_own_path_are_one(client: httpx.AsyncClient) -> None:
    def tokens(events: list[dict[str, Any]]) -> list[Any]:
        return [event["token"] for event in events]

    body = {"inputs": "world", "parameters": {"seed": 5, "max_new_tokens": 8}}
    one = await stream(client, "/generate", stream=True, **body)
    other = await stream(client, "/generate_stream", **body)
    assert tokens(one) == tokens(other)
    assert one[-1]["details"]["seed"] == 5
    assert one[-1]["details"]["tokens"] == []  # they were told already


async def test_a_stop_string_is_never_shown(client: httpx.AsyncClient, api: Api) -> None:
    plain = await api.post("/generate", inputs="hello", parameters={"max_new_tokens": 12})
    words = plain["generated_text"].split(" ")
    stop = f"{words[2][-1]} {words[3]}"  # across two tokens
    parameters = {"stop": [stop], "max_new_tokens": 12, "details": True}
    whole = await api.post("/generate", inputs="hello", parameters=parameters)
    events = await stream(client, inputs="hello", parameters=parameters)
    expected = plain["generated_text"][: plain["generated_text"].index(stop)]
    assert text_of(events) == events[-1]["generated_text"] == whole["generated_text"] == expected
    assert events[-1]["details"]["finish_reason"] == "stop_sequence"


async def test_beams_are_told_once_they_agree_and_the_others_at_the_end(
    client: httpx.AsyncClient, api: Api
) -> None:
    whole = await api.post("/generate", inputs="hello", parameters={**BEAMS, "details": True})
    events = await stream(client, inputs="hello", parameters=BEAMS)
    assert len({s["generated_text"] for s in whole["sequences"]}) == 3
    for number, expected in enumerate(whole["sequences"]):
        own = [event for event in events if event["sequence"] == number]
        assert [event["index"] for event in own] == list(range(len(own)))
        assert text_of(own) == own[-1]["generated_text"] == expected["generated_text"]
        assert own[-1]["details"]["score"] == expected["score"]
    order = [event["sequence"] for event in events]
    assert order == sorted(order)


async def test_the_steps_of_a_beam_search_come_at_its_end(
    client: httpx.AsyncClient, api: Api
) -> None:
    parameters = {**BEAMS, "beam_steps": True}
    whole = await api.post("/generate", inputs="hello", parameters=parameters)
    events = await stream(client, inputs="hello", parameters=parameters)
    told = [e["details"].get("beam_steps") for e in events if e["details"]]
    best, *others = whole["sequences"]
    assert told == [best["details"]["beam_steps"], None, None]
    assert not any("beam_steps" in other["details"] for other in others)


async def test_several_draws_are_told_side_by_side(client: httpx.AsyncClient, api: Api) -> None:
    parameters = {"seed": 3, "num_return_sequences": 3, "max_new_tokens": 7}
    whole = await api.post("/generate", inputs="hello", parameters=parameters)
    events = await stream(client, inputs="hello", parameters=parameters)
    texts = {e["sequence"]: e["generated_text"] for e in events if e["details"]}
    assert [texts[n] for n in range(3)] == [s["generated_text"] for s in whole["sequences"]]
    assert len(set(texts.values())) > 1


async def test_nothing_to_generate_is_one_event_without_a_token(client: httpx.AsyncClient) -> None:
    [event] = await stream(client, inputs="")
    assert (event["token"], event["generated_text"]) == (None, "")
    assert event["details"]["generated_tokens"] == 0
    assert (event["details"]["queue_time"], event["details"]["inference_time"]) == (0.0, 0.0)
    [event] = await stream(client, inputs="hello", parameters={"max_new_tokens": 0})
    assert event["details"]["finish_reason"] == "length"


async def test_a_model_without_a_tokenizer_streams_ids(client: httpx.AsyncClient) -> None:
    events = await stream(
        client, model="tutorial", input_ids=[1, 2, 3], parameters={"max_new_tokens": 4}
    )
    assert [event["token"]["text"] for event in events] == [None] * 4
    assert events[-1]["generated_text"] is None


async def test_what_is_refused_has_its_own_status(api: Api) -> None:
    refused = await api.refused("/generate", inputs=["a"], stream=True)
    assert refused["param"] == "stream"
    refused = await api.refused("/generate_stream", inputs=["a", "b"])
    assert refused["param"] == "inputs"
    refused = await api.refused("/generate_stream", inputs="a", parameters={"top_p": 2})
    assert refused["param"] == "parameters.top_p"


async def test_streams_and_whole_answers_run_side_by_side(
    client: httpx.AsyncClient, api: Api
) -> None:
    words = ["hello", "world", "lazy", "dog", "brown"]
    whole = [await api.post("/generate", inputs=word) for word in words]
    together = await asyncio.gather(
        *(stream(client, inputs=word) for word in words),
        *(api.post("/generate", inputs=word, parameters=BEAMS) for word in words),
    )
    texts = [events[-1]["generated_text"] for events in together[: len(words)]]
    assert texts == [answer["generated_text"] for answer in whole]
