"""GET /metrics: what Prometheus reads.

Each application has its own registry, and nothing is counted twice: requests are counted here when
they end, on the event loop; what engines did is read from the figures that /info shows too, when
Prometheus asks. Label values are bounded: routes and methods that the server has, models that it
serves, statuses and error types of its own.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeAlias

import torch
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from seqserve import __version__
from service.catalogue import Catalogue, Entry
from service.figures import Tally
from service.observation import RequestRecord
from service.served import ServedModel

REQUEST_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0
)  # fmt: skip
TOKEN_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5
)  # fmt: skip

Labels: TypeAlias = tuple[str, ...]


class Exposition(Protocol):
    """What answers GET /metrics."""

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics as text.

        Args:
            accept: the request's header of that name.

        Returns:
            the text and its content type.
        """


class Metrics:
    """Counts requests and tells of them and of the engines.

    Args:
        models: those of the server.
    """

    def __init__(self, models: Catalogue[Entry]) -> None:
        self._requests = RequestFigures()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._requests)
        self._registry.register(ModelCollector(models))
        ProcessCollector(registry=self._registry)

    def begin(self) -> None:
        """A request has come."""
        self._requests.in_flight += 1

    def observe(self, record: RequestRecord) -> None:
        """A request has ended."""
        self._requests.observe(record)

    def families(self) -> list[Metric]:
        """All metrics as they are now."""
        return list(self._registry.collect())

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """See `Exposition`."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class Tallies:
    """One histogram for each combination of label values that was seen."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._tallies: dict[Labels, Tally] = {}

    def add(self, labels: Labels, value: float | None) -> None:
        """Count a value; None is none."""
        if value is not None:
            self._tallies.setdefault(labels, Tally(self.bounds)).add(value)

    def family(self, name: str, help: str, labels: Iterable[str]) -> Metric:
        return histograms(name, help, labels, self._tallies.items())


