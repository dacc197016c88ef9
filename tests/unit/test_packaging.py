"""What is installed, built and deployed says the same thing everywhere, and the SDK stays light."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import seqserve

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, built without pip and so without a network."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        yield archive


def test_the_version_stands_in_one_place(wheel: zipfile.ZipFile) -> None:
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", seqserve.__version__)
    assert f"seqserve-{seqserve.__version__}.dist-info/METADATA" in wheel.namelist()
    assert importlib.metadata.version("seqserve") == seqserve.__version__, "run make setup"


def test_the_changelog_knows_the_version() -> None:
    assert f"## [{seqserve.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_wheel_holds_only_the_sdk(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert tops == {"seqserve", f"seqserve-{seqserve.__version__}.dist-info"}
    assert "seqserve/py.typed" in wheel.namelist()


def test_the_wheel_asks_for_pydantic_and_httpx_alone(wheel: zipfile.ZipFile) -> None:
    metadata = wheel.read(f"seqserve-{seqserve.__version__}.dist-info/METADATA").decode()
    required = re.findall(r"^Requires-Dist: ([a-z0-9-]+)(?!.*extra ==).*$", metadata, re.MULTILINE)
    assert sorted(required) == ["httpx", "pydantic"]


def test_importing_the_sdk_loads_nothing_of_the_server() -> None:
    # Not rich: httpx imports it where it finds it.
    server = ["torch", "fastapi", "numpy", "typer", "tokenizers", "model", "service"]
    code = f"import seqserve, sys; print([m for m in {server} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_compose_has_a_profile_with_volume_health_check_and_grace(kind: str) -> None:
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"][
        f"seqserve-{kind}"
    ]
    assert service["profiles"] == [kind]
    assert service["volumes"] == ["${MODELS_DIR:-./models}:/models:ro"]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["stop_grace_period"].endswith("s")


def test_compose_reserves_a_device_for_the_gpu_profile_only() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    (device,) = services["seqserve-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    assert "deploy" not in services["seqserve-cpu"]


def test_compose_waits_longer_for_the_server_than_the_server_drains() -> None:
    settings = pytest.importorskip("service.settings").Settings()
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    grace = int(compose["services"]["seqserve-cpu"]["stop_grace_period"].removesuffix("s"))
    assert grace > settings.grace


def instructions() -> list[str]:
    """The Dockerfile's instructions, continued lines joined, without comments."""
    text = (ROOT / "Dockerfile").read_text()
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return [line for line in lines.replace("\\\n", " ").splitlines() if line.strip()]


def test_the_image_serves_as_an_unprivileged_user_that_gets_signals() -> None:
    final = instructions()[-1 - instructions()[::-1].index("FROM base") :]
    assert "USER 10001" in final
    assert 'ENTRYPOINT ["seqserve"]' in final
    assert any(line.startswith("HEALTHCHECK") for line in final)
    assert any(line.startswith("VOLUME /models") for line in final)


def test_the_image_copies_every_package_the_server_imports() -> None:
    copied = {line.split()[1].rstrip("/") for line in instructions() if line.startswith("COPY ")}
    assert {"seqserve", "model", "service", "weights", "pyproject.toml"} <= copied
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    for name in ("seqserve", "model", "service", "weights", "deploy/wheels"):
        assert f"!{name}" in sent


def test_make_passes_port_and_arguments_on() -> None:
    """`make -n` prints the commands; the stamp counts as old, so only the last line matters."""
    command = ["make", "-n", "serve", "PORT=9000", "ARGS=--model mine=DIR"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    last = done.stdout.splitlines()[-1]
    assert last == ".venv/bin/seqserve serve --port 9000 --model mine=DIR"


def test_make_names_the_python_it_needs_when_it_finds_an_older_one(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n')
    old.chmod(0o755)
    (tmp_path / "pyproject.toml").touch()
    command = ["make", "-f", str(ROOT / "Makefile"), "setup", f"PYTHON={old}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "Python 3.9.2" in done.stderr


def test_ci_runs_the_readme_s_own_command() -> None:
    script = ROOT / ".ci" / "run"
    assert script.read_text().splitlines()[-1] == "make test"
    assert os.access(script, os.X_OK)
