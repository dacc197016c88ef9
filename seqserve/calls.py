"""What the SDK's calls send and how their answers are read; the clients only carry them.

An input is a text or a list of token ids; a list of inputs gives a list of answers.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypedDict, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from seqserve.errors import ERRORS, NoConnectionError, SeqserveError
from seqserve.events import EventReader
from seqserve.parameters import GenerationParameters
from seqserve.schemas import (
    AttentionResponse,
    DetokenizeResponse,
    ErrorResponse,
    GenerateResponse,
    InfoResponse,
    LogitsResponse,
    NextResponse,
    ScoreResponse,
    StreamEvent,
    TokenizeResponse,
)

One = str | list[int]
Many = list[str] | list[list[int]]
Parameters = GenerationParameters | Mapping[str, Any]

T = TypeVar("T")


class Options(TypedDict, total=False):
    """What any call that runs a model may say.

    Attributes:
        model: its name; left out, the client's, else the server's first.
        timeout: seconds after which the server gives up.
    """

    model: str | None
    timeout: float | None


class SpokenOptions(Options, total=False):
    """What calls with targets may say.

    Attributes:
        src_lang: language of the inputs, or a list with one for each.
        tgt_lang: language of the targets, or a list with one for each answer.
    """

    src_lang: str | list[str] | None
    tgt_lang: str | list[str] | None


class NextOptions(SpokenOptions, total=False):
    """Attributes: top_k: how many tokens."""

    top_k: int


class LogitsOptions(NextOptions, total=False):
    """Attributes: positions: behind the last target token, or behind every one."""

    positions: Literal["last", "all"]


class AttentionOptions(SpokenOptions, total=False):
    """Attributes: dtype: number format of the weights."""

    dtype: Literal["float32", "float16"]


class TextOptions(TypedDict, total=False):
    """Attributes: side: whose vocabulary, the encoder's or the decoder's."""

    model: str | None
    side: Literal["source", "target"]


class TokenizeOptions(TextOptions, total=False):
    """Attributes: src_lang, tgt_lang: language of texts of either side."""

    src_lang: str | None
    tgt_lang: str | None


@dataclass(frozen=True)
class Logits:
    """Teacher-forced logits of one target; a row belongs to the token after its position.

    numpy arrays (`torch.from_numpy(result.logits.copy())`), or lists where numpy is not installed.

    Attributes:
        target_ids: what the decoder was fed, decoder start included.
        logits: `[vocabulary]` for `last`, `[position, vocabulary]` for `all`; None with top_k.
        ids, values: with top_k, the largest logits in falling order, shaped likewise.
    """

    target_ids: list[int]
    logits: Any = None
    ids: Any = None
    values: Any = None


@dataclass(frozen=True)
class Attention:
    """Attention weights of one source and target, without padding; each row sums to 1.

    numpy arrays `[layer, head, query, key]`, or lists where numpy is not installed.

    Attributes:
        source_tokens, target_tokens: the vocabularies' names of what encoder and decoder were fed,
            decoder start included; None without a tokenizer.
        source_ids, target_ids: the same as ids.
        encoder: source queries, source keys.
        decoder: target queries, target keys; 0 where the key comes later.
        cross: target queries, source keys.
    """

    source_tokens: list[str | None] | None
    target_tokens: list[str | None] | None
    source_ids: list[int]
    target_ids: list[int]
    encoder: Any
    decoder: Any
    cross: Any


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request, and how its answer is read."""

    method: str
    path: str
    body: dict[str, Any] | None
    parse: Callable[[httpx.Response], T]

    def body_for(self, model: str | None) -> dict[str, Any] | None:
        """The body, asking for a model where it names none."""
        return self.body if self.body is None or model is None else {"model": model, **self.body}


# --- building ------------------------------------------------------------------------------------


def generate_call(
    inputs: One | Many, parameters: Parameters | Sequence[Parameters] | None, options: Options
) -> Call[Any]:
    """POST /generate."""
    body = {**_inputs(inputs), **_set(options)}
    if isinstance(parameters, Sequence):
        body["parameters"] = [_plain(p) for p in parameters]
    elif parameters is not None:
        body["parameters"] = _plain(parameters)
    return Call("POST", "/generate", body, _parser(GenerateResponse, inputs))


