"""Clients that people already have, unmodified, against a server over a socket.

`openai` and `huggingface_hub` come with the extra `dev`. `text-generation`, which needs an older
huggingface_hub, runs in an environment of its own, which `make tgi-client` creates.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn
from fastapi import FastAPI
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import (
    GenerationError,
    HfHubHTTPError,
    UnknownError,
    ValidationError,
)

from model.loader import load_model
from seqserve import Client
from service.app import create_app
from service.protocol import Protocol
from service.settings import Settings
from service.sockets import listen
from service.sockets import url as url_of
from tests.builders import make_m2m_model

from .conftest import FAULTY, ROOT, serving

KEY = "sesame"

TGI_PYTHON = ROOT / ".venv-tgi" / "bin" / "python"

SICK = "q"
"""A text whose row fails, see tests/e2e/faulty_server.py."""


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with two models, a key and a short queue."""
    directory = tmp_path_factory.mktemp("clients")
    multilingual = make_m2m_model(directory / "m2m", src_lang="en", tgt_lang="fr")
    keys = directory / "keys"
    keys.write_text(KEY)
    arguments = ["--model", f"tiny={model}", "--model", f"m2m={multilingual}"]
    arguments += ["--api-keys-file", str(keys), "--max-queue", "4", "--max-inputs", "4"]
    with serving(*arguments, program=FAULTY, api_key=KEY) as server:
        yield server.url


@pytest.fixture(scope="module")
def ours(url: str) -> Iterator[Client]:
    with Client(url, api_key=KEY) as client:
        yield client


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def inference(url: str) -> InferenceClient:
    return InferenceClient(url, token=KEY)


