"""The simulation against what queueing theory says in closed form, and laws that any queue keeps.

With one row a replica is a queue with one server: M/M/1 where targets are exponential, M/D/1 where
all are equal. Shared cores are a queue of processor sharing.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.simulation import (
    RETRY,
    Arrival,
    Cluster,
    Cores,
    Loss,
    Outcome,
    Simulation,
    StepTime,
    percentile,
    poisson,
)

TICK = StepTime(base=0.001, row=0.0)
BATCHED = Cluster(StepTime(base=0.02, row=0.002, source=0.01), replicas=2, max_rows=16)


def queue(load: float, service: float, tokens: Callable[[random.Random], int]) -> list[Arrival]:
    """Requests that keep a server busy for this share of its time, each for `service` seconds."""
    rng = random.Random(5)
    at, made = 0.0, []
    for _ in range(30_000):
        at += rng.expovariate(load / service)
        made.append(Arrival(at, tokens(rng)))
    return made


def mean(outcomes: list[Outcome]) -> float:
    return statistics.mean(outcome.seconds for outcome in outcomes)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_row_and_exponential_targets_are_m_m_1(load: float) -> None:
    service = 20.5 * TICK.base  # of targets around 20 tokens, rounded up
    arrivals = queue(load, service, lambda rng: math.ceil(rng.expovariate(1 / 20)))
    outcomes = Simulation(Cluster(TICK, max_rows=1)).run(arrivals)
    assert mean(outcomes) == pytest.approx(service / (1 - load), rel=0.06)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_row_and_equal_targets_are_m_d_1(load: float) -> None:
    service = 5 * TICK.base
    outcomes = Simulation(Cluster(TICK, max_rows=1)).run(queue(load, service, lambda rng: 5))
    waiting = load * service / (2 * (1 - load))  # Pollaczek and Khinchine
    assert mean(outcomes) == pytest.approx(service + waiting, rel=0.03)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_a_shared_core_is_a_queue_of_processor_sharing(load: float) -> None:
    cluster = Cluster(StepTime(0.0, 0.0), elsewhere=0.1, cores=1)
    outcomes = Simulation(cluster).run(queue(load, 0.1, lambda rng: 1))
    assert mean(outcomes) == pytest.approx(0.1 / (1 - load), rel=0.03)


def test_of_two_tasks_on_a_core_each_takes_twice_as_long() -> None:
    alone = Cluster(StepTime(0.0, 0.0), elsewhere=0.1, cores=1)
    two = [Arrival(0.0, 1), Arrival(0.0, 1)]
    assert [o.seconds for o in Simulation(alone).run(two)] == pytest.approx([0.2, 0.2])
    half = Simulation(replace(alone, cores=0.5)).run(two[:1])
    assert [o.seconds for o in half] == pytest.approx([0.2])
    later_half = Simulation(alone).run(two[:1], [Cores(0.04, 0.5)])
    assert [o.seconds for o in later_half] == pytest.approx([0.04 + 0.06 / 0.5])
    assert [o.seconds for o in Simulation(replace(alone, cores=2)).run(two)] == pytest.approx(
        [0.1, 0.1]
    )


def test_steps_are_shared_by_those_that_are_there_when_they_begin() -> None:
    cluster = Cluster(StepTime(base=1.0, row=0.1, source=0.01), max_rows=2)
    outcomes = Simulation(cluster).run([Arrival(0.0, 2), Arrival(0.5, 1), Arrival(0.6, 1)])
    first, second, third = sorted(outcomes, key=lambda outcome: outcome.at)
    assert first.seconds == pytest.approx(1.11 + 1.21)
    assert second.seconds == pytest.approx(1.11 + 1.21 - 0.5)  # joins the second step
    assert third.seconds == pytest.approx(1.11 + 1.21 + 1.11 - 0.6)  # both rows were taken


def test_every_request_is_answered_once_and_by_the_same_seed_in_the_same_time() -> None:
    arrivals = poisson(15, 60, seed=1)
    outcomes = Simulation(BATCHED, seed=2).run(arrivals)
    assert sorted(o.at for o in outcomes) == [arrival.at for arrival in arrivals]
    assert outcomes == Simulation(BATCHED, seed=2).run(arrivals)
    quickest = BATCHED.step.of(1)
    assert all(o.seconds >= quickest * 5 for o in outcomes)  # no target is shorter


def test_the_most_of_a_replica_is_what_it_does_when_it_is_swamped() -> None:
    arrivals = [Arrival(0.0, 20)] * 1600
    alone = replace(BATCHED, replicas=1)
    took = max(outcome.seconds for outcome in Simulation(alone).run(arrivals))
    assert 1600 / took == pytest.approx(BATCHED.step.most(16, 20), rel=0.001)


def test_more_replicas_are_never_slower() -> None:
    arrivals = poisson(20, 60, seed=3)
    means = [mean(Simulation(replace(BATCHED, replicas=n)).run(arrivals)) for n in (1, 2, 4, 8)]
    assert means == sorted(means, reverse=True)


def test_two_choices_beat_one() -> None:
    arrivals = poisson(60, 60, seed=4)
    eight = replace(BATCHED, replicas=8, max_rows=4)
    parts = [arrivals[n::8] for n in range(8)]  # by turns, each replica for itself
    alone = [o for part in parts for o in Simulation(replace(eight, replicas=1)).run(part)]
    assert mean(Simulation(eight).run(arrivals)) < mean(alone)


def test_what_a_lost_replica_had_begun_is_asked_again() -> None:
    cluster = Cluster(TICK, max_rows=4)
    (outcome,) = Simulation(cluster).run([Arrival(0.0, 100)], [Loss(at=0.05, back=3.5)])
    assert outcome.seconds == pytest.approx(0.05 + math.ceil(3.5) * RETRY + 0.1)


def test_no_request_is_lost_with_a_replica_and_all_is_well_later() -> None:
    arrivals = poisson(12, 160, seed=6)
    calm = Simulation(BATCHED).run(arrivals)
    outcomes = Simulation(BATCHED).run(arrivals, [Loss(at=60, back=20)])
    assert len(outcomes) == len(arrivals)
    assert percentile([o.seconds for o in outcomes if o.at < 50], 99) == pytest.approx(
        percentile([o.seconds for o in calm if o.at < 50], 99)
    )
    during = [o.seconds for o in outcomes if 58 < o.at < 80]
    later = [o.seconds for o in outcomes if o.at > 120]
    assert percentile(during, 99) > 1.2 * percentile(later, 99)


def test_requests_come_at_their_rate() -> None:
    arrivals = poisson(50, 200, seed=7)
    assert len(arrivals) == pytest.approx(50 * 200, rel=0.05)
    assert all(5 <= arrival.tokens <= 100 for arrival in arrivals)


def test_a_percentile_is_a_value_that_was_seen() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 50) == 2.0
    assert percentile([3.0, 1.0, 2.0, 4.0], 99) == 4.0
