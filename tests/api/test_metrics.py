"""/metrics: every value moves as docs/operations.md says, and no label is a caller's to choose."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from model.loader import LoadedModel
from service.app import create_app
from service.settings import Settings

from .conftest import serving
from .test_faults import with_fake_engine

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.fixture
async def fresh(models: dict[str, LoadedModel]) -> AsyncIterator[httpx.AsyncClient]:
    """A server that nobody has asked anything."""
    async with serving(create_app(Settings(), models)) as client:
        yield client


class Scrape:
    """What /metrics said once."""

    def __init__(self, text: str) -> None:
        self.families: list[Metric] = list(text_string_to_metric_families(text))
        self._values = {
            (s.name, frozenset(s.labels.items())): s.value for f in self.families for s in f.samples
        }

    @property
    def names(self) -> set[str]:
        return {f.name + "_total" * (f.type == "counter") for f in self.families}

    def __call__(self, name: str, **labels: str) -> float:
        """A sample's value; 0 for one that is not there."""
        return self._values.get((name, frozenset(labels.items())), 0.0)


async def scrape(client: httpx.AsyncClient) -> Scrape:
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return Scrape(response.text)


async def test_requests_are_counted_by_route_model_and_status(fresh: httpx.AsyncClient) -> None:
    for body in ({"inputs": "ab"}, {"inputs": "c", "model": "native"}, {"inputs": 5}):
        await fresh.post("/generate", json=body)
    await fresh.post("/next", json={"input_ids": [5], "model": "tutorial"})
    told = await scrape(fresh)
    name, generate = "seqserve_requests_total", {"route": "/generate", "method": "POST"}
    assert told(name, **generate, model="native", status="200") == 2
    assert told(name, **generate, model="", status="422") == 1
    assert told(name, route="/next", method="POST", model="tutorial", status="200") == 1
    errors = "seqserve_request_errors_total"
    assert told(errors, route="/generate", model="", error_type="validation") == 1
    assert told("seqserve_request_duration_seconds_count", route="/generate", model="native") == 2
    assert told("seqserve_requests_in_flight") == 1  # the one that asks


async def test_tokens_and_times_of_a_known_request(fresh: httpx.AsyncClient) -> None:
    parameters = {"max_new_tokens": 4, "min_new_tokens": 4}
    answer = await fresh.post("/generate", json={"inputs": ["abc", "de"], "parameters": parameters})
    told = await scrape(fresh)
    native = {"model": "native"}
    assert told("seqserve_prompt_tokens_total", **native) == int(answer.headers["x-prompt-tokens"])
    assert told("seqserve_generated_tokens_total", **native) == 8
    for name in ("request_queue", "request_inference", "time_to_first_token"):
        assert told(f"seqserve_{name}_seconds_count", **native) == 1
    queued = told("seqserve_request_queue_seconds_sum", **native)
    assert queued * 1e3 == pytest.approx(float(answer.headers["x-queue-time"]), abs=1e-3)
    inferred = told("seqserve_request_inference_seconds_sum", **native)
    assert inferred * 1e3 == pytest.approx(float(answer.headers["x-inference-time"]), abs=1e-3)
    first = told("seqserve_time_to_first_token_seconds_sum", **native)
    rest = 3 * told("seqserve_time_per_output_token_seconds_sum", **native)
    total = told("seqserve_request_duration_seconds_sum", route="/generate", model="native")
    assert 0 < first < first + rest < total


async def test_one_token_has_no_time_between_tokens(fresh: httpx.AsyncClient) -> None:
    await fresh.post("/generate", json={"inputs": "a", "parameters": {"max_new_tokens": 1}})
    told = await scrape(fresh)
    assert told("seqserve_time_to_first_token_seconds_count", model="native") == 1
    assert told("seqserve_time_per_output_token_seconds_count", model="native") == 0