def stream_call(inputs: One, parameters: Parameters | None, options: Options) -> Call[Any]:
    """POST /generate for a stream of events."""
    call = generate_call(inputs, parameters, options)
    return Call("POST", "/generate", {**(call.body or {}), "stream": True}, call.parse)


def logits_call(
    inputs: One | Many, targets: One | Many | None, options: LogitsOptions
) -> Call[Any]:
    """POST /logits, as safetensors where numpy can hold them."""
    binary = _has_numpy()
    body = _with_targets(inputs, targets, {**options, "format": _format(binary)})
    many = _is_many(inputs) or _is_many(targets)
    last = options.get("positions", "last") == "last"

    def parse(response: httpx.Response) -> Logits | list[Logits]:
        results = (
            read_logits(response.content, last) if binary else _logits_from_json(response.content)
        )
        return results if many else results[0]

    return Call("POST", "/logits", body, parse)


def next_call(inputs: One | Many, prefix: One | Many | None, options: NextOptions) -> Call[Any]:
    """POST /next."""
    body = {**_inputs(inputs), **_set(options)}
    if prefix is not None:
        body |= _inputs(prefix, "target_prefix", "target_prefix_ids")
    return Call("POST", "/next", body, _parser(NextResponse, inputs, prefix))


def score_call(inputs: One | Many, targets: One | Many | None, options: SpokenOptions) -> Call[Any]:
    """POST /score."""
    body = _with_targets(inputs, targets, options)
    return Call("POST", "/score", body, _parser(ScoreResponse, inputs, targets))


def attention_call(
    inputs: One | Many, targets: One | Many | None, options: AttentionOptions
) -> Call[Any]:
    """POST /attention, as safetensors where numpy can hold them."""
    binary = _has_numpy()
    body = _with_targets(inputs, targets, {**options, "format": _format(binary)})
    many = _is_many(inputs) or _is_many(targets)

    def parse(response: httpx.Response) -> Attention | list[Attention]:
        read = read_attention if binary else _attention_from_json
        results = read(response.content)
        return results if many else results[0]

    return Call("POST", "/attention", body, parse)


def tokenize_call(texts: str | list[str], options: TokenizeOptions) -> Call[Any]:
    """POST /tokenize."""
    body = {"inputs": texts, **_set(options)}
    return Call("POST", "/tokenize", body, _parser(TokenizeResponse, texts))


def detokenize_call(ids: list[int] | list[list[int]], options: TextOptions) -> Call[Any]:
    """POST /detokenize."""
    body = {"input_ids": ids, **_set(options)}
    return Call("POST", "/detokenize", body, _parser(DetokenizeResponse, ids))


def info_call() -> Call[InfoResponse]:
    """GET /info."""
    return Call("GET", "/info", None, lambda r: InfoResponse.model_validate_json(r.content))


def ready_call() -> Call[bool]:
    """GET /ready."""
    return Call("GET", "/ready", None, lambda response: response.is_success)


def _inputs(value: One | Many, text: str = "inputs", ids: str = "input_ids") -> dict[str, Any]:
    is_text = isinstance(value, str) or (bool(value) and isinstance(value[0], str))
    return {text if is_text else ids: value}


