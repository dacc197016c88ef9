"""The compose file as Docker Compose itself reads it: schema, variables, profiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMPOSE = Path(sys.executable).with_name("docker-compose")
FILE = ROOT / "docker-compose.yml"


def read(file: Path, *profiles: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The file after Compose has checked it and filled in its variables."""
    if not COMPOSE.exists():
        pytest.skip("needs Docker Compose: make deploy-tools")
    chosen = [argument for profile in profiles for argument in ("--profile", profile)]
    command = [str(COMPOSE), "--file", str(file), *chosen, "config", "--format", "json"]
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def services(*profiles: str, **variables: str) -> dict[str, Any]:
    done = read(FILE, *profiles, **variables)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


def test_each_profile_has_its_services() -> None:
    assert services("cpu").keys() == {"seqserve-cpu"}
    assert services("gpu").keys() == {"seqserve-gpu"}
    watched = services("cpu", "monitoring")
    assert watched.keys() == {"seqserve-cpu", "prometheus", "grafana"}


def test_variables_change_what_the_page_says_they_do() -> None:
    (server,) = services(
        "cpu", ARGS="--model mine=/models/mine", PUBLISH="0.0.0.0:9000", MODELS_DIR="/srv/models"
    ).values()
    assert server["command"] == ["serve", "--device", "cpu", "--model", "mine=/models/mine"]
    assert server["ports"][0]["published"] == "9000"
    assert server["ports"][0]["host_ip"] == "0.0.0.0"
    assert server["volumes"][0]["source"] == "/srv/models"
    assert server["volumes"][0]["read_only"]


def test_each_profile_builds_its_torch() -> None:
    assert "args" not in services("cpu")["seqserve-cpu"]["build"]
    assert services("gpu")["seqserve-gpu"]["build"]["args"]["TORCH"] == "cuda"
    own = services("gpu", TORCH="", TORCH_INDEX="https://index.example")["seqserve-gpu"]
    assert own["build"]["args"] == {"TORCH": "", "TORCH_INDEX": "https://index.example"}


def test_compose_would_tell_of_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "docker-compose.yml"
    file.write_text(FILE.read_text().replace("stop_grace_period:", "stop_grace:"))
    done = read(file, "cpu")
    assert done.returncode != 0
    assert "stop_grace" in done.stderr