async def test_steps_are_told_with_their_rows_padding_and_phases(fresh: httpx.AsyncClient) -> None:
    parameters = {"max_new_tokens": 3, "min_new_tokens": 3}
    await fresh.post("/generate", json={"inputs": ["abcdef", "ab"], "parameters": parameters})
    await fresh.post("/score", json={"inputs": "a", "targets": "K"})
    told = await scrape(fresh)
    native = {"model": "native"}
    steps = told("seqserve_step_rows_count", **native)
    assert steps >= 3  # both rows in three steps, unless a step came between their submissions
    assert told("seqserve_step_rows_sum", **native) == 6
    assert told("seqserve_step_rows_bucket", **native, le="+Inf") == steps
    assert told("seqserve_step_rows_bucket", **native, le="64") == steps
    assert told("seqserve_step_rows_bucket", **native, le="1") < steps
    assert told("seqserve_step_seconds_count", **native) == steps + 1
    assert told("seqserve_forward_passes_total", **native) == 1
    counts = {"encode": 1, "forward": 1, "decode": steps, "sample": steps}
    for phase, count in counts.items():
        assert told("seqserve_step_phase_seconds_count", **native, phase=phase) == count
    phases = sum(told("seqserve_step_phase_seconds_sum", **native, phase=p) for p in counts)
    assert 0 < phases <= told("seqserve_step_seconds_sum", **native)
    # 7 and 3 tokens with </s>, so 4 of 14 places are padding; targets are of one length.
    padding = "seqserve_step_padding_ratio_sum"
    assert told(padding, **native, side="source") == pytest.approx(4 / 14)
    assert told(padding, **native, side="target") == 0


async def test_the_same_source_again_is_a_cache_hit(fresh: httpx.AsyncClient) -> None:
    for _ in range(3):
        await fresh.post("/next", json={"inputs": "abc"})
    told = await scrape(fresh)
    assert told("seqserve_encoder_cache_misses_total", model="native") == 1
    assert told("seqserve_encoder_cache_hits_total", model="native") == 2
    assert told("seqserve_encoder_cache_bytes", model="native") > 0


async def test_models_limits_and_build_are_told(fresh: httpx.AsyncClient) -> None:
    told = await scrape(fresh)
    info = (await fresh.get("/info")).json()
    for model in info["models"]:
        named = {"model": model["name"]}
        facts = {key: model[key] for key in ("family", "dtype", "device")}
        assert told("seqserve_model_info", **named, **facts) == 1
        assert told("seqserve_model_ready", **named) == 1
        assert told("seqserve_rows_limit", **named) == info["limits"]["max_rows"]
        assert told("seqserve_outstanding_inputs_limit", **named) == info["limits"]["max_queue"]
        for idle in ("queue_length", "queue_oldest_seconds", "outstanding_inputs", "rows"):
            assert told(f"seqserve_{idle}", **named) == 0
    build = next(f for f in told.families if f.name == "seqserve_build_info")
    assert build.samples[0].labels["version"] == info["version"]
    assert told("process_resident_memory_bytes") > 1e6


async def test_what_waits_and_runs_shows_while_it_does(fresh: httpx.AsyncClient) -> None:
    slow = {"inputs": ["abc"] * 100, "parameters": {"max_new_tokens": 40, "min_new_tokens": 40}}
    asked = asyncio.create_task(fresh.post("/generate", json=slow))
    seen = {"queue_length": 0.0, "rows": 0.0, "outstanding_inputs": 0.0}
    while not asked.done():
        told = await scrape(fresh)
        for name, most in seen.items():
            seen[name] = max(most, told(f"seqserve_{name}", model="native"))
        await asyncio.sleep(0.001)  # a scrape in process lets nobody else run
    assert (await asked).status_code == 200
    assert seen["rows"] == 64
    assert seen["queue_length"] >= 36
    assert seen["outstanding_inputs"] == 100


async def test_an_engine_that_was_started_anew_is_counted(
    models: dict[str, LoadedModel],
) -> None:
    app = create_app(Settings(), models)
    async with serving(app) as client:
        before = await scrape(client)
        app.state.models.get("native").runner.restarts += 1
        after = await scrape(client)
    assert before("seqserve_engine_restarts_total", model="native") == 0
    assert after("seqserve_engine_restarts_total", model="native") == 1