@contextmanager
def in_a_thread(app: FastAPI) -> Iterator[str]:
    """The URL of an application that listens on a socket."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, http=Protocol, log_config=None))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield url_of(listener)
    finally:
        server.should_exit = True
        thread.join()


# --- openai --------------------------------------------------------------------------------------


def test_openai_completes(client: openai.OpenAI, ours: Client) -> None:
    answer = client.completions.create(model="tiny", prompt="hello", logprobs=2, max_tokens=6)
    told = ours.generate("hello", {"max_new_tokens": 6, "top_n_tokens": 2})
    assert told.details
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (told.generated_text, "length")
    assert answer.usage
    assert answer.usage.completion_tokens == 6
    assert choice.logprobs
    assert choice.logprobs.token_logprobs == [token.logprob for token in told.details.tokens]


def test_openai_completes_lists_and_draws(client: openai.OpenAI) -> None:
    prompts: list[Any] = [["hello", "cat"], [[5, 6, 2], [7, 2]]]
    for prompt in prompts:
        answer = client.completions.create(
            model="tiny", prompt=prompt, n=2, temperature=0.8, top_p=0.9, seed=1, max_tokens=4
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    answer = client.completions.create(
        model="tiny", prompt="hello", best_of=3, temperature=1, stop=[" W"], logit_bias={"5": 1}
    )
    assert len(answer.choices) == 1


def test_openai_streams(client: openai.OpenAI, ours: Client) -> None:
    with client.completions.create(
        model="tiny", prompt="hello", stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = stream
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == ours.generate("hello").generated_text
    assert last.usage
    assert last.usage.prompt_tokens == 6


def test_openai_streams_to_asyncio(url: str, ours: Client) -> None:
    async def read() -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
            stream = await client.completions.create(model="tiny", prompt="cat", stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

    assert asyncio.run(read()) == ours.generate("cat").generated_text


def test_openai_says_more_to_a_model_with_languages(client: openai.OpenAI, ours: Client) -> None:
    parameters = {"src_lang": "en", "tgt_lang": "de"}
    answer = client.completions.create(
        model="m2m", prompt="ab", max_tokens=5, temperature=0, extra_body=parameters
    )
    told = ours.generate("ab", {**parameters, "max_new_tokens": 5}, model="m2m")
    assert answer.choices[0].text == told.generated_text


def test_openai_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "m2m"]
    assert client.models.retrieve("m2m").owned_by == "seqserve"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_openai_raises_errors_of_its_own_kinds(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="a", echo=True)
    assert (refused.value.param, refused.value.type) == ("echo", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.InternalServerError) as failed:
        client.completions.create(model="tiny", prompt=SICK)
    assert failed.value.code == "generation"
    with pytest.raises(openai.InternalServerError) as late:
        client.completions.create(
            model="tiny", prompt="a", extra_headers={"x-request-timeout": "1e-9"}
        )
    assert (late.value.status_code, late.value.code) == (504, "deadline")
    assert late.value.request_id
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError) as unknown:
        stranger.models.list()
    assert unknown.value.code == "invalid_api_key"


def test_openai_comes_again_when_the_queue_was_full(url: str) -> None:
    def ask(_: int) -> int:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=20) as client:
            answer = client.completions.with_raw_response.create(
                model="tiny", prompt="hello", n=4, temperature=1
            )
        assert len(answer.parse().choices) == 4
        return answer.retries_taken

    with ThreadPoolExecutor(4) as pool:
        retries = list(pool.map(ask, range(4)))
    assert sum(retries) > 0


# --- huggingface_hub -----------------------------------------------------------------------------


def test_hugging_face_generates(inference: InferenceClient, ours: Client) -> None:
    text = ours.generate("hello", {"max_new_tokens": 6}).generated_text
    assert inference.text_generation("hello", max_new_tokens=6) == text
    answer = inference.text_generation(
        "hello", max_new_tokens=6, details=True, decoder_input_details=True, top_n_tokens=2
    )
    assert answer.generated_text == text
    assert answer.details
    assert answer.details.finish_reason == "length"
    assert all(isinstance(token.logprob, float) for token in answer.details.tokens)
    assert [token.id for token in answer.details.prefill] == [1]
    assert answer.details.top_tokens
    assert [len(top) for top in answer.details.top_tokens] == [2] * 6


def test_hugging_face_draws(inference: InferenceClient, ours: Client) -> None:
    told = ours.generate("hello", {"temperature": 1.5, "seed": 3, "max_new_tokens": 6})
    fields: dict[str, Any] = {"temperature": 1.5, "max_new_tokens": 6, "watermark": False}
    for do_sample in (None, False, True):
        text = inference.text_generation("hello", do_sample=do_sample, seed=3, **fields)
        assert text == told.generated_text
    best = inference.text_generation("hello", best_of=3, details=True, **fields)
    assert best.details
    assert best.details.best_of_sequences
    assert len(best.details.best_of_sequences) == 2


def test_hugging_face_streams(inference: InferenceClient, ours: Client) -> None:
    text = ours.generate("hello", {"max_new_tokens": 6}).generated_text
    pieces = inference.text_generation("hello", max_new_tokens=6, stream=True)
    assert "".join(pieces) == text
    events = list(inference.text_generation("hello", max_new_tokens=6, stream=True, details=True))
    assert [event.index for event in events] == [1, 2, 3, 4, 5, 6]
    assert events[-1].generated_text == text
    assert events[-1].details
    assert events[-1].details.input_length == 6
    assert [event.details for event in events[:-1]] == [None] * 5


def test_hugging_face_streams_to_asyncio(url: str, ours: Client) -> None:
    async def read() -> str:
        async with AsyncInferenceClient(url, token=KEY) as client:
            return "".join(
                [piece async for piece in await client.text_generation("a", stream=True)]
            )

    assert asyncio.run(read()).removesuffix("</s>") == ours.generate("a").generated_text


def test_hugging_face_translates(tmp_path: Path) -> None:
    """A model is named by the address alone, so that a server for languages has one first."""
    model = load_model(make_m2m_model(tmp_path / "m2m"), "cpu")
    with (
        in_a_thread(create_app(Settings(), {"m2m": model})) as url,
        Client(url) as ours,
    ):
        inference = InferenceClient(url)
        letters: dict[str, Any] = {"logit_bias": {"6": 20, "7": 20}, "max_new_tokens": 9}
        for tgt_lang in ("de", "ja"):
            languages = {"src_lang": "en", "tgt_lang": tgt_lang}
            answer = inference.translation("ab ba", **languages, generate_parameters=letters)
            told = ours.generate("ab ba", {**languages, **letters}).generated_text
            assert answer.translation_text == told
            assert told
        with pytest.raises(HfHubHTTPError, match="tgt_lang must be a language of this model"):
            inference.translation("ab", src_lang="en", tgt_lang="xx")


def test_hugging_face_summarises(inference: InferenceClient, ours: Client) -> None:
    text = ours.generate("hello", {"max_new_tokens": 7, "num_beams": 2}).generated_text
    answer = inference.summarization(
        "hello", generate_parameters={"max_length": 8, "num_beams": 2}, truncation="longest_first"
    )
    assert answer.summary_text == text
    assert inference.translation("hello").translation_text == ours.generate("hello").generated_text
    long = "a" * 99
    assert inference.summarization(long, truncation="only_first").summary_text


def test_hugging_face_asks_for_health_and_information(url: str) -> None:
    inference = InferenceClient(url, token=KEY, provider="hf-inference")
    assert inference.health_check()
    info = inference.get_endpoint_info()
    assert (info["model_id"], info["router"], info["max_input_tokens"]) == ("tiny", "seqserve", 48)


def test_hugging_face_raises_errors_of_its_own_kinds(inference: InferenceClient, url: str) -> None:
    with pytest.raises(ValidationError, match="watermark must be false"):
        inference.text_generation("a", watermark=True)
    with pytest.raises(ValidationError, match="max_new_tokens must be at most 48"):
        list(inference.text_generation("a", max_new_tokens=99, stream=True))
    with pytest.raises(GenerationError, match="failed on this input"):
        inference.text_generation(SICK)
    with pytest.raises(UnknownError, match="API key"):
        InferenceClient(url, token="wrong").text_generation("a")


# --- text-generation -----------------------------------------------------------------------------


@pytest.mark.skipif(not TGI_PYTHON.exists(), reason="needs text-generation: make tgi-client")
def test_text_generation_works(url: str, ours: Client) -> None:
    program = Path(__file__).with_name("text_generation_client.py")
    environment = {**os.environ, "URL": url, "KEY": KEY, "SICK": SICK}
    result = subprocess.run(
        [TGI_PYTHON, program], env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    text = ours.generate("hello", {"max_new_tokens": 6}).generated_text
    drawn = ours.generate("hello", {"temperature": 1.5, "seed": 3, "max_new_tokens": 20})
    assert told == {
        "whole": text,
        "stream": [text] * 2,
        "asyncio": text,
        "drawn": drawn.generated_text,
        "errors": ["ValidationError", "GenerationError", "UnknownError"],
    }
