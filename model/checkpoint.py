"""Tensors on disk, read one at a time: safetensors, or a `.pt` read with `weights_only=True`."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

Item = TypeVar("Item")


class ModelError(ValueError):
    """A model directory that cannot be served, with the reason for a person."""


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors of a file.

    Attributes:
        path: the file.
        shapes: every tensor's shape, known without reading any.
        read: the tensor of a name.
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
        safetensors = directory / "model.safetensors"
        if safetensors.exists():
            return _open_safetensors(safetensors)
        pickled = sorted([*directory.glob("*.pt"), *directory.glob("*.pth")])
        if len(pickled) == 1:
            return _open_pickle(pickled[0])
        found = ", ".join(path.name for path in pickled) or "none"
        raise ModelError(
            f"{directory}: expected model.safetensors or exactly one .pt file, found {found}"
        )


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
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Checkpoint(path, shapes, tensors.__getitem__)


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


def fill(
    network: nn.Module,
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    ignored: Mapping[str, tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Give every parameter its tensor; nothing missing, nothing left over.

    Args:
        network: its parameters may lie on the meta device.
        names: parameter name -> tensor name.
        ignored: tensors that may be in the file and are not needed, with their shapes.

    Raises:
        ModelError: names every missing, unexpected and misshaped tensor.
    """
    parameters = dict(network.named_parameters())
    assert parameters.keys() == names.keys(), "a family names each of its parameters"
    expected = {name: tuple(parameters[ours].shape) for ours, name in names.items()}
    complaints = [
        *(f"missing: {name}" for name in expected if name not in checkpoint.shapes),
        *_unexpected(checkpoint.shapes, {**expected, **ignored}),
    ]
    if complaints:
        raise ModelError(f"{checkpoint.path}: " + "; ".join(complaints))
    aliases = _aliases(network)
    for parameter_name, tensor_name in names.items():
        tensor = checkpoint.read(tensor_name).to(device=device, dtype=dtype).contiguous()
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


def _aliases(network: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each parameter is held; a tied one is held in several places."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in network.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, attribute))
    return places
