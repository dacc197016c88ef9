"""GET /metrics of many replicas: the figures of all, each with the replica that it is of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

Gather = Callable[[], Awaitable[Mapping[str, Sequence[Metric]]]]
"""Asks all replicas: name of a replica -> its metrics."""


class MergedMetrics:
    """Answers for all replicas, whichever of them was asked."""

    def __init__(self, gather: Gather) -> None:
        self._gather = gather

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """See `service.metrics.Exposition`."""
        encode, content_type = choose_encoder(accept)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Gathered(merged(await self._gather())))
        return encode(registry), content_type


class Gathered(Collector):
    """Metrics that were collected elsewhere."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def merged(replicas: Mapping[str, Sequence[Metric]]) -> list[Metric]:
    """One family of each name, its samples with the label `replica`."""
    families: dict[str, Metric] = {}
    for replica in sorted(replicas):
        for metric in replicas[replica]:
            family = families.setdefault(
                metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit)
            )
            family.samples += [
                sample._replace(labels={**sample.labels, "replica": replica})
                for sample in metric.samples
            ]
    return list(families.values())
