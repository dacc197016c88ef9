"""The built wheel in a bare environment, for every Python here: a client, and nothing it needs not.

Skipped where pip cannot get pydantic and httpx.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import PATIENCE, ROOT, Server, serving

DECLARED: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "dependencies"
]
VERSIONS = ("3.11", "3.12", "3.13")

PROGRAM = """
import asyncio, sys
from seqserve import AsyncClient, Client
from seqserve.errors import InvalidRequestError

with Client() as client:
    assert client.ready() and client.models()[0].name == "g2p-en"
    print(client.generate("cat").generated_text)
    print([event.token.text for event in client.stream("cat")])
    print(type(client.logits("cat").logits).__name__, len(client.attention("cat").cross))
    print([a.generated_text for a in client.map(client.generate, ["left", "right"])])
    try:
        client.generate("cat", {"top_p": 2.0})
    except InvalidRequestError as error:
        print(error.param)


async def main():
    async with AsyncClient() as client:
        print((await client.score("cat", "K AE T")).tokens[0].text)


asyncio.run(main())
"""

PRINTED = """\
K AE T
['K', ' AE', ' T', '</s>']
list 3
['L EH F T', 'R AY T']
parameters.top_p
K
"""

NEEDED = """
import re
from importlib.metadata import distributions

known = {re.sub("[-_.]+", "-", d.name).lower(): d for d in distributions()}
needed, open_ = set(), ["seqserve"]
while open_:
    name = open_.pop()
    if name in known and name not in needed:
        needed.add(name)
        wanted = [r for r in known[name].requires or [] if "extra ==" not in r]
        open_ += [re.sub("[-_.]+", "-", re.match("[A-Za-z0-9._-]+", r)[0]).lower() for r in wanted]
print(*sorted(set(known) - needed))
"""
"""Prints what is installed and needed by nothing."""


def interpreter(version: str) -> Path | None:
    """A Python of this version, among pyenv's or on the path."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = shutil.which(f"python{version}")
    for each in [*sorted(pyenv.glob(f"{version}.*/bin/python")), *([found] if found else [])]:
        probe = [each, "-c", f"import sys; sys.exit(sys.version[:4] != '{version}')"]
        if subprocess.run(probe, capture_output=True, timeout=PATIENCE).returncode == 0:
            return Path(each)
    return None


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without pip and so without a network."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE)
    return next(out.glob("*.whl"))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_alone_is_a_working_client(
    version: str, wheel: Path, server: Server, tmp_path: Path
) -> None:
    base = interpreter(version)
    if base is None:
        pytest.skip(f"there is no Python {version} here")
    environment = tmp_path / "bare"
    subprocess.run([base, "-m", "venv", "--without-pip", environment], check=True, timeout=PATIENCE)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    install = [*pip, "install", "--quiet", "--no-compile", "--retries", "0", "--timeout", "15"]
    got = subprocess.run(
        [*install, *DECLARED], capture_output=True, text=True, timeout=2 * PATIENCE
    )
    if got.returncode:
        pytest.skip(f"pip cannot get {' and '.join(DECLARED)}: {got.stderr.splitlines()[-1]}")
    alone = [*install, "--no-index", wheel]  # fails where the wheel asks for more
    subprocess.run(alone, check=True, timeout=PATIENCE)

    def run(code: str) -> str:
        return subprocess.run(
            [python, "-I", "-W", "error", "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE,
            env={"SEQSERVE_URL": server.url, "PATH": os.environ["PATH"]},
        ).stdout

    assert run(PROGRAM) == PRINTED
    assert run(NEEDED).split() == []
