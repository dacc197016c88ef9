"""Logits and attention weights as the SDK gives them: numpy arrays, torch tensors or lists.

On the wire arrays and tensors are safetensors files, which this module reads by itself: a length, a
JSON header, the data. Neither numpy nor torch is imported before an answer needs it.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from seqserve.schemas import AttentionResponse, LogitsResponse

ArrayKind = Literal["numpy", "torch", "list"]

WIDE = frozenset({"logits", "ids", "values"})
"""Tensors of a /logits answer that have a row for each position."""


@dataclass(frozen=True)
class Logits:
    """Teacher-forced logits of one target; a row belongs to the token after its position.

    Attributes:
        target_ids: what the decoder was fed, decoder start included.
        logits: float32 `[vocabulary]` for `last`, `[position, vocabulary]` for `all`; None with
            top_k.
        ids, values: with top_k, int64 ids of the largest logits in falling order, and those logits,
            shaped likewise.
    """

    target_ids: list[int]
    logits: Any = None
    ids: Any = None
    values: Any = None


@dataclass(frozen=True)
class Attention:
    """Attention weights of one source and target, without padding; each row sums to 1.

    Attributes:
        source_tokens, target_tokens: the vocabularies' names of what encoder and decoder were fed,
            decoder start included; None without a tokenizer.
        source_ids, target_ids: the same as ids.
        encoder: `[layer, head, source query, source key]`.
        decoder: `[layer, head, target query, target key]`; 0 where the key comes later.
        cross: `[layer, head, target query, source key]`.
    """

    source_tokens: list[str | None] | None
    target_tokens: list[str | None] | None
    source_ids: list[int]
    target_ids: list[int]
    encoder: Any
    decoder: Any
    cross: Any


def chosen_kind(wanted: ArrayKind | None) -> ArrayKind:
    """What arrays will be; None takes numpy's where it is installed, else lists.

    Raises:
        ValueError: what is wanted is not installed.
    """
    if wanted is None:
        return "numpy" if _is_installed("numpy") else "list"
    if wanted != "list" and not _is_installed(wanted):
        raise ValueError(f"arrays={wanted!r} needs {wanted}, which is not installed")
    return wanted


def wire_format(kind: ArrayKind) -> Literal["json", "safetensors"]:
    """What to ask the server for."""
    return "json" if kind == "list" else "safetensors"


def read_logits(content: bytes, last: bool, kind: ArrayKind) -> list[Logits]:
    """An answer of /logits, padding taken off."""
    if kind == "list":
        answers = _answers(LogitsResponse | list[LogitsResponse], content)
        return [Logits(a.target_ids, a.logits, a.ids, a.values) for a in answers]
    tensors = read_safetensors(content, kind)
    results = []
    for i, length in enumerate(tensors["target_lengths"].tolist()):
        rows: Any = 0 if last else slice(0, length)
        arrays = {name: tensors[name][i, rows] for name in tensors.keys() & WIDE}
        results.append(Logits(tensors["target_ids"][i, :length].tolist(), **arrays))
    return results


def read_attention(content: bytes, kind: ArrayKind) -> list[Attention]:
    """An answer of /attention, padding taken off."""
    if kind == "list":
        answers = _answers(AttentionResponse | list[AttentionResponse], content)
        return [Attention(**dict(a)) for a in answers]
    tensors, names = read_safetensors(content, kind), _metadata(content)
    lengths = zip(
        tensors["source_lengths"].tolist(), tensors["target_lengths"].tolist(), strict=True
    )
    return [
        Attention(
            source_tokens=json.loads(names["source_tokens"])[i],
            target_tokens=json.loads(names["target_tokens"])[i],
            source_ids=tensors["source_ids"][i, :src].tolist(),
            target_ids=tensors["target_ids"][i, :tgt].tolist(),
            encoder=tensors["encoder"][i, :, :, :src, :src],
            decoder=tensors["decoder"][i, :, :, :tgt, :tgt],
            cross=tensors["cross"][i, :, :, :tgt, :src],
        )
        for i, (src, tgt) in enumerate(lengths)
    ]


def read_safetensors(file: bytes, kind: ArrayKind = "numpy") -> dict[str, Any]:
    """Arrays or tensors of a safetensors file; they can be written to."""
    start, header = _header(file)
    header.pop("__metadata__", None)
    buffer = bytearray(file)
    read = _numpy_reader() if kind == "numpy" else _torch_reader()
    return {
        name: read(buffer, entry, start + entry["data_offsets"][0]).reshape(entry["shape"])
        for name, entry in header.items()
    }


Reader = Callable[[bytearray, Mapping[str, Any], int], Any]
"""Takes a file, a tensor's entry in the header and its offset; gives it flat."""


def _numpy_reader() -> Reader:
    import numpy as np

    kinds = {"F32": np.float32, "F16": np.float16, "I64": np.int64}
    return lambda buffer, entry, offset: np.frombuffer(
        buffer, kinds[entry["dtype"]], count=math.prod(entry["shape"]), offset=offset
    )


def _torch_reader() -> Reader:
    import torch

    kinds = {"F32": torch.float32, "F16": torch.float16, "I64": torch.int64}
    return lambda buffer, entry, offset: torch.frombuffer(
        buffer, dtype=kinds[entry["dtype"]], count=math.prod(entry["shape"]), offset=offset
    )


def _metadata(file: bytes) -> dict[str, str]:
    _, header = _header(file)
    names: dict[str, str] = header.get("__metadata__", {})
    return names


def _header(file: bytes) -> tuple[int, dict[str, Any]]:
    """Where the data start, and what the header says."""
    start = 8 + int.from_bytes(file[:8], "little")
    return start, json.loads(file[8:start])


def _answers(kind: Any, content: bytes) -> list[Any]:
    """A JSON answer as a list; null stands where a number is not finite."""
    answer = TypeAdapter[Any](kind).validate_json(content)
    return answer if isinstance(answer, list) else [answer]


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
