"""Probes, /info, the documentation, request ids, and errors that no route makes."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

import service.served
from model.cache import RequestMemory
from model.faults import GenerationError
from model.loader import LoadedModel, load_model
from model.transformer import Transformer
from seqserve import __version__
from seqserve.schemas import (
    AttentionResponse,
    DetokenizeResponse,
    GenerateResponse,
    InfoResponse,
    LogitsResponse,
    NextResponse,
    ScoreResponse,
    TokenizeResponse,
)
from service.app import create_app
from service.settings import Settings

from .conftest import serving

pytestmark = pytest.mark.anyio


async def test_health_and_ready_answer_200(client: httpx.AsyncClient) -> None:
    for path, status in (("/health", "ok"), ("/ready", "ready")):
        response = await client.get(path)
        assert response.status_code == 200
        assert response.json() == {"status": status}


async def test_while_a_model_loads_the_server_is_alive_but_not_ready(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def slow(*args: Any) -> LoadedModel:
        go_on.wait(10)
        return load_model(*args)

    monkeypatch.setattr(service.served, "load_model", slow)
    app = create_app(Settings(models=(f"slow={model_directory}",), device="cpu"))
    async with serving(app) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/info")).json()["models"] == [
            {"name": "slow", "state": "loading"}
        ]
        for response in (
            await client.get("/ready"),
            await client.post("/generate", json={"inputs": "a"}),
        ):
            assert response.status_code == 503
            assert response.json()["error_type"] == "unavailable"
            assert "still loading" in response.json()["error"]
        assert (await client.post("/generate", json={"inputs": 5})).status_code == 422
        go_on.set()
        async with asyncio.timeout(10):
            while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110 - a probe polls
                await asyncio.sleep(0.01)
        assert (await client.post("/generate", json={"inputs": "a"})).status_code == 200


async def test_a_model_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "perceptron"}')
    failed = asyncio.Event()
    messages: list[str] = []

    def on_failure(message: str) -> None:
        messages.append(message)
        failed.set()

    app = create_app(Settings(models=(f"bad={tmp_path}",)), on_failure=on_failure)
    async with serving(app) as client:
        await asyncio.wait_for(failed.wait(), 10)
        assert messages[0].startswith("model bad: ")
        assert "perceptron" in messages[0]
        response = await client.get("/ready")
        assert response.status_code == 503
        assert "perceptron" in response.json()["error"]
        assert (await client.get("/info")).json()["models"][0]["state"] == "failed"


async def until_loaded(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """What /info says of the models when none is loading any more."""
    async with asyncio.timeout(10):
        while True:
            models: list[dict[str, Any]] = (await client.get("/info")).json()["models"]
            if all(model["state"] != "loading" for model in models):
                return models
            await asyncio.sleep(0.01)


async def test_a_model_that_cannot_be_loaded_does_not_take_the_others_down(
    model_directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "perceptron"}')
    ended: list[str] = []
    settings = Settings(
        models=(f"bad={tmp_path}", f"good={model_directory}", f"gone={tmp_path / 'nowhere'}"),
        device="cpu",
        on_load_failure="serve",
    )
    async with serving(create_app(settings, on_failure=ended.append)) as client:
        models = await until_loaded(client)
        assert [model["state"] for model in models] == ["failed", "ready", "failed"]
        assert "perceptron" in models[0]["error"]
        assert models[2]["error"] == "its directory: no such directory"
        for text in (models[0]["error"], models[2]["error"]):
            assert str(tmp_path) not in text
        assert (await client.get("/ready")).status_code == 200
        good = await client.post("/generate", json={"inputs": "a", "model": "good"})
        assert good.status_code == 200
        for name, body in (("bad", {}), ("gone", {"model": "gone"})):
            refused = await client.post("/generate", json={"inputs": "a", **body})
            assert refused.status_code == 503
            assert refused.json()["error"].startswith(f"model {name} is not loaded: ")
            assert "retry-after" not in refused.headers
    assert not ended


async def test_models_load_side_by_side(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=10)  # broken by one that waits for the other to end

    def together(*args: Any) -> LoadedModel:
        both.wait()
        return load_model(*args)

    monkeypatch.setattr(service.served, "load_model", together)
    directories = (f"one={model_directory}", f"two={model_directory}")
    async with serving(create_app(Settings(models=directories, device="cpu"))) as client:
        assert [model["state"] for model in await until_loaded(client)] == ["ready", "ready"]


async def test_a_model_that_cannot_generate_is_never_ready(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def broken(*_: Any, **__: Any) -> Any:
        raise GenerationError("the model's logits are not finite")

    with monkeypatch.context() as patch:
        patch.setattr("model.steppers.CachedStepper.step", broken)
        async with serving(create_app(Settings(), {"m": native}, ended.append)) as client:
            assert (await client.get("/ready")).status_code == 503
            [model] = await until_loaded(client)
            assert model["error"] == "the model's logits are not finite"
    assert ended == ["model m: the model's logits are not finite"]


async def test_warming_up_leaves_no_trace_in_the_figures(native: LoadedModel) -> None:
    async with serving(create_app(Settings(), {"m": native})) as client:
        assert (await client.get("/ready")).status_code == 200
        [model] = (await client.get("/info")).json()["models"]
        assert model["batches"]["steps"] == model["encoder_cache"]["misses"] == 0


async def test_info_describes_models_and_limits(
    client: httpx.AsyncClient, native: LoadedModel
) -> None:
    info = InfoResponse.model_validate((await client.get("/info")).json())
    assert info.version == __version__
    assert info.limits.max_inputs == 1024
    first, second = info.models
    assert (first.name, second.name) == ("native", "tutorial")
    assert first.state == "ready"
    assert first.family == "seqserve"
    assert (first.device, first.dtype) == ("cpu", "float32")
    assert first.parameters == native.parameters
    assert first.max_source_tokens == native.spec.max_src
    assert first.source_tokenizer
    assert (first.decoder_start_ids, first.eos_token_id) == ([1], 2)
    memory = RequestMemory.of(cast("Transformer", native.network), native.spec)
    assert first.cache_bytes_per_source_token == memory.per_source_token
    assert first.cache_bytes_per_target_token == memory.per_target_token
    assert first.cache_bytes_per_request == memory.longest
    assert second.cache_bytes_per_request is None
    assert not second.source_tokenizer
    assert second.source_is_target


@pytest.mark.one_process  # a gateway shows the figures of the replica that it asks
async def test_info_tells_what_a_model_has_done(client: httpx.AsyncClient) -> None:
    await client.post("/generate", json={"inputs": "hello"})
    await client.post("/next", json={"inputs": "hello"})
    batches = InfoResponse.model_validate((await client.get("/info")).json()).models[0].batches
    assert batches
    assert batches.steps > 0
    assert batches.forward_passes > 0


async def test_the_documentation_is_a_page(client: httpx.AsyncClient) -> None:
    for path in ("/docs", "/docs/"):
        page = await client.get(path)
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")


async def test_the_documentation_needs_no_internet(client: httpx.AsyncClient) -> None:
    page = (await client.get("/docs")).text
    links = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert links
    for link in links:
        assert link.startswith("/docs/")
        assert (await client.get(link)).status_code == 200
    assert 'data-openapi="/openapi.json"' in page
    assert "<script>" not in page


async def test_the_openapi_document_describes_every_route(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    inspecting = {"/logits", "/next", "/score", "/attention", "/tokenize", "/detokenize"}
    posts = {"/generate", "/generate_stream", *inspecting}
    others = {"/", "/v1/completions", "/v1/models", "/v1/models/{name}"}
    others |= {"/translate", "/detect", "/languages", "/frontend/settings"}
    probes = {"/health", "/ready", "/ping", "/metrics"}
    assert set(document["paths"]) == posts | others | probes | {"/info"}
    for path in posts:
        operation = document["paths"][path]["post"]
        assert operation["summary"]
        assert {"400", "404", "413", "422", "503"} <= operation["responses"].keys()
        refused = operation["responses"]["422"]["content"]["application/json"]["schema"]
        assert refused["$ref"].endswith("/ErrorResponse")
    assert "HTTPValidationError" not in document["components"]["schemas"]
    parameters = document["components"]["schemas"]["GenerationParameters"]
    assert all("description" in field for field in parameters["properties"].values())
    assert not parameters["additionalProperties"]


async def test_the_openapi_document_s_examples_are_accepted(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    tried = 0
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        for example in content.get("application/json", {}).get("examples", {}).values():
            response = await client.post(path, json=example["value"])
            assert response.status_code == 200, (path, example, response.text)
            tried += 1
    assert tried >= 10


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/generate", {"inputs": "a", "parameters": {"top_n_tokens": 2}}, GenerateResponse),
        ("/logits", {"inputs": "a", "positions": "all"}, LogitsResponse),
        ("/logits", {"inputs": "a", "top_k": 2}, LogitsResponse),
        ("/next", {"inputs": "a"}, NextResponse),
        ("/score", {"inputs": "a", "targets": "K"}, ScoreResponse),
        ("/attention", {"inputs": "a", "targets": "K"}, AttentionResponse),
        ("/tokenize", {"inputs": "a"}, TokenizeResponse),
        ("/detokenize", {"input_ids": [5]}, DetokenizeResponse),
    ],
)
async def test_answers_are_what_the_schema_promises(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], kind: Any
) -> None:
    answer = (await client.post(path, json=body)).json()
    parsed = kind.model_validate(answer, strict=True, extra="forbid")
    assert parsed.model_dump(exclude_unset=True) == answer


async def test_the_caller_s_request_id_comes_back(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/nowhere"):
        response = await client.get(path, headers={"x-request-id": "mine-42"})
        assert response.headers["x-request-id"] == "mine-42"
    assert response.json()["request_id"] == "mine-42"


@pytest.mark.parametrize("value", ["", "two words", "x" * 129, "caf\u00e9"])
async def test_a_strange_request_id_is_replaced(client: httpx.AsyncClient, value: str) -> None:
    response = await client.get("/health", headers=[(b"x-request-id", value.encode())])
    assert len(response.headers["x-request-id"]) == 32


async def test_unknown_paths_and_methods_get_the_envelope(client: httpx.AsyncClient) -> None:
    response = await client.get("/generat")
    assert response.status_code == 404
    assert response.json()["error_type"] == "not_found"
    assert "/generat" in response.json()["error"]
    response = await client.delete("/generate")
    assert response.status_code == 405
    assert response.json()["error_type"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


async def test_a_bug_is_a_plain_500_and_the_log_names_its_place(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(create_app(Settings(), {"m": native})) as client:

        def broken(*_: Any) -> Any:
            raise RuntimeError("/secret/path")

        monkeypatch.setattr("service.generation.Generator.plan", broken)
        with caplog.at_level(logging.ERROR):
            response = await client.post("/generate", json={"inputs": "a"})
        assert response.status_code == 500
        assert response.json()["error_type"] == "internal"
        assert "secret" not in response.text
        assert response.headers["x-request-id"] in caplog.text
        assert "RuntimeError in " in caplog.text
        assert ".broken:" in caplog.text
        assert "< service.routes.generate.planned:" in caplog.text
        assert "secret" not in caplog.text
        with caplog.at_level(logging.DEBUG, "service.middleware"):
            await client.post("/generate", json={"inputs": "a"})
        assert "/secret/path" in caplog.text
        assert "Traceback" in caplog.text
        monkeypatch.undo()
        assert (await client.post("/generate", json={"inputs": "a"})).status_code == 200


async def test_a_root_path_is_where_a_proxy_publishes_the_server(native: LoadedModel) -> None:
    async with serving(create_app(Settings(root_path="/nlp/"), {"m": native})) as client:
        for path in ("/nlp/health", "/health"):
            assert (await client.get(path)).status_code == 200
        document = (await client.get("/openapi.json")).json()
        assert document["servers"] == [{"url": "/nlp"}]
