"""The files of a model directory, looked at before any is read.

A directory may come from anywhere. Its files must lie in it, be files, and be of a size that such
files have; what is in them is for who reads them to judge.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from model.checkpoint import ModelError

TEXTS = frozenset({".json", ".model", ".spm", ".txt"})
"""Suffixes of what is read whole: configurations and tokenizers."""

LARGEST_TEXT = 256 * 2**20
"""Bytes of such a file. The largest vocabularies have some 35 MB."""

LARGEST_SIZE = 2**24
"""Of anything that a configuration counts: the largest vocabularies have some 250,000 entries."""


def check_files(directory: Path) -> None:
    """Refuse a directory with files that are not to be opened.

    Raises:
        ModelError: names a link that leads out of the directory (or to nothing), a pipe or device,
            or a file that is far too large for its kind.
    """
    homes = homes_of(directory)
    for path in sorted(directory.rglob("*")):
        check_inside(path, homes)
        if path.is_dir():
            continue
        if not path.is_file():  # to open a pipe would wait forever
            raise ModelError(f"{path}: neither a file nor a directory")
        size = path.stat().st_size
        if path.suffix in TEXTS and size > LARGEST_TEXT:
            raise ModelError(f"{path}: has {size} bytes, at most {LARGEST_TEXT} are read")


def homes_of(directory: Path) -> tuple[Path, ...]:
    """Where the files of a model directory may lie: in it.

    In a cache of the Hugging Face hub, ``models--NAME/snapshots/REVISION``, they are links into the
    `blobs` beside the snapshots, which belong to the same model.
    """
    own = directory.resolve()
    if own.parent.name == "snapshots":
        return own, own.parent.parent / "blobs"
    return (own,)


SUMS = "SHA256SUMS"
"""File of a model directory that vouches for others: lines as `sha256sum` writes them."""

SUM = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def check_sums(directory: Path) -> None:
    """Hold the files that the directory's `SHA256SUMS` lists against their hashes, if it has one.

    Raises:
        ModelError: names the file that is missing or differs, or the line that is no hash.
    """
    sums = directory / SUMS
    if not sums.is_file():
        return
    for number, line in enumerate(sums.read_text(errors="replace").splitlines(), 1):
        found = SUM.fullmatch(line)
        if not found:
            raise ModelError(
                f"{sums}, line {number}: expected a SHA-256 and a file, got {line!r:.80}"
            )
        expected, path = found[1], directory / found[2]
        if not path.is_file():
            raise ModelError(f"{path}: {SUMS} lists it, but there is no such file")
        check_inside(path, homes_of(directory))
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != expected:
            raise ModelError(
                f"{path}: not the file that {SUMS} names: its SHA-256 is {actual}, not {expected}"
            )


def check_inside(path: Path, homes: tuple[Path, ...]) -> None:
    """Refuse a path that leads elsewhere.

    Raises:
        ModelError: it does, or leads nowhere.
    """
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # no such file; links in a circle
        raise ModelError(f"{path}: a link that leads nowhere") from error
    if not any(real.is_relative_to(home) for home in homes):
        raise ModelError(f"{path}: leads out of the model's directory; copy the file into it")


def check_sizes(config: Mapping[str, Any], tensors: int) -> None:
    """Refuse a configuration that nobody could build, before anybody tries.

    Args:
        tensors: in the checkpoint; every layer has some.

    Raises:
        ModelError: names the key and its value.
    """
    for name, value in _counts(config):
        if value > LARGEST_SIZE:
            raise ModelError(f"{name} must be at most {LARGEST_SIZE}, got {value}")
        if "layer" in name and value > tensors:
            raise ModelError(f"{name} is {value}, but there are {tensors} tensors in all")


def _counts(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    return ((name, value) for name, value in config.items() if type(value) is int)
