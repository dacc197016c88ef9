"""Write the lock files of the image anew: make locks.

uv resolves what pyproject.toml asks for, once for all Pythons and machines, with the SHA-256 of
every file that pip might take. torch and what only its CUDA builds need stand in files of their
own, because the CPU build comes from another index than all the rest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CPU_INDEX = os.environ.get("TORCH_INDEX") or "https://download.pytorch.org/whl/cpu"

UV = [sys.executable, "-m", "uv", "pip", "compile"]
ALL = ["--universal", "--python-version", "3.11", "--generate-hashes"]
PLAIN = ["--no-header", "--no-annotate", "--quiet"]

OF_TORCH = re.compile(r"(torch|triton|nvidia-[\w-]+|cuda-[\w-]+)==")
"""Requirements that go with a build of torch."""


def resolve(*arguments: str, requirements: str = "") -> list[str]:
    """Pinned requirements, each with its hashes, by name.

    Raises:
        SystemExit: there is no solution, or an index cannot be reached; uv says which.
    """
    command = [*UV, *ALL, *PLAIN, *arguments]
    done = subprocess.run(command, cwd=ROOT, input=requirements, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"refresh: {' '.join(arguments)}: {done.stderr.strip()}")
    return re.split(r"\n(?=\S)", done.stdout.strip())


def write(name: str, what: str, requirements: list[str]) -> None:
    """A lock file.

    Args:
        what: it holds, in words.
    """
    text = f"# {what}\n# Written by `make locks`.\n" + "\n".join(requirements) + "\n"
    (HERE / name).write_text(text)


def main() -> None:
    """Resolve everything, then write everything."""
    server = resolve("pyproject.toml", "--extra", "server")
    ray = resolve("pyproject.toml", "--extra", "server", "--extra", "ray")
    (torch,) = (r.split()[0] for r in server if r.startswith("torch=="))
    cpu = resolve("-", "--no-deps", "--index", CPU_INDEX, requirements=f"{torch}+cpu")
    build = resolve("-", requirements="hatchling")

    write("build.txt", "What builds the project.", build)
    write("server.txt", "What the server needs beside torch.", without_torch(server))
    write("ray.txt", "The same with Ray Serve.", without_torch(ray))
    write("cpu.txt", "torch for CPUs, from PyTorch's own index.", cpu)
    write("cuda.txt", "torch with CUDA, from PyPI.", [r for r in server if OF_TORCH.match(r)])


def without_torch(requirements: list[str]) -> list[str]:
    """Those that are the same with every build of torch."""
    return [r for r in requirements if not OF_TORCH.match(r)]


if __name__ == "__main__":
    main()
