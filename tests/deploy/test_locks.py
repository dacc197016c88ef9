"""The image's lock files: complete, hashed, and within what pyproject.toml allows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LOCKS = {path.stem: path for path in (ROOT / "deploy" / "locks").glob("*.txt")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINUX = {"sys_platform": "linux", "platform_machine": "x86_64", "python_version": "3.11"}


def locked(*names: str) -> dict[str, Requirement]:
    """Name -> what the lock files install with Python 3.11 on Linux."""
    lines = [
        line.split(" \\")[0]
        for name in names
        for line in LOCKS[name].read_text().splitlines()
        if re.match(r"[a-z]", line)
    ]
    found = [Requirement(line) for line in lines]
    version = LINUX | {"python_full_version": "3.11.9"}
    return {r.name: r for r in found if r.marker is None or r.marker.evaluate(version)}


def version(requirement: Requirement) -> str:
    (pin,) = requirement.specifier
    assert pin.operator == "==", f"{requirement} is not pinned"
    return pin.version


def test_images_have_their_locks() -> None:
    assert LOCKS.keys() == {"build", "server", "ray", "cpu", "cuda"}


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_is_pinned_with_hashes(name: str) -> None:
    for requirement in locked(name).values():
        assert version(requirement)
    blocks = re.split(r"\n(?=[a-z])", LOCKS[name].read_text())[1:]
    assert len(blocks) >= len(locked(name)) > 0
    for block in blocks:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}$", block.strip()), block.split()[0]


@pytest.mark.parametrize("torch", ["cpu", "cuda"])
@pytest.mark.parametrize("packages", ["server", "ray"])
def test_they_hold_what_the_project_asks_for(packages: str, torch: str) -> None:
    installed = locked(packages, torch)
    extras = PROJECT["optional-dependencies"]
    wanted = (
        PROJECT["dependencies"] + extras["server"] + (extras["ray"] if packages == "ray" else [])
    )
    for text in wanted:
        requirement = Requirement(text)
        pinned = version(installed[requirement.name])
        assert requirement.specifier.contains(pinned), f"{text}, but {pinned}: run make locks"


def test_both_builds_of_torch_are_the_same_version() -> None:
    cpu, cuda = (version(locked(name)["torch"]) for name in ("cpu", "cuda"))
    assert cpu == f"{cuda}+cpu"


def test_what_only_cuda_needs_is_in_its_file_alone() -> None:
    for name in ("server", "ray", "cpu", "build"):
        assert not [n for n in locked(name) if n.startswith(("nvidia-", "cuda-", "triton"))]
    assert any(n.startswith("nvidia-") for n in locked("cuda"))


def test_the_image_installs_nothing_that_is_not_locked() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert '--require-hashes -r "/locks/$PACKAGES.txt" -r "/locks/$TORCH.txt"' in dockerfile
    assert "--require-hashes --find-links /wheels -r /locks/build.txt" in dockerfile
    assert re.search(r"^ARG TORCH=cpu$", dockerfile, re.M)
