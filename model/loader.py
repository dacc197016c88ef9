"""From a directory to a model that the engine can run."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from model import families
from model.checkpoint import Checkpoint, ModelError, fill
from model.config import EngineConfig, ModelSpec
from model.files import check_files, check_sizes, check_sums
from model.languages import Languages
from model.packing import Int8Linear, Packing, can_pack, can_quantize, packed_linear
from model.steppers import Stepper
from model.tokenizer import Tokenizer

INT8 = "int8"

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    INT8: torch.float32,
}
"""Number formats of weights -> of what is computed with them."""


@dataclass(frozen=True)
class Blueprint:
    """What a family makes of a configuration, before any weight is read.

    Attributes:
        network: its parameters lie on the meta device.
        spec: what the engine and the service must know.
        names: parameter name -> tensor name in the checkpoint.
        ignored: tensors that may be in the checkpoint and are not needed, with their shapes.
        copies: tensors that may be in the checkpoint and must equal the one they name.
        wide: parameters that stay float32 in a float16 model.
        stepper: makes what the engine steps.
    """

    network: nn.Module
    spec: ModelSpec
    names: Mapping[str, str]
    stepper: Callable[[EngineConfig], Stepper]
    ignored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    wide: Collection[str] = ()


class Family(Protocol):
    """What a module in `model/families/` offers.

    Attributes:
        MODEL_TYPES: values of `model_type` in `config.json`.
        PREFIX: what the names of all tensors but the head's begin with; "" where nothing is.
    """

    MODEL_TYPES: tuple[str, ...]
    PREFIX: str

    def blueprint(
        self,
        config: dict[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        generation: dict[str, Any] | None,
    ) -> Blueprint:
        """Compose the network of a `config.json`, strictly.

        Args:
            config: contents of `config.json`.
            shapes: of the tensors in the checkpoint.
            generation: contents of `generation_config.json`, or None where there is none.

        Raises:
            ModelError: a key is missing, unknown or out of range.
        """
        ...

    def tokenizers(self, directory: Path) -> tuple[Tokenizer | None, Tokenizer | None]:
        """The source's and the target's tokenizer, where the directory has them."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory.

    Attributes:
        directory: where it came from.
        spec: what the engine and the service must know.
        network: the weights.
        source_tokenizer, target_tokenizer: None where the directory has none.
        parameters: their number, each counted once.
        dtype: of the weights, a key of `DTYPES`.
        device: where they are.
        stepper: makes what the engine steps.
        languages: that a request may name; None where the model has none.
    """

    directory: Path
    spec: ModelSpec
    network: nn.Module
    source_tokenizer: Tokenizer | None
    target_tokenizer: Tokenizer | None
    parameters: int
    dtype: str
    device: torch.device
    stepper: Callable[[EngineConfig], Stepper]
    languages: Languages | None = None


def load_model(
    directory: Path, device: str = "auto", dtype: str = "float32", packed: bool = True
) -> LoadedModel:
    """Load a directory of `config.json`, weights and (where it has them) tokenizers.

    Args:
        device: "auto" takes CUDA when there is one.
        dtype: of the weights, a key of `DTYPES`.
        packed: whether linear layers may be rearranged, see `model.packing`; False keeps every
            parameter as it is in the file. int8 is a way of packing.

    Raises:
        ModelError: the directory cannot be served; the message says why.
    """
    check_files(directory)
    check_sums(directory)
    config = read_config(directory)
    family = find_family(directory, config)
    target_device = choose_device(device)
    if dtype not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    generation = read_generation_config(directory)
    checkpoint = Checkpoint.open(directory).under(family.PREFIX)
    try:
        check_sizes(config, len(checkpoint.shapes))
        plan = family.blueprint(config, checkpoint.shapes, generation)
    except ValueError as error:  # a ModelError, or what a layer says of its sizes
        raise ModelError(f"{directory / 'config.json'}: {error}") from error
    packing = choose_packing(target_device, dtype) if packed else None
    fill(
        plan.network,
        checkpoint,
        plan.names,
        plan.ignored,
        target_device,
        DTYPES[dtype],
        plan.copies,
        plan.wide,
        packing.parameters(plan.network) if packing else (),
    )
    plan.network.to(target_device)  # buffers
    plan.network.eval()
    parameters = sum(parameter.numel() for parameter in plan.network.parameters())
    if packing:
        packing.pack(plan.network)
    try:
        source, target = family.tokenizers(directory)
    except ValueError as error:
        raise ModelError(str(error)) from error
    _check_vocabulary(directory, "source", source, plan.spec.src_vocab_size)
    _check_vocabulary(directory, "target", target, plan.spec.tgt_vocab_size)
    spec = plan.spec
    if spec.unk_id is None and source is not None:  # configurations of others do not name it
        spec = replace(spec, unk_id=source.unk_id)
    return LoadedModel(
        directory=directory,
        spec=spec,
        network=plan.network,
        source_tokenizer=source,
        target_tokenizer=target,
        parameters=parameters,
        dtype=dtype,
        device=target_device,
        stepper=plan.stepper,
        languages=source.languages.known_to(spec) if source and source.languages else None,
    )


def choose_packing(device: torch.device, dtype: str) -> Packing | None:
    """How linear layers are held for a number format; None leaves them as they are.

    Raises:
        ModelError: the format is not for this device.
    """
    if dtype == INT8:
        if device.type != "cpu" or not can_quantize():
            raise ModelError(f"dtype int8 needs a CPU with AVX2, got device {device}")
        return Packing(Int8Linear)
    if device.type != "cpu" or not can_pack(DTYPES[dtype]):
        return None
    # A float32 table is the file's own pages; of any other, a second copy would weigh.
    return Packing(partial(packed_linear, dtype=DTYPES[dtype]), tied=dtype == "float32")


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` as a dictionary.

    Raises:
        ModelError: no such directory or file, or not a JSON object.
    """
    if not directory.is_dir():
        fault = "not a directory but a file" if directory.exists() else "no such directory"
        raise ModelError(f"{directory}: {fault}")
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(f"{directory}: no config.json in it")
    return read_object(path)


