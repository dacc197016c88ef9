"""Traces: a span for each request, and in it the queue and the engine."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from model.loader import LoadedModel
from seqserve.schemas import TIMEOUT_LIMIT
from service import tracing
from service.app import create_app
from service.settings import Settings

from .conftest import serving

pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    yield exporter
    exporter.shutdown()


@pytest.fixture
async def traced(
    models: dict[str, LoadedModel], exporter: InMemorySpanExporter
) -> AsyncIterator[httpx.AsyncClient]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = create_app(Settings(), models, tracer=tracing.RequestTracer(provider))
    async with serving(app) as client:
        yield client


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def identity(span: ReadableSpan) -> tuple[str, int]:
    context = span.get_span_context()
    assert context
    return f"{context.trace_id:032x}", context.span_id


async def test_a_request_s_span_holds_queue_and_inference_and_goes_on_from_the_caller_s(
    traced: httpx.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    answer = await traced.post("/generate", json={"inputs": "abc"}, headers=headers)
    spans = by_name(exporter)
    assert spans.keys() == {"POST /generate", "queue", "inference"}
    whole, queue, inference = spans["POST /generate"], spans["queue"], spans["inference"]
    assert identity(whole)[0] == TRACE
    assert whole.parent
    assert f"{whole.parent.span_id:016x}" == PARENT
    assert whole.kind is SpanKind.SERVER
    for child in (queue, inference):
        assert child.parent
        assert (identity(child)[0], child.parent.span_id) == identity(whole)
    times = [whole.start_time, queue.start_time, queue.end_time, inference.end_time, whole.end_time]
    assert times == sorted(times, key=lambda moment: moment or 0)
    assert inference.start_time == queue.end_time
    inferred = ((inference.end_time or 0) - (inference.start_time or 0)) / 1e6
    assert inferred == pytest.approx(float(answer.headers["x-inference-time"]), abs=0.01)
    attributes = dict(whole.attributes or {})
    assert attributes["http.response.status_code"] == 200
    assert attributes["gen_ai.request.model"] == "native"
    tokens = attributes["gen_ai.usage.output_tokens"]
    assert tokens == int(answer.headers["x-generated-tokens"])
    assert whole.status.status_code is StatusCode.UNSET


async def test_without_a_caller_s_trace_or_with_nonsense_one_begins(
    traced: httpx.AsyncClient, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "service.logs")
    for headers in ({}, {"traceparent": "00-xyz-1-01"}):
        exporter.clear()
        await traced.post("/tokenize", json={"inputs": "a"}, headers=headers)
        [span] = exporter.get_finished_spans()
        assert span.parent is None
        fields: Any = getattr(caplog.records[-1], "fields")  # noqa: B009 - an extra of logging
        assert fields["trace_id"] == identity(span)[0]


async def test_errors_are_named_and_only_the_server_s_own_are_faults(
    traced: httpx.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    await traced.post("/generate", json={"inputs": 5})
    await traced.post(
        "/generate", json={"inputs": ["ab"] * 50, "timeout": 1e-4, "parameters": {"seed": 1}}
    )
    wrong, late = (s for s in exporter.get_finished_spans() if s.name == "POST /generate")
    assert dict(wrong.attributes or {})["error.type"] == "validation"
    assert wrong.status.status_code is StatusCode.UNSET
    assert dict(late.attributes or {})["error.type"] == "deadline"
    assert late.status.status_code is StatusCode.ERROR


async def test_probes_leave_no_span_and_a_span_nothing_that_a_caller_wrote(
    traced: httpx.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    for path in ("/health", "/ready", "/metrics"):
        await traced.get(path)
    assert exporter.get_finished_spans() == ()
    headers = {"authorization": "Bearer xyzzy", "x-forwarded-for": "192.0.2.77"}
    for path, model in (("/generate?key=xyzzy", None), ("/generate", "xyzzy"), ("/xyzzy", None)):
        body = {"inputs": "xyzzy", "model": model}
        await traced.post(path, json=body, headers=headers)
    told = [span.to_json() for span in exporter.get_finished_spans()]
    assert len(told) == 5  # three requests, and queue and inference of the first
    assert not re.search("xyzzy|192.0.2.77|127.0.0.1", "".join(told))


async def test_every_attribute_is_documented(
    traced: httpx.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    await traced.post("/generate", json={"inputs": "a", "timeout": TIMEOUT_LIMIT + 1})
    await traced.post("/generate", json={"inputs": "a"})
    spans = exporter.get_finished_spans()
    told = {name for span in spans for name in span.attributes or {}}
    section = DOCS.read_text().split("\n## Traces\n")[1].split("\n## ")[0]
    assert told == set(re.findall(r"`((?:http|error|gen_ai|seqserve)\.[\w.]+)`", section))


def test_traces_without_their_packages_are_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(tracing.TracingError, match=r'pip install "\.\[server,otel\]"'):
        tracing.exporting_tracer()


def test_a_server_without_traces_loads_none_of_their_packages() -> None:
    code = "import sys, service.server; print('opentelemetry.sdk' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "False"
