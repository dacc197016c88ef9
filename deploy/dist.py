"""Make a release of the version that seqserve/__init__.py names: make dist.

Everything goes to dist/: the sdist, which is the whole project; the wheel, which is built from it;
a bill of materials (CycloneDX) of each image; and SHA256SUMS. What was built is tested before it
gets there: some of the sdist's own tests in the directory that it unpacks to, the wheel in an
environment that has nothing else.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
LOCKS = ROOT / "deploy" / "locks"

QUICK = [
    *("tests/unit/seqserve", "tests/unit/test_packaging.py", "tests/unit/test_engine.py"),
    *("tests/api/test_generate.py", "tests/deploy"),
]
"""Tests of the unpacked sdist: some from the wire down to the engine, and of what is deployed."""

IMAGES = {"cpu": ("server", "cpu"), "gpu": ("server", "cuda"), "ray": ("ray", "cpu")}
"""Image -> its lock files, as in the Dockerfile."""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a command prints.

    Raises:
        SystemExit: it fails.
    """
    print(">", *command, flush=True)
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(done.stdout)
    return done.stdout


def build(out: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=ROOT)
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


def check_sdist(sdist: Path, directory: Path) -> None:
    """Run its tests where it unpacks, with nothing of the checkout on the path."""
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    (unpacked,) = directory.iterdir()
    where = (
        "import seqserve, service, model; print(*(p.__file__ for p in (seqserve, service, model)))"
    )
    found = run(sys.executable, "-c", where, cwd=unpacked, PYTHONPATH=str(unpacked)).split()
    assert all(Path(file).is_relative_to(unpacked) for file in found), found
    tests = [sys.executable, "-m", "pytest", "-q", *QUICK]
    print(run(*tests, cwd=unpacked, PYTHONPATH=str(unpacked)).splitlines()[-1])


def check_wheel(wheel: Path, directory: Path) -> None:
    """Install it where nothing else is, and ask it for its version."""
    venv.create(directory, with_pip=True)
    binaries = directory / "bin"
    run(binaries / "python", "-m", "pip", "install", "--quiet", wheel, cwd=directory)
    version = run(binaries / "seqserve", "--version", cwd=directory).strip()
    print(version)
    assert version == f"seqserve {wheel.name.split('-')[1]}", version
    run(binaries / "python", "-W", "error", "-c", "import seqserve", cwd=directory)


def write_bills(out: Path, version: str) -> None:
    """A bill of materials of each image: its packages with versions, licences and hashes."""
    for image, locks in IMAGES.items():
        requirements = out / "requirements.txt"
        requirements.write_text("".join((LOCKS / f"{lock}.txt").read_text() for lock in locks))
        name = out / f"seqserve-{version}-{image}.cdx.json"
        command = [sys.executable, "-m", "cyclonedx_py", "requirements", "--output-reproducible"]
        project = ["--pyproject", ROOT / "pyproject.toml", "--mc-type", "application"]
        run(*command, *project, "--output-file", name, requirements, cwd=ROOT)
        requirements.unlink()


def main() -> None:
    """Build, test, and only then replace what is in dist/."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "dist"
        sdist, wheel = build(out)
        check_sdist(sdist, Path(scratch) / "sdist")
        check_wheel(wheel, Path(scratch) / "bare")
        write_bills(out, wheel.name.split("-")[1])
        files = sorted(out.iterdir())
        sums = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in files]
        (out / "SHA256SUMS").write_text("".join(sums))
        shutil.rmtree(DIST, ignore_errors=True)
        shutil.copytree(out, DIST)
    print(*sorted(path.name for path in DIST.iterdir()), sep="\n")


if __name__ == "__main__":
    main()
