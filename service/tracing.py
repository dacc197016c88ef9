"""Optional OpenTelemetry traces: a span for each request, and in it the queue and the engine.

Spans are written from a request's record when it has ended, with the times that it noted: nothing
runs beside a request that is not traced, and nothing but the record can get into a trace. The
packages come with the extra `otel` and are imported only where traces are on.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from seqserve import __version__
from service.observation import PROBES, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider


class TracingError(Exception):
    """Traces were asked for and cannot be sent."""


class RequestTracer:
    """Writes a finished request's spans.

    Args:
        provider: where they go. It is this tracer's own, not the process's global one, so that no
            library adds spans of its own, which know paths and addresses.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("seqserve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, record: RequestRecord) -> None:
        """Write a request's spans and note its trace; probes have none."""
        if record.route in PROBES:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        span = self._tracer.start_span(
            f"{record.method} {record.route}",
            context=self._propagator.extract(record.headers),
            kind=SpanKind.SERVER,
            attributes=attributes_of(record),
            start_time=record.wall,
        )
        if record.status >= 500 or (record.error_type and record.status < 400):
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        self._child("queue", record.queue, record, inside)
        self._child("inference", record.inference, record, inside)
        span.end(_wall(record, record.ended))
        record.trace_id = f"{span.get_span_context().trace_id:032x}"

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _child(
        self, name: str, span: tuple[float, float] | None, record: RequestRecord, inside: Context
    ) -> None:
        if span is None:
            return
        start, end = span
        child = self._tracer.start_span(name, context=inside, start_time=_wall(record, start))
        child.end(_wall(record, end))


def exporting_tracer() -> RequestTracer:
    """A tracer that sends spans with OTLP over HTTP; OTEL_* variables say where to and how.

    Raises:
        TracingError: the packages are not there.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingError(
            f"tracing needs packages that are not installed ({error.name}): "
            'install the extra with pip install ".[server,otel]"'
        ) from error
    name = os.environ.get("OTEL_SERVICE_NAME", "seqserve")
    resource = Resource.create({"service.name": name, "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return RequestTracer(provider)


def attributes_of(record: RequestRecord) -> dict[str, str | int | bool]:
    """What a request's span says of it, named as OpenTelemetry's conventions do where they can."""
    attributes: dict[str, str | int | bool] = {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.generated_tokens,
        "seqserve.request_id": record.request_id,
        "seqserve.inputs": record.inputs,
        "seqserve.streamed": record.streamed,
    }
    if record.error_type:
        attributes["error.type"] = record.error_type
    return attributes


def _wall(record: RequestRecord, moment: float) -> int:
    """A moment of `time.perf_counter` as nanoseconds since the epoch."""
    return record.wall + round((moment - record.started) * 1e9)