class RequestFigures(Collector):
    """What is counted of requests, on the event loop."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._answered: Counter[Labels] = Counter()
        self._errors: Counter[Labels] = Counter()
        self._prompt_tokens: Counter[Labels] = Counter()
        self._generated_tokens: Counter[Labels] = Counter()
        self._duration = Tallies(REQUEST_SECONDS)
        self._queue = Tallies(REQUEST_SECONDS)
        self._inference = Tallies(REQUEST_SECONDS)
        self._first_token = Tallies(REQUEST_SECONDS)
        self._per_token = Tallies(TOKEN_SECONDS)

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self.in_flight -= 1
        route, model = record.route, record.model
        self._answered[route, record.method, model, str(record.status)] += 1
        if record.error_type:
            self._errors[route, model, record.error_type] += 1
        self._duration.add((route, model), record.seconds)
        if record.ticket is None:
            return
        self._prompt_tokens[model,] += record.prompt_tokens
        self._generated_tokens[model,] += record.generated_tokens
        for tallies, span in ((self._queue, record.queue), (self._inference, record.inference)):
            tallies.add((model,), span and span[1] - span[0])
        self._first_token.add((model,), record.first_token_seconds)
        self._per_token.add((model,), record.seconds_per_token)

    def collect(self) -> Iterator[Metric]:
        yield counters(
            "seqserve_requests",
            "Requests that have ended.",
            ("route", "method", "model", "status"),
            self._answered.items(),
        )
        yield gauges(
            "seqserve_requests_in_flight",
            "Requests that have come and not ended.",
            (),
            [((), self.in_flight)],
        )
        yield counters(
            "seqserve_request_errors",
            "Requests that ended with an error, in a stream's last event too.",
            ("route", "model", "error_type"),
            self._errors.items(),
        )
        yield self._duration.family(
            "seqserve_request_duration_seconds",
            "From a request's arrival to the end of its response.",
            ("route", "model"),
        )
        for name, help, tallies in (
            ("request_queue", "From acceptance to the first step that ran for it.", self._queue),
            ("request_inference", "From that step to the last.", self._inference),
            ("time_to_first_token", "From arrival to the first token.", self._first_token),
            ("time_per_output_token", "Between two tokens of a sequence.", self._per_token),
        ):
            yield tallies.family(f"seqserve_{name}_seconds", help, ("model",))
        yield counters(
            "seqserve_prompt_tokens",
            "Source tokens of ended requests.",
            ("model",),
            self._prompt_tokens.items(),
        )
        yield counters(
            "seqserve_generated_tokens",
            "Tokens generated for ended requests.",
            ("model",),
            self._generated_tokens.items(),
        )


class ModelCollector(Collector):
    """Reads what the engines have counted when it is asked."""

    def __init__(self, models: Catalogue[Entry]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        versions = (__version__, str(torch.__version__), platform.python_version())
        yield gauges(
            "seqserve_build_info", "Always 1.", ("version", "torch", "python"), [(versions, 1)]
        )
        yield from self._states()
        served = self._models.here
        yield from self._loads(served)
        yield from self._steps(served)
        yield from self._encoder_caches(served)
        yield from self._device_memory(served)

    def _states(self) -> Iterator[Metric]:
        served = self._models.here
        ready = {model.name for model in self._models.served if model.state == "ready"}
        yield gauges(
            "seqserve_model_ready",
            "Whether a model can answer.",
            ("model",),
            [((name,), int(name in ready)) for name in self._models.names],
        )
        yield gauges(
            "seqserve_model_info",
            "Always 1.",
            ("model", "family", "dtype", "device"),
            [((m.name, m.family, m.dtype, m.device), 1) for m in served],
        )
        yield counters(
            "seqserve_engine_restarts",
            "How often an engine was started anew after it broke down.",
            ("model",),
            [((model.name,), model.runner.restarts) for model in served],
        )

    def _loads(self, served: list[ServedModel]) -> Iterator[Metric]:
        read: tuple[tuple[str, str, Callable[[ServedModel], float]], ...] = (
            ("queue_length", "Inputs that wait for a row.", lambda m: m.runner.waiting),
            (
                "queue_oldest_seconds",
                "Age of the oldest request of which nothing has been computed.",
                lambda m: m.runner.oldest_waiting,
            ),
            (
                "outstanding_inputs",
                "Inputs accepted and not yet answered.",
                lambda m: m.runner.outstanding,
            ),
            ("outstanding_inputs_limit", "max_queue.", lambda m: m.runner.admission.works.limit),
            (
                "outstanding_tokens",
                "Tokens that these may come to: sources, prefixes and new ones.",
                lambda m: m.runner.admission.tokens.taken,
            ),
            (
                "outstanding_tokens_limit",
                "max_queue_tokens.",
                lambda m: m.runner.admission.tokens.limit,
            ),
            ("rows", "Rows decoded side by side.", lambda m: m.runner.running),
            ("rows_limit", "max_rows.", lambda m: len(m.figures.rows_per_step) - 1),
        )
        for name, help, value in read:
            values = [((model.name,), value(model)) for model in served]
            yield gauges(f"seqserve_{name}", help, ("model",), values)

    def _steps(self, served: list[ServedModel]) -> Iterator[Metric]:
        yield histograms(
            "seqserve_step_rows",
            "Rows decoded by a step that decoded any.",
            ("model",),
            [((model.name,), _rows_tally(model.figures.rows_per_step)) for model in served],
        )
        yield histograms(
            "seqserve_step_padding_ratio",
            "Share of padding: in sources that join, in the rows' target positions at each step.",
            ("model", "side"),
            [((m.name, side), tally) for m in served for side, tally in m.figures.padding.items()],
        )
        yield histograms(
            "seqserve_step_seconds",
            "Time of an engine's step.",
            ("model",),
            [((model.name,), model.figures.step_seconds) for model in served],
        )
        yield histograms(
            "seqserve_step_phase_seconds",
            "Time of a step's phases: encode, forward, decode, sample.",
            ("model", "phase"),
            [
                ((model.name, phase), tally)
                for model in served
                for phase, tally in model.figures.phase_seconds.items()
            ],
        )
        yield counters(
            "seqserve_forward_passes",
            "Teacher-forced passes run.",
            ("model",),
            [((model.name,), model.figures.forward_passes) for model in served],
        )
        yield counters(
            "seqserve_guessed_tokens",
            "Tokens guessed ahead of their step.",
            ("model",),
            [((model.name,), model.figures.guessed_tokens) for model in served],
        )
        yield counters(
            "seqserve_foretold_tokens",
            "Those among them that were right: each saved its row a step.",
            ("model",),
            [((model.name,), model.figures.foretold_tokens) for model in served],
        )

    def _encoder_caches(self, served: list[ServedModel]) -> Iterator[Metric]:
        caches = [
            ((m.name,), cache) for m in served if (cache := m.runner.encoder_cache) is not None
        ]
        yield counters(
            "seqserve_encoder_cache_hits",
            "Sources found in the encoder cache.",
            ("model",),
            [(labels, cache.hits) for labels, cache in caches],
        )
        yield counters(
            "seqserve_encoder_cache_misses",
            "Sources not found in it.",
            ("model",),
            [(labels, cache.misses) for labels, cache in caches],
        )
        yield gauges(
            "seqserve_encoder_cache_bytes",
            "Memory that it holds.",
            ("model",),
            [(labels, cache.bytes) for labels, cache in caches],
        )

    def _device_memory(self, served: list[ServedModel]) -> Iterator[Metric]:
        devices = {m.loaded.device for m in served if m.loaded.device.type == "cuda"}
        values = [
            ((str(device), kind), read(device))
            for device in sorted(devices, key=str)
            for kind, read in (
                ("allocated", torch.cuda.memory_allocated),
                ("reserved", torch.cuda.memory_reserved),
            )
        ]
        yield gauges(
            "seqserve_device_memory_bytes",
            "Memory of a CUDA device that torch has allocated, and reserved.",
            ("device", "kind"),
            values,
        )


# --- families -----------------------------------------------------------------------------------


def counters(
    name: str, help: str, labels: Iterable[str], values: Iterable[tuple[Labels, float]]
) -> Metric:
    """Counters of one name; `_total` is added to it."""
    family = CounterMetricFamily(name, help, labels=tuple(labels))
    for given, value in values:
        family.add_metric(given, value)
    return family


def gauges(
    name: str, help: str, labels: Iterable[str], values: Iterable[tuple[Labels, float]]
) -> Metric:
    """Gauges of one name."""
    family = GaugeMetricFamily(name, help, labels=tuple(labels))
    for given, value in values:
        family.add_metric(given, value)
    return family


def histograms(
    name: str, help: str, labels: Iterable[str], tallies: Iterable[tuple[Labels, Tally]]
) -> Metric:
    """Histograms of one name."""
    family = HistogramMetricFamily(name, help, labels=tuple(labels))
    for given, tally in tallies:
        bounds = [*(f"{bound:g}" for bound in tally.bounds), "+Inf"]
        buckets = list(zip(bounds, tally.cumulative(), strict=True))
        family.add_metric(given, buckets, tally.total)
    return family


def _rows_tally(rows_per_step: list[int]) -> Tally:
    """The exact counts in buckets that double: ``[rows]`` steps -> a histogram."""
    counts = list(rows_per_step)  # one copy: the engine goes on counting
    most = len(counts) - 1
    bounds = [2**power for power in range((most - 1).bit_length())]
    tally = Tally([*bounds, most])
    for rows, count in enumerate(counts):
        if rows:
            tally.add(rows, count)
    return tally
