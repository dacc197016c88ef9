"""What the SDK's calls send and how their answers are read; the clients only carry them.

An input is a text or a list of token ids; a list of inputs gives a list of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Generic, Literal, TypedDict, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter

from seqserve.arrays import ArrayKind, read_attention, read_logits, wire_format
from seqserve.errors import SeqserveError
from seqserve.failures import check_version
from seqserve.parameters import GenerationParameters
from seqserve.schemas import (
    DetokenizeResponse,
    GenerateResponse,
    InfoResponse,
    NextResponse,
    ScoreResponse,
    TokenizeResponse,
)

One = str | list[int]
Many = list[str] | list[list[int]]
Parameters = GenerationParameters | Mapping[str, Any]

T = TypeVar("T")


class Timed(TypedDict, total=False):
    """What any call may say.

    Attributes:
        timeout: seconds for it, other tries included; left out or None, the client's.
    """

    timeout: float | None


class Options(Timed, total=False):
    """What any call that asks a model may say.

    Attributes:
        model: its name; left out or None, the client's, else the server's first.
    """

    model: str | None


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


class TextOptions(Options, total=False):
    """Attributes: side: whose vocabulary, the encoder's or the decoder's."""

    side: Literal["source", "target"]


class TokenizeOptions(TextOptions, total=False):
    """Attributes: src_lang, tgt_lang: language of texts of either side."""

    src_lang: str | None
    tgt_lang: str | None


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request, and how its answer is read.

    Attributes:
        body: sent as JSON; None: nothing is.
        parse: reads the content of an answer.
        timeout: seconds for all of it; None: the client's.
    """

    method: str
    path: str
    body: dict[str, Any] | None
    parse: Callable[[bytes], T]
    timeout: float | None = None

    def body_for(self, model: str | None) -> dict[str, Any] | None:
        """The body, asking for a model where it names none."""
        return self.body if self.body is None or model is None else {"model": model, **self.body}

    def read(self, response: httpx.Response) -> T:
        """The answer in a response that is none of an error.

        Raises:
            SeqserveError: it is of another version, or nothing that this client knows.
        """
        check_version(response)
        try:
            return self.parse(response.content)
        except (ValueError, LookupError) as error:  # pydantic's and json's are ValueErrors
            raise SeqserveError(
                f"the answer of {self.path} cannot be read: {response.content[:200]!r}",
                status=response.status_code,
                request_id=response.headers.get("x-request-id"),
            ) from error


# --- building ------------------------------------------------------------------------------------


def generate_call(
    inputs: One | Many, parameters: Parameters | Sequence[Parameters] | None, options: Options
) -> Call[Any]:
    """POST /generate."""
    body = _inputs(inputs)
    if isinstance(parameters, Sequence):
        body["parameters"] = [_plain(p) for p in parameters]
    elif parameters is not None:
        body["parameters"] = _plain(parameters)
    return _post("/generate", body, options, _parser(GenerateResponse, inputs))


def stream_call(inputs: One, parameters: Parameters | None, options: Options) -> Call[Any]:
    """POST /generate for a stream of events."""
    call = generate_call(inputs, parameters, options)
    return replace(call, body={**(call.body or {}), "stream": True})


def logits_call(
    inputs: One | Many, targets: One | Many | None, options: LogitsOptions, arrays: ArrayKind
) -> Call[Any]:
    """POST /logits."""
    body = _with_targets(inputs, targets) | {"format": wire_format(arrays)}
    last = options.get("positions", "last") == "last"
    parse = _array_parser(lambda content: read_logits(content, last, arrays), inputs, targets)
    return _post("/logits", body, options, parse)


def next_call(inputs: One | Many, prefix: One | Many | None, options: NextOptions) -> Call[Any]:
    """POST /next."""
    body = _inputs(inputs)
    if prefix is not None:
        body |= _inputs(prefix, "target_prefix", "target_prefix_ids")
    return _post("/next", body, options, _parser(NextResponse, inputs, prefix))


def score_call(inputs: One | Many, targets: One | Many | None, options: SpokenOptions) -> Call[Any]:
    """POST /score."""
    body = _with_targets(inputs, targets)
    return _post("/score", body, options, _parser(ScoreResponse, inputs, targets))


def attention_call(
    inputs: One | Many, targets: One | Many | None, options: AttentionOptions, arrays: ArrayKind
) -> Call[Any]:
    """POST /attention."""
    body = _with_targets(inputs, targets) | {"format": wire_format(arrays)}
    parse = _array_parser(lambda content: read_attention(content, arrays), inputs, targets)
    return _post("/attention", body, options, parse)


def tokenize_call(texts: str | list[str], options: TokenizeOptions) -> Call[Any]:
    """POST /tokenize."""
    return _post("/tokenize", {"inputs": texts}, options, _parser(TokenizeResponse, texts))


def detokenize_call(ids: list[int] | list[list[int]], options: TextOptions) -> Call[Any]:
    """POST /detokenize."""
    return _post("/detokenize", {"input_ids": ids}, options, _parser(DetokenizeResponse, ids))


def info_call(options: Timed) -> Call[InfoResponse]:
    """GET /info."""
    return Call("GET", "/info", None, _parser(InfoResponse), options.get("timeout"))


def ready_call(options: Timed) -> Call[bool]:
    """GET /ready; another answer than true is an error."""
    return Call("GET", "/ready", None, lambda _: True, options.get("timeout"))


def _post(
    path: str, body: dict[str, Any], options: Mapping[str, Any], parse: Callable[[bytes], Any]
) -> Call[Any]:
    """A call with the options that were given: its own timeout, and fields of its body."""
    said = {name: value for name, value in options.items() if value is not None}
    timeout = said.pop("timeout", None)
    return Call("POST", path, body | said, parse, timeout)


def _inputs(value: One | Many, text: str = "inputs", ids: str = "input_ids") -> dict[str, Any]:
    is_text = isinstance(value, str) or (bool(value) and isinstance(value[0], str))
    return {text if is_text else ids: value}


def _with_targets(inputs: One | Many, targets: One | Many | None) -> dict[str, Any]:
    body = _inputs(inputs)
    return body if targets is None else body | _inputs(targets, "targets", "target_ids")


def _is_many(value: One | Many | None) -> bool:
    if value is None or isinstance(value, str) or not value:
        return False
    return not isinstance(value[0], int)


def _plain(parameters: Parameters) -> dict[str, Any]:
    if isinstance(parameters, GenerationParameters):
        return parameters.model_dump(exclude_unset=True)
    return dict(parameters)


# --- parsing -------------------------------------------------------------------------------------


def _parser(answer: type[BaseModel], *given: One | Many | None) -> Callable[[bytes], Any]:
    """What reads an answer, which is a list where anything given is one."""
    return _adapter(answer, any(map(_is_many, given))).validate_json


@cache
def _adapter(answer: type[BaseModel], many: bool) -> TypeAdapter[Any]:
    kind: Any = list[answer] if many else answer  # type: ignore[valid-type]
    return TypeAdapter(kind)


def _array_parser(
    read: Callable[[bytes], list[T]], *given: One | Many | None
) -> Callable[[bytes], Any]:
    """The same for answers that are read as a list in any case."""
    many = any(map(_is_many, given))
    return lambda content: read(content) if many else read(content)[0]