async def test_what_fails_is_counted_by_its_reason_and_what_waits_ages(
    native: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_fake_engine(native, monkeypatch, max_queue=1, max_inputs=1) as served:
        _, client, engine = served
        with engine.held_up():
            late = client.post("/generate", json={"inputs": "ab", "timeout": 0.5})
            waiting = asyncio.create_task(late)
            await asyncio.sleep(0.1)
            while_it_waits = await scrape(client)
            await client.post("/generate", json={"inputs": "ab"})
            await waiting
        told = await scrape(client)
    assert while_it_waits("seqserve_queue_oldest_seconds", model="fake") > 0.05
    assert while_it_waits("seqserve_requests_in_flight") == 2
    assert told("seqserve_queue_oldest_seconds", model="fake") == 0
    errors, named = "seqserve_request_errors_total", {"route": "/generate", "model": "fake"}
    assert told(errors, **named, error_type="deadline") == 1
    assert told(errors, **named, error_type="overloaded") == 1


async def test_no_label_is_a_caller_s_to_choose(fresh: httpx.AsyncClient) -> None:
    secret = "s3cret"
    headers = {"authorization": f"Bearer {secret}", "x-request-id": secret}
    await fresh.post("/generate", json={"inputs": secret, "model": secret}, headers=headers)
    await fresh.get(f"/{secret}", headers=headers)
    await fresh.get(f"/docs/{secret}", headers=headers)
    await fresh.request(secret.upper(), "/generate", headers=headers)
    text = (await fresh.get("/metrics")).text
    assert secret not in text.lower()
    told = Scrape(text)
    name = "seqserve_requests_total"
    unknown = {"route": "/generate", "method": "POST", "model": "unknown"}
    assert told(name, **unknown, status="404") == 1
    assert told(name, route="other", method="GET", model="", status="404") == 2
    assert told(name, route="/generate", method="other", model="", status="405") == 1


async def test_what_is_refused_before_its_route_counts_for_its_path(
    models: dict[str, LoadedModel],
) -> None:
    settings = Settings(max_body_bytes=1024, root_path="/nlp")
    async with serving(create_app(settings, models)) as client:
        await client.post("/generate", content=b"x" * 2000)
        await client.post("/nlp/generate", content=b"x" * 2000)
        told = await scrape(client)
    labels = {"route": "/generate", "method": "POST", "model": "", "status": "413"}
    assert told("seqserve_requests_total", **labels) == 2


async def test_two_applications_count_apart(
    fresh: httpx.AsyncClient, models: dict[str, LoadedModel]
) -> None:
    async with serving(create_app(Settings(), models)) as other:
        await other.post("/generate", json={"inputs": "a"})
    told = await scrape(fresh)
    assert told("seqserve_generated_tokens_total", model="native") == 0


async def test_a_model_that_loads_is_told_as_not_ready(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "perceptron"}')
    app = create_app(Settings(models=(f"bad={tmp_path}",)), on_failure=lambda _: None)
    async with serving(app) as client:
        told = await scrape(client)
    assert "seqserve_model_ready" in told.names
    assert told("seqserve_model_ready", model="bad") == 0


async def test_openmetrics_is_spoken_where_asked_for(fresh: httpx.AsyncClient) -> None:
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    response = await fresh.get("/metrics", headers=accept)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(response.text)}
    assert "seqserve_requests" in names


def documented_metrics() -> dict[str, set[str]]:
    """Each metric of the manual and its labels."""
    rows = re.findall(
        r"^\| `((?:seqserve|process)_\w+)` \| \w+ \| ([^|]*)\|", DOCS.read_text(), re.M
    )
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


async def test_every_metric_is_documented_and_every_documented_one_is_there(
    fresh: httpx.AsyncClient,
) -> None:
    await fresh.post("/generate", json={"inputs": ["ab", "c"]})
    await fresh.get("/nowhere")
    told = await scrape(fresh)
    documented = documented_metrics()
    assert told.names == documented.keys()
    for family in told.families:
        name = family.name + "_total" * (family.type == "counter")
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == documented[name], name
        assert family.samples or name == "seqserve_device_memory_bytes"


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
async def test_load_balancers_may_ask_by_head(client: httpx.AsyncClient, path: str) -> None:
    response: Any = await client.head(path)
    assert response.status_code == 200