def read_generation_config(directory: Path) -> dict[str, Any] | None:
    """`generation_config.json` as a dictionary, or None where there is none."""
    path = directory / "generation_config.json"
    return read_object(path) if path.is_file() else None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ModelError: there is none.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    except RecursionError as error:
        raise ModelError(f"{path}: not JSON: nested too deeply") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected an object, got {type(config).__name__}")
    return config


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def find_family(directory: Path, config: Mapping[str, Any]) -> Family:
    """The module in `model/families/` that serves the config's `model_type`."""
    wanted = config.get("model_type")
    known: list[str] = []
    for info in pkgutil.iter_modules(families.__path__):
        family: Any = importlib.import_module(f"{families.__name__}.{info.name}")
        if wanted in family.MODEL_TYPES:
            found: Family = family
            return found
        known.extend(family.MODEL_TYPES)
    raise ModelError(
        f"{directory / 'config.json'}: model_type must be one of {', '.join(sorted(known))}, "
        f"got {wanted!r}"
    )


def choose_device(name: str) -> torch.device:
    """A device by name.

    Raises:
        ModelError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device must be auto, cpu or cuda, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {name!r} was asked for, but no CUDA device is available")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"device {name!r} was asked for, but there are {torch.cuda.device_count()}"
        )
    return device


def _check_vocabulary(directory: Path, side: str, tokenizer: Tokenizer | None, size: int) -> None:
    """Whether the model has every token that can occur in a text.

    Published tokenizers may know more special tokens than their model: those of BART's fine-tuned
    models have a `<mask>`, which the networks lost.
    """
    if tokenizer is None:
        return
    beyond = range(size, tokenizer.vocab_size)
    languages = set(tokenizer.languages.ids.values() if tokenizer.languages else ())
    if any(id in languages or tokenizer.decode([id]) for id in beyond):
        raise ModelError(
            f"{directory}: the {side} tokenizer has {tokenizer.vocab_size} tokens, the model {size}"
        )
