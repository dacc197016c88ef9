"""Tensors on disk, read one at a time.

Safetensors, whole or in shards with an index, or what torch.save wrote (`pytorch_model.bin`,
`.pt`), read with `weights_only=True`.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

Item = TypeVar("Item")

BARE = ("shared.", "encoder.", "decoder.")
"""What the names of a bare model begin with; all others are the head's."""


class ModelError(ValueError):
    """A model directory that cannot be served, with the reason for a person."""


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors of a model.

    Attributes:
        path: the file, or the index of several.
        shapes: every tensor's shape, known without reading any.
        read: the tensor of a name. Of a mapped file it is the file's own pages: no memory is taken
            for it until somebody writes to it.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """The weights of a model directory.

        Raises:
            ModelError: there are none, or the file cannot be read.
        """
        for name, read in NAMES.items():
            if (directory / name).exists():
                return read(directory / name)
        pickled = sorted([*directory.glob("*.pt"), *directory.glob("*.pth")])
        if len(pickled) == 1:
            return _open_pickle(pickled[0])
        found = ", ".join(path.name for path in pickled) or "none"
        raise ModelError(
            f"{directory}: expected {', '.join(NAMES)} or exactly one .pt file, found {found}"
        )

    def under(self, prefix: str) -> Checkpoint:
        """The same tensors, named as in a whole model.

        Files of a bare model (`BartModel`) lack what stands before all names but the head's, which
        some files hold beside it all the same.

        Args:
            prefix: a family's; empty where it has none.
        """
        bare = any(name.startswith("encoder.") for name in self.shapes)
        if not prefix or not bare or any(name.startswith(prefix) for name in self.shapes):
            return self
        origins = {prefix + name if name.startswith(BARE) else name: name for name in self.shapes}
        shapes = {name: self.shapes[origin] for name, origin in origins.items()}
        return replace(self, shapes=shapes, read=lambda name: self.read(origins[name]))


def _open_safetensors(path: Path) -> Checkpoint:
    try:
        file: Any = safe_open(path, framework="pt")
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a readable safetensors file: {error}") from error
    # `safetensors.torch.save_model` stores a tied tensor once and says so: {"left out": "kept"}.
    tied = {name: kept for name, kept in metadata.items() if name not in stored and kept in stored}
    origins = _without_prefix({name: name for name in stored} | tied)
    shapes = {name: stored[origin] for name, origin in origins.items()}
    return Checkpoint(path, shapes, lambda name: file.get_tensor(origins[name]))


def _open_pickle(path: Path) -> Checkpoint:
    try:
        # Files of torch before 1.6 are no zip archives and cannot be mapped into memory.
        mapped = zipfile.is_zipfile(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path}: holds other things than plain tensors, or is no file of torch.save at all; "
            "save model.state_dict() and nothing else"
        ) from error
    except Exception as error:  # a damaged file makes torch and pickle raise almost anything
        raise ModelError(f"{path}: not a readable file of torch.save: {error!r}") from error
    tensors = _without_prefix(_unwrap(path, loaded))
    size = path.stat().st_size
    for name, tensor in tensors.items():  # a view may repeat one number as often as it likes
        if tensor.numel() * tensor.element_size() > size:
            raise ModelError(f"{path}: {name} {list(tensor.shape)} is larger than its file")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Checkpoint(path, shapes, tensors.__getitem__)


def _open_shards(path: Path, open_shard: Callable[[Path], Checkpoint]) -> Checkpoint:
    """Several files and an index that says which of them holds each tensor."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        files: dict[str, str] = dict(index["weight_map"])
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise ModelError(f"{path}: not an index with a weight_map: {error!r}") from error
    shards = {name: open_shard(_inside(path, name)) for name in sorted(set(files.values()))}
    complaints = [
        f"{name} is not in {file}"
        for name, file in files.items()
        if name not in shards[file].shapes
    ]
    homes: dict[str, Checkpoint] = {}
    for file, shard in shards.items():
        complaints += [f"{name} is in {file} as well" for name in shard.shapes if name in homes]
        homes |= dict.fromkeys(shard.shapes, shard)
    if complaints:
        raise ModelError(f"{path}: {_listed(complaints)}")
    shapes = {name: shard.shapes[name] for name, shard in homes.items()}
    return Checkpoint(path, shapes, lambda name: homes[name].read(name))


def _inside(index: Path, name: object) -> Path:
    """A shard's path. Only its name is judged here; see `model.files` for links."""
    if not isinstance(name, str) or not name:
        raise ModelError(f"{index}: weight_map must name files, got {name!r}")
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts:
        raise ModelError(f"{index}: {name!r} lies outside the model's directory")
    path = index.parent / parts
    if not path.is_file():
        raise ModelError(f"{index}: there is no {name}")
    return path


