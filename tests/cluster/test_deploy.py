"""deploy/ray/config.yaml on a cluster that `ray start` has started, as docs/scaling.md says."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from seqserve import Client
from service.cluster.arguments import Arguments
from tests.cluster.serving import ENVIRONMENT, free_port
from tests.e2e.conftest import PATIENCE, ROOT

CONFIG = ROOT / "deploy" / "ray" / "config.yaml"
SCALING = ROOT / "docs" / "scaling.md"


@dataclass(frozen=True)
class Deployed:
    """A cluster of one node: where it serves, and what its commands are told."""

    url: str
    dashboard: str
    environment: dict[str, str]

    def serve(self, *words: str) -> str:
        """What `serve ...` writes; it must end well."""
        told = subprocess.run(
            [command("serve"), *words, "--address", self.dashboard],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert told.returncode == 0, told.stdout + told.stderr
        return told.stdout


def command(name: str) -> str:
    """Of the environment that runs this."""
    return str(Path(sys.executable).with_name(name))


@pytest.fixture(scope="module")
def deployed(request: pytest.FixtureRequest) -> Iterator[Deployed]:
    """The configuration as it is, but for its port, which may be taken here."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs the extra ray")
    if not request.config.getoption("on_ray"):
        pytest.skip("starts a Ray cluster: asked for with --on-ray")
    port, ray_port, dashboard_port = free_port(), free_port(), free_port()
    # A short path: the names of Unix sockets have 107 bytes at most.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-") as directory:
        config = Path(directory) / "config.yaml"
        text, replaced = re.subn(r"(?m)^  port: 8000$", f"  port: {port}", CONFIG.read_text())
        assert replaced == 1
        config.write_text(text)
        environment = {**os.environ, **ENVIRONMENT, "RAY_TMPDIR": directory}
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        words = ["start", "--head", "--block", "--port", str(ray_port), "--num-cpus", "2"]
        with subprocess.Popen(
            [command("ray"), *words, "--dashboard-port", str(dashboard_port)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as cluster:
            found = Deployed(
                f"http://127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}", environment
            )
            try:
                wait_for_dashboard(found.dashboard, cluster)
                found.serve("deploy", str(config))
                yield found
                found.serve("shutdown", "--yes")
            finally:
                cluster.terminate()


def wait_for_dashboard(url: str, cluster: subprocess.Popen[bytes]) -> None:
    """Until the cluster takes commands."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            if httpx.get(f"{url}/api/serve/applications/", timeout=PATIENCE).status_code != 500:
                return
        except httpx.TransportError:
            assert time.monotonic() < deadline
        assert cluster.poll() is None, "ray start has ended"
        time.sleep(0.2)


def test_it_answers_and_its_status_says_that_all_replicas_run_on_ray(deployed: Deployed) -> None:
    deadline = time.monotonic() + PATIENCE
    with Client(deployed.url, timeout=PATIENCE) as client:
        while not client.ready():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert client.generate("cat").generated_text == "K AE T"
    while "RUNNING: 2" not in (status := deployed.serve("status")):
        assert time.monotonic() < deadline, status
    (application,) = yaml.safe_load(status)["applications"].values()
    assert application["status"] == "RUNNING"


def test_the_page_s_defaults_are_those_of_the_arguments() -> None:
    told = dict(re.findall(r"(?m)^\| `(\w+)` \| (.*?) ?\|", SCALING.read_text()))
    for name, field in Arguments.model_fields.items():
        default = field.get_default(call_default_factory=True)
        said = {"": None, "none": None}.get(told[name], told[name])
        assert said == (f"{default:g}" if isinstance(default, int | float) else None), name


def test_the_configuration_names_the_replicas_and_leaves_defaults_as_they_are() -> None:
    (application,) = yaml.safe_load(CONFIG.read_text())["applications"]
    given = application["args"]
    assert Arguments(**given) == Arguments(replicas=2, settings=given["settings"])