def _with_targets(
    inputs: One | Many, targets: One | Many | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    body = {**_inputs(inputs), **_set(options)}
    return body if targets is None else body | _inputs(targets, "targets", "target_ids")


def _has_numpy() -> bool:
    return importlib.util.find_spec("numpy") is not None


def _format(binary: bool) -> str:
    return "safetensors" if binary else "json"


def _is_many(value: One | Many | None) -> bool:
    if value is None or isinstance(value, str) or not value:
        return False
    return not isinstance(value[0], int)


def _set(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _plain(parameters: Parameters) -> dict[str, Any]:
    if isinstance(parameters, GenerationParameters):
        return parameters.model_dump(exclude_unset=True)
    return dict(parameters)


# --- parsing -------------------------------------------------------------------------------------


def _parser(answer: type[T], *given: One | Many | None) -> Callable[[httpx.Response], Any]:
    """What reads an answer, which is a list where anything given is one."""
    kind: Any = list[answer] if any(map(_is_many, given)) else answer  # type: ignore[valid-type]
    return lambda response: TypeAdapter(kind).validate_json(response.content)


def error_of(response: httpx.Response) -> SeqserveError:
    """A failed answer as an exception, also where a proxy answered instead of the server."""
    try:
        envelope = ErrorResponse.model_validate_json(response.content)
    except ValidationError:
        envelope = ErrorResponse(
            error=f"status {response.status_code}: {response.text[:200]}",
            error_type="internal",
            param=None,
            request_id=response.headers.get("x-request-id"),
        )
    return _error(
        envelope,
        status=response.status_code,
        retry_after=seconds_of(response.headers.get("retry-after")),
    )


def _error(envelope: ErrorResponse, **known: Any) -> SeqserveError:
    kind = ERRORS.get(envelope.error_type, SeqserveError)
    return kind(envelope.error, envelope.param, request_id=envelope.request_id, **known)


class StreamReader:
    """The events of a stream, as its bytes arrive."""

    def __init__(self) -> None:
        self._events = EventReader()
        self._began = False
        self._open: set[int] = set()  # sequences whose last event has not come

    def push(self, piece: bytes) -> Iterator[StreamEvent]:
        """The events that end with this piece.

        Raises:
            SeqserveError: one of them is an error.
        """
        for data in self._events.push(piece):
            event = read_event(data)
            self._began = True
            if event.details is None:
                self._open.add(event.sequence)
            else:
                self._open.discard(event.sequence)
            yield event

    def check_complete(self) -> None:
        """To be called once all has arrived.

        Raises:
            NoConnectionError: the end is missing.
        """
        if self._open or not self._began:
            raise NoConnectionError("the stream ended before its last event")


def read_event(data: str) -> StreamEvent:
    """One event of a stream.

    Raises:
        SeqserveError: it is an error, or nothing that this client knows.
    """
    try:
        fields = json.loads(data)
        if isinstance(fields, dict) and "error" in fields:
            blank = {"error_type": "internal", "param": None, "request_id": None}
            raise _error(ErrorResponse.model_validate({**blank, **fields}))
        return StreamEvent.model_validate(fields)
    except ValueError as error:  # pydantic's are such too
        raise SeqserveError(f"an event of the stream cannot be read: {data[:200]}") from error


def read_logits(file: bytes, last: bool) -> list[Logits]:
    """A safetensors answer of /logits, padding taken off."""
    tensors = read_safetensors(file)
    results = []
    for i, length in enumerate(tensors["target_lengths"].tolist()):
        rows: Any = 0 if last else slice(0, length)
        arrays = {name: tensors[name][i, rows] for name in tensors.keys() & _WIDE}
        results.append(Logits(tensors["target_ids"][i, :length].tolist(), **arrays))
    return results


def read_attention(file: bytes) -> list[Attention]:
    """A safetensors answer of /attention, padding taken off."""
    tensors, names = read_safetensors(file), _metadata(file)
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


_WIDE = frozenset({"logits", "ids", "values"})


def read_safetensors(file: bytes) -> dict[str, Any]:
    """Arrays of a safetensors file: a length, a JSON header, the data."""
    import numpy as np

    start, header = _header(file)
    header.pop("__metadata__", None)
    kinds = {"F32": np.float32, "F16": np.float16, "I64": np.int64}
    return {
        name: np.frombuffer(
            file,
            kinds[entry["dtype"]],
            count=math.prod(entry["shape"]),
            offset=start + entry["data_offsets"][0],
        ).reshape(entry["shape"])
        for name, entry in header.items()
    }


def _metadata(file: bytes) -> dict[str, str]:
    _, header = _header(file)
    names: dict[str, str] = header.get("__metadata__", {})
    return names


def _header(file: bytes) -> tuple[int, dict[str, Any]]:
    """Where the data start, and what the header says."""
    start = 8 + int.from_bytes(file[:8], "little")
    return start, json.loads(file[8:start])


def _attention_from_json(file: bytes) -> list[Attention]:
    """A JSON answer of /attention: lists."""
    answer = TypeAdapter[Any](AttentionResponse | list[AttentionResponse]).validate_json(file)
    answers = answer if isinstance(answer, list) else [answer]
    return [Attention(**dict(a)) for a in answers]


def _logits_from_json(file: bytes) -> list[Logits]:
    """A JSON answer of /logits: lists, null where a number is not finite."""
    answer = TypeAdapter[Any](LogitsResponse | list[LogitsResponse]).validate_json(file)
    answers = answer if isinstance(answer, list) else [answer]
    return [Logits(a.target_ids, a.logits, a.ids, a.values) for a in answers]


def seconds_of(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:  # a date, which this server does not send
        return None
