"""What happens to requests while replicas and nodes die or change in number, and versions change.

A cluster of several Ray nodes on this machine: a head with the proxy, and others with the replicas,
each with room for all of them. Callers ask without a pause and without the SDK's retries, so that
every error is seen; whoever gets one asks again with them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

from model.config import EngineConfig
from model.engine import Engine
from model.loader import load_model
from seqserve import Client
from seqserve.errors import SeqserveError
from seqserve.schemas import GenerateRequest, GenerateResponse
from service.batch import Batch
from service.cluster.command import APPLICATION
from service.cluster.deployments import build
from service.served import generator_of
from tests.cluster.report import Episode
from tests.cluster.serving import free_port

REPLICAS = 2
NODES = 2
"""Beside the head; each has room for all replicas."""

NODE_TRIES = 4
CALLERS = 4
BUSY_CALLERS = 12
"""So many keep more than one row waiting, of a model that has one row."""

QUICKLY = {
    "upscale_delay_s": 2.0,
    "downscale_delay_s": 10.0,
    "metrics_interval_s": 1.0,
    "look_back_period_s": 5.0,
}
"""Ray's delays of autoscaling, which are minutes."""

CALM = 5.0
"""Seconds of load before and after each fault."""

PATIENCE = 300.0
"""Seconds for what takes a few: the machine may be busy with other things."""

MODEL = "words"
WORDS = ["".join(letters) for letters in itertools.product("abcdef", repeat=3)]

Answers = dict[str, str]
"""Word -> what a version of the model says to it."""


