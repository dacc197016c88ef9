"""Arguments of the deployment on Ray, how many replicas it wants, and figures of many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily, Metric
from pydantic import ValidationError

from service.cluster.arguments import Arguments, bounds
from service.cluster.autoscaling import OUTSTANDING, ByOutstandingInputs
from service.cluster.command import RayError, check, least_cpus
from service.cluster.metrics import MergedMetrics, merged
from service.settings import Settings


def context(target: int, outstanding: dict[str, float] | None) -> Any:
    """What Ray tells of a deployment."""
    told = {} if outstanding is None else {OUTSTANDING: outstanding}
    return SimpleNamespace(target_num_replicas=target, aggregated_metrics=told)


@pytest.mark.parametrize("text", ["1:1", "1:4", "3:20"])
def test_bounds_are_two_numbers(text: str) -> None:
    assert ":".join(map(str, bounds(text))) == text


@pytest.mark.parametrize("text", ["", "3", "0:2", "4:2", "1:", "a:b", "1:2:3", "-1:2"])
def test_other_bounds_are_refused_by_what_was_given(text: str) -> None:
    with pytest.raises(ValidationError, match=r"autoscale must be MIN:MAX .* got"):
        Arguments(autoscale=text)


def test_replicas_are_counted_one_way() -> None:
    with pytest.raises(ValidationError, match="takes the place of replicas"):
        Arguments(replicas=2, autoscale="1:2")


def test_how_to_autoscale_is_said_with_how_far() -> None:
    quick = {"downscale_delay_s": 10}
    assert Arguments(autoscale="1:2", autoscaling=quick).autoscaling == quick
    with pytest.raises(ValidationError, match="give autoscale too"):
        Arguments(autoscaling=quick)


def test_a_replica_is_wanted_for_every_so_many_inputs() -> None:
    rule = ByOutstandingInputs(64)
    assert rule(context(1, {"a": 0.0})) == (0.0, {})
    assert rule(context(1, {"a": 160.0})) == (2.5, {})
    assert rule(context(2, {"a": 64.0, "b": 128.0})) == (3.0, {})


def test_nothing_changes_while_no_replica_has_told_anything() -> None:
    assert ByOutstandingInputs(64)(context(3, None)) == (3, {})


def test_what_makes_no_sense_on_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    two = Arguments(replicas=2)
    check(two, Settings())
    for settings, message in (
        (Settings(port=0), "--port must not be 0"),
        (Settings(device="cuda:1"), "--device must be auto, cpu or cuda"),
    ):
        with pytest.raises(RayError, match=message):
            check(two, settings)
    with pytest.raises(RayError, match="need 3 CPUs and this machine has 2"):
        check(Arguments(replicas=3), Settings())
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check(Arguments(replicas=3), Settings())  # that cluster may have more


def test_without_ray_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RayError, match=r"\[server,ray\]"):
        check(Arguments(), Settings())


def test_each_model_has_as_many_replicas() -> None:
    settings = Settings(models=("a=x", "b=y"))
    assert least_cpus(Arguments(replicas=3, cpus=0.5), settings) == 3.0
    assert least_cpus(Arguments(autoscale="2:9", cpus=1), settings) == 4.0


def family(name: str, **values: float) -> Metric:
    """A counter with a sample for each model."""
    counter = CounterMetricFamily(name, "Help.", labels=("model",))
    for model, value in values.items():
        counter.add_metric((model,), value)
    return counter


def test_figures_of_many_replicas_are_one_family_with_a_label() -> None:
    told = {"r2": [family("a", m=2)], "r1": [family("a", m=1, n=5), family("b", m=7)]}
    first, second = merged(told)
    assert [(s.name, s.labels, s.value) for s in first.samples] == [
        ("a_total", {"model": "m", "replica": "r1"}, 1),
        ("a_total", {"model": "n", "replica": "r1"}, 5),
        ("a_total", {"model": "m", "replica": "r2"}, 2),
    ]
    assert second.name == "b"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_merged_exposition_is_prometheus_text() -> None:
    async def gather() -> dict[str, list[Metric]]:
        return {"r1": [family("a", m=1)]}

    text, content_type = await MergedMetrics(gather).exposition("")
    assert content_type.startswith("text/plain")
    assert b'a_total{model="m",replica="r1"} 1.0\n' in text