NAMES: Mapping[str, Callable[[Path], Checkpoint]] = {
    "model.safetensors": _open_safetensors,
    "model.safetensors.index.json": lambda path: _open_shards(path, _open_safetensors),
    "pytorch_model.bin": _open_pickle,
    "pytorch_model.bin.index.json": lambda path: _open_shards(path, _open_pickle),
}
"""What a model's weights are called, first choice first, and what reads them."""


def _unwrap(path: Path, loaded: Any) -> dict[str, Tensor]:
    """Take a state dict out of `{"model": ...}`, where it lies in one."""
    if isinstance(loaded, dict) and isinstance(loaded.get("model"), dict):
        loaded = loaded["model"]
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
    ):
        raise ModelError(f"{path}: expected a dictionary of tensors, or one under 'model'")
    return loaded


def _without_prefix(named: dict[str, Item]) -> dict[str, Item]:
    """Names without the `module.` that DataParallel puts in front of all of them."""
    prefix = "module."
    if not all(name.startswith(prefix) for name in named):
        return named
    return {name.removeprefix(prefix): item for name, item in named.items()}


COMPLAINTS = 100
"""That a message holds; a file of another model would have thousands."""


def _listed(complaints: Sequence[str]) -> str:
    more = len(complaints) - COMPLAINTS
    rest = [f"and {more} more"] if more > 0 else []
    return "; ".join([*complaints[:COMPLAINTS], *rest])


def fill(
    network: nn.Module,
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    ignored: Mapping[str, tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype,
    copies: Mapping[str, str] | None = None,
    wide: Collection[str] = (),
    kept: Collection[str] = (),
) -> None:
    """Give every parameter its tensor; nothing missing, nothing left over.

    One tensor at a time, so that no more than one exists twice; none is copied that has its dtype
    and device already.

    Args:
        network: its parameters may lie on the meta device.
        names: parameter name -> tensor name.
        ignored: tensors that may be in the file and are not needed, with their shapes.
        copies: tensors that may be in the file and must equal another one.
        wide: parameters that stay float32 where `dtype` is float16, whose range they need.
        kept: parameters that stay as they are in the file, whatever `dtype` is.

    Raises:
        ModelError: names every missing, unexpected and misshaped tensor, and false copies.
    """
    parameters = dict(network.named_parameters())
    assert parameters.keys() == names.keys(), "a family names each of its parameters"
    expected = {name: tuple(parameters[ours].shape) for ours, name in names.items()}
    complaints = [
        *(f"missing: {name}" for name in expected if name not in checkpoint.shapes),
        *_unexpected(checkpoint.shapes, {**_copied(expected, copies or {}), **expected, **ignored}),
    ]
    complaints = complaints or list(_different(checkpoint, copies or {}))
    if complaints:
        raise ModelError(f"{checkpoint.path}: {_listed(complaints)}")
    aliases = _aliases(network)
    for parameter_name, tensor_name in names.items():
        tensor = checkpoint.read(tensor_name)
        if parameter_name not in kept:
            widened = dtype == torch.float16 and parameter_name in wide
            tensor = tensor.to(device, torch.float32 if widened else dtype)
        tensor = tensor.contiguous()
        filled = nn.Parameter(tensor, requires_grad=False)
        for module, attribute in aliases[id(parameters[parameter_name])]:
            setattr(module, attribute, filled)


def _unexpected(
    found: Mapping[str, tuple[int, ...]], allowed: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    for name, shape in found.items():
        if name not in allowed:
            yield f"unexpected: {name}"
        elif shape != allowed[name]:
            yield f"misshaped: {name} is {list(shape)}, expected {list(allowed[name])}"


def _copied(
    expected: Mapping[str, tuple[int, ...]], copies: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    return {copy: expected[original] for copy, original in copies.items()}


def _different(checkpoint: Checkpoint, copies: Mapping[str, str]) -> Iterator[str]:
    for copy, original in copies.items():
        if copy not in checkpoint.shapes:
            continue
        if not torch.equal(checkpoint.read(copy), checkpoint.read(original)):
            yield f"different: {copy} is tied to {original}, but does not equal it"


def _aliases(network: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each parameter is held; a tied one is held in several places."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in network.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, attribute))
    return places