class Load:
    """Callers who ask one after the other until they are stopped.

    Args:
        versions: answers, any of which is right.
    """

    def __init__(
        self, url: str, versions: list[Answers], episode: Episode, callers: int = CALLERS
    ) -> None:
        self._url = url
        self._versions = versions
        self._episode = episode
        self._over = threading.Event()
        self._words = itertools.cycle(WORDS)
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._call) for _ in range(callers)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Callers ask inside the block; all have got their last answer when it is left."""
        for thread in self._threads:
            thread.start()
        try:
            time.sleep(CALM)
            yield
            time.sleep(CALM)
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(PATIENCE)
            if any(thread.is_alive() for thread in self._threads):
                self._episode.lost.append("a request hangs")

    def _call(self) -> None:
        with (
            Client(self._url, retries=0, timeout=PATIENCE) as once,
            Client(self._url, retries=20, timeout=PATIENCE) as again,
        ):
            while not self._over.is_set():
                with self._lock:
                    word = next(self._words)
                began = time.perf_counter()
                try:
                    answer = once.generate(word)
                except SeqserveError as error:
                    answer = self._once_more(again, word, error)
                with self._lock:
                    self._episode.seconds.append(time.perf_counter() - began)
                    told = answer.generated_text if answer else None
                    if answer and told not in {version[word] for version in self._versions}:
                        self._episode.wrong += 1

    def _once_more(self, client: Client, word: str, first: SeqserveError) -> Any:
        kind = f"{first.status} {first.error_type}" if first.status else first.error_type
        with self._lock:
            self._episode.errors[kind] += 1
        try:
            return client.generate(word)
        except SeqserveError as error:
            with self._lock:
                self._episode.lost.append(f"{type(error).__name__}: {error.message}")
            return None


class Faults:
    """A cluster that serves, and what is done to it.

    Args:
        versions: directories of the model's versions.
    """

    def __init__(self, versions: list[Path]) -> None:
        self._versions = versions
        self._port = free_port()
        self._cluster = Cluster()
        self._start_node(num_cpus=0, include_dashboard=False, gcs_server_port=free_port())
        self._nodes = [self._start_node(num_cpus=REPLICAS) for _ in range(NODES)]
        ray.init(address=self._cluster.address)
        serve.start(proxy_location="HeadOnly", http_options={"port": self._port})
        self.url = f"http://127.0.0.1:{self._port}"

    def _start_node(self, **options: Any) -> Any:
        """A node; a busy machine may need more than the half minute that Ray gives one to start."""
        for tries_left in reversed(range(NODE_TRIES)):
            try:
                return self._cluster.add_node(**options)
            except Exception:  # Ray raises nothing more specific
                if not tries_left:
                    raise
        raise AssertionError

    def close(self) -> None:
        """End the cluster."""
        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()

    def deploy(self, version: int, replicas: int = REPLICAS) -> None:
        """Have a version run, and wait until nothing else does."""
        self._run(version, {}, {"replicas": replicas})
        self.wait_for(replicas)

    def autoscale(self) -> None:
        """Have as many replicas run as the load needs, each of which decodes one row."""
        scaling = {"autoscale": f"1:{REPLICAS}", "autoscaling": QUICKLY}
        self._run(0, {"max_rows": 1, "max_beams": 1}, scaling)
        self.wait_for(1)

    def _run(self, version: int, settings: dict[str, Any], arguments: dict[str, Any]) -> None:
        model = f"{MODEL}={self._versions[version]}"
        given = {"settings": {"models": [model], "threads": 1, **settings}, "cpus": 1, **arguments}
        serve.run(build(given), name=APPLICATION)

    def kill_replica(self) -> None:
        """As if its process had crashed."""
        names = ray.util.list_named_actors(all_namespaces=True)
        replica = next(each for each in names if each["name"].startswith("SERVE_REPLICA::"))
        ray.kill(ray.get_actor(replica["name"], namespace=replica["namespace"]))
        self.wait_for(REPLICAS, after_loss=True)

    def kill_node(self) -> None:
        """As if the machine of a replica had lost its power."""
        total = ray._private.state.total_resources_per_node()
        left = ray._private.state.available_resources_per_node()
        busy = {node for node in left if left[node].get("CPU", 0) < total[node].get("CPU", 0)}
        node = next(each for each in self._nodes if each.node_id in busy)
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)
        self.wait_for(REPLICAS, after_loss=True)

    def wait_for(self, replicas: int, after_loss: bool = False) -> None:
        """Until so many run, and no others are there.

        Args:
            after_loss: first wait until it is not so.
        """
        deadline = time.monotonic() + PATIENCE
        lost = not after_loss
        while time.monotonic() < deadline:
            states = self._states()
            lost = lost or states != {"RUNNING": replicas}
            if lost and states == {"RUNNING": replicas}:
                return
            time.sleep(0.1)
        raise TimeoutError(f"wanted {replicas} replicas, have {states}")

    def _states(self) -> dict[str, int]:
        (deployment,) = serve.status().applications[APPLICATION].deployments.values()
        return {str(getattr(k, "value", k)): n for k, n in deployment.replica_states.items() if n}


def answers_of(directory: Path) -> Answers:
    """What a model says to each word, computed here and without Ray."""
    loaded = load_model(directory, "cpu")
    batch = Batch(generator_of(loaded), Engine(loaded, EngineConfig()), window=len(WORDS))
    replies = batch.run(GenerateRequest(inputs=word) for word in WORDS)
    told = [reply.generated_text for reply in replies if isinstance(reply, GenerateResponse)]
    return dict(zip(WORDS, map(str, told), strict=True))


def run(versions: list[Path]) -> list[Episode]:
    """All episodes, one after the other, on one cluster."""
    first, second = map(answers_of, versions)
    faults = Faults(versions)
    try:
        faults.deploy(0)
        episodes = [
            _episode("none", faults, [first], lambda: time.sleep(2 * CALM)),
            _episode("a replica is killed", faults, [first], faults.kill_replica, harmless=False),
            _episode("a node is killed", faults, [first], faults.kill_node, harmless=False),
            _episode("one replica is taken away", faults, [first], lambda: faults.deploy(0, 1)),
        ]
        faults.deploy(0)
        roll_out = partial(faults.deploy, 1)
        episodes.append(
            _episode("another version is rolled out", faults, [first, second], roll_out)
        )
        return episodes + _autoscaling(faults, first)
    finally:
        faults.close()


def _autoscaling(faults: Faults, answers: Answers) -> list[Episode]:
    faults.autoscale()
    more, fewer = (partial(faults.wait_for, replicas) for replicas in (REPLICAS, 1))
    return [
        _episode("load rises, and a replica is added", faults, [answers], more, BUSY_CALLERS),
        _episode("load falls, and it is taken away", faults, [answers], fewer, callers=1),
    ]


def _episode(
    name: str,
    faults: Faults,
    versions: list[Answers],
    fault: Callable[[], object],
    callers: int = CALLERS,
    harmless: bool = True,
) -> Episode:
    episode = Episode(name, harmless=harmless)
    with Load(faults.url, versions, episode, callers).running():
        began = time.perf_counter()
        fault()
        episode.recovered = time.perf_counter() - began
    return episode
