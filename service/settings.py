"""Everything that can be configured, once.

Each field is an environment variable `SEQSERVE_<NAME>` and an option of `seqserve serve`; its
description is the option's help and stands in docs/settings.md.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from model.config import EngineConfig
from seqserve.schemas import TIMEOUT_LIMIT
from service.hub import Location, locate

DEFAULT_MODEL = Path(__file__).parent.parent / "weights" / "g2p-en"

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#,\s]+")
"""As browsers send it: scheme, host and port only."""

PAIR = re.compile(
    r"(?P<source>[a-z]{2,3}(_[a-z]{4})?)-(?P<target>[a-z]{2,3}(_[a-z]{4})?)=(?P<model>.+)",
    re.IGNORECASE | re.ASCII,
)

ANY_LANGUAGE = "mul"
"""In a pair, all languages that the model names; ISO 639-2's code for several."""

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True)
class Pair:
    """A model as a translator from one language to another.

    Attributes:
        source, target: codes as they were given; `ANY_LANGUAGE` is all.
        model: its name.
    """

    source: str
    target: str
    model: str

    @classmethod
    def read(cls, text: str) -> Pair:
        """`en-de=NAME`.

        Raises:
            ValueError: it is something else.
        """
        match = PAIR.fullmatch(text)
        if match is None:
            raise ValueError(f"pairs must be SOURCE-TARGET=NAME, such as en-de=mt, got {text!r}")
        return cls(match["source"], match["target"], match["model"])

    def __str__(self) -> str:
        return f"{self.source}-{self.target}={self.model}"


class Settings(BaseSettings):
    """Settings of `seqserve serve`. The command line wins over the environment."""

    model_config = SettingsConfigDict(
        env_prefix="SEQSERVE_",
        extra="forbid",
        frozen=True,
        env_ignore_empty=True,
        hide_input_in_errors=True,  # it may be a key
    )

    # NoDecode: the variable is a comma-separated list, not JSON.
    models: Annotated[tuple[str, ...], NoDecode] = Field(
        (str(DEFAULT_MODEL),),
        min_length=1,
        description="Models to serve, each NAME=DIR or DIR (its last part is then the name); "
        "instead of DIR also ORG/NAME or ORG/NAME@REVISION on the Hugging Face Hub. The first "
        "answers requests that name none. Repeat the option; separate by commas in the variable.",
    )
    pairs: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Models that translate one language to another, each SOURCE-TARGET=NAME, such "
        "as en-de=opus-mt-en-de, for /translate; mul stands for all languages that the model names "
        "itself. A model with pairs translates nothing else there. Repeat the option; separate by "
        "commas in the variable.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 is all of them.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    root_path: str = Field(
        "", description="Path under which a proxy publishes the server, such as /seqserve."
    )
    api_keys: SecretStr | None = Field(
        None,
        description="API keys that are accepted, separated by commas. Only a variable: others can "
        "read a process's command line.",
    )
    api_keys_file: Path | None = Field(
        None,
        description="File of API keys that are accepted, one a line; empty lines and lines that "
        "begin with # do not count. It is read once, at the start.",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Origins whose pages a browser lets call the server, such as "
        "https://app.example.org; * is any. Repeat the option; separate by commas in the variable.",
    )
    device: str = Field(
        "auto", description="auto, cpu, cuda or cuda:N; auto takes CUDA when there is one."
    )
    dtype: Literal["float32", "bfloat16", "float16", "int8"] = Field(
        "float32",
        description="Number format of the weights; int8 is for CPUs, and answers differ a little.",
    )
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads for tensor operations; 0 leaves it to torch."
    )
    max_rows: int = Field(
        EngineConfig.max_rows, ge=1, le=65536, description="Sequences decoded side by side."
    )
    max_encoder_tokens: int = Field(
        EngineConfig.max_encoder_tokens,
        ge=1,
        description="Padded source tokens encoded between two decoding steps.",
    )
    max_forward_tokens: int = Field(
        EngineConfig.max_forward_tokens,
        ge=1,
        description="Padded tokens of /logits, /next, /score and /attention run between two "
        "decoding steps.",
    )
    max_cache_tokens: int = Field(
        EngineConfig.max_cache_tokens,
        ge=1,
        description="Positions (source, prefix and new tokens) that all live rows may reserve.",
    )
    max_encoder_cache_bytes: int = Field(
        EngineConfig.max_encoder_cache_bytes,
        ge=0,
        description="Memory for the encoder's outputs of recent sources, for each model: a source "
        "that comes again is not encoded again; 0 keeps none.",
    )
    lookahead: int = Field(
        EngineConfig.lookahead,
        ge=0,
        le=255,
        description="Tokens of its source that are guessed to follow in one row at one step, at "
        "most; 0 guesses none.",
    )
    cuda_graphs: bool = Field(
        EngineConfig.cuda_graphs,
        description="Record decoding steps as CUDA graphs. Of no effect on a CPU.",
    )
    max_queue: int = Field(
        4096,
        ge=1,
        description="Inputs accepted and not yet answered, for each model; more get status 429.",
    )
    max_queue_tokens: int = Field(
        4 * 1024 * 1024,
        ge=1,
        description="Source, prefix and new tokens that inputs accepted and not yet answered may "
        "come to, for each model; more get status 429.",
    )
    max_return_sequences: int = Field(
        64, ge=1, description="num_return_sequences of one input, at most."
    )
    max_beams: int = Field(
        64, ge=1, description="num_beams of one input, at most; never more than max_rows."
    )
    max_source_tokens: int | None = Field(
        None,
        ge=1,
        description="Source tokens of one input, where that is less than the model takes.",
    )
    max_target_tokens: int | None = Field(
        None,
        ge=1,
        description="Target tokens of one answer (decoder start, prefix and new ones), where that "
        "is less than the model takes.",
    )
    max_characters: int = Field(
        100_000,
        ge=1,
        description="Characters of one text; a longer one is refused before it is tokenised.",
    )
    max_inputs: int = Field(1024, ge=1, description="Inputs (or targets) of one request.")
    max_body_bytes: int = Field(
        4 * 1024 * 1024, ge=1024, description="Size of a request's body; more gets status 413."
    )
    receive_timeout: float = Field(
        30.0,
        gt=0,
        le=TIMEOUT_LIMIT,
        description="Seconds in which a request's head, and then its body, must have come; slower "
        "ones get status 408.",
    )
    send_timeout: float = Field(
        30.0,
        gt=0,
        le=TIMEOUT_LIMIT,
        description="Seconds in which a caller must take some more of its answer; the connection "
        "of one that takes nothing is cut.",
    )
    max_json_values: int = Field(
        1_000_000,
        ge=1,
        description="Numbers in a JSON answer of /logits, /next, /score or /attention, and in "
        "the top_tokens of /generate; for more, safetensors must be asked for where there is any.",
    )
    max_tensor_values: int = Field(
        64 * 1024 * 1024,
        ge=1,
        description="Numbers in a safetensors answer of /logits and /attention.",
    )
    timeout: float = Field(
        60.0,
        gt=0,
        le=TIMEOUT_LIMIT,
        description="Seconds until a request fails with status 504 if it names no timeout itself.",
    )
    grace: float = Field(
        30.0,
        ge=0,
        le=TIMEOUT_LIMIT,
        description="Seconds that running requests get to finish after SIGTERM.",
    )
    on_load_failure: Literal["exit", "serve"] = Field(
        "exit",
        description="When a model cannot be loaded: exit, or serve the others and answer requests "
        "for it with status 503.",
    )
    on_engine_failure: Literal["restart", "exit"] = Field(
        "restart",
        description="When an engine breaks down: restart it from the weights in memory, or exit "
        "with a status that is not 0.",
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="Restarts of a model's engine within ten minutes; instead of one more the "
        "server exits.",
    )
    log_level: LogLevel = Field("info", description="debug, info, warning or error.")
    log_format: LogFormat = Field("text", description="text, or json: an object a line.")
    tracing: bool = Field(
        False,
        description="Send OpenTelemetry traces with OTLP; OTEL_EXPORTER_OTLP_ENDPOINT and its like "
        "say where to. Needs the extra otel.",
    )

    @field_validator("models", "pairs", "cors_origins", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors_origins must be * or origins such as https://app.example.org, "
                    f"without a path, got {origin!r}"
                )
        return value

    @field_validator("pairs")
    @classmethod
    def _are_pairs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            Pair.read(text)
        return value

    @field_validator("root_path")
    @classmethod
    def _slashes(cls, value: str) -> str:
        return f"/{value.strip('/')}" if value.strip("/") else ""

    @model_validator(mode="after")
    def _queue_takes_a_request(self) -> Self:
        if self.max_inputs > self.max_queue:
            raise ValueError(
                f"max_inputs ({self.max_inputs}) must not be over max_queue ({self.max_queue}): "
                "such a request could never be accepted"
            )
        return self

    @property
    def beam_limit(self) -> tuple[str, int]:
        """Which setting limits num_beams, and its value: all beams of an input are rows."""
        if self.max_rows < self.max_beams:
            return "max_rows", self.max_rows
        return "max_beams", self.max_beams

    @property
    def locations(self) -> dict[str, Location]:
        """Name of each model -> where it is, in order.

        Raises:
            ValueError: a name is empty or used twice.
        """
        found: dict[str, Location] = {}
        for model in self.models:
            name, location = named_model(model)
            if name in found:
                raise ValueError(f"two models are called {name!r}; name them with NAME=DIR")
            found[name] = location
        return found

    def pairs_of(self, names: Collection[str]) -> dict[str, list[Pair]]:
        """Name of each model -> the pairs that are set for it.

        Raises:
            ValueError: one is for a model that there is not.
        """
        found: dict[str, list[Pair]] = {name: [] for name in names}
        for pair in map(Pair.read, self.pairs):
            if pair.model not in found:
                raise ValueError(
                    f"pairs: {pair} names no model of this server; there are: {', '.join(found)}"
                )
            found[pair.model].append(pair)
        return found


def named_model(text: str) -> tuple[str, Location]:
    """`NAME=DIR` or `DIR`, or likewise with a model's id on the Hub -> name and location.

    Raises:
        ValueError: either is empty.
    """
    name, equals, place = text.partition("=")
    named = bool(equals) and "/" not in name  # a directory's path may have "=" in it
    place = place if named else text
    location = locate(place)
    if not named:
        name = location.resolve().name if isinstance(location, Path) else location.name
    if not name or not place:
        raise ValueError(f"a model must be NAME=DIR or DIR, got {text!r}")
    return name, location


def engine_config(settings: Settings) -> EngineConfig:
    """The engine's share of the settings."""
    return EngineConfig(
        max_rows=settings.max_rows,
        max_encoder_tokens=settings.max_encoder_tokens,
        max_forward_tokens=settings.max_forward_tokens,
        max_cache_tokens=settings.max_cache_tokens,
        max_encoder_cache_bytes=settings.max_encoder_cache_bytes,
        lookahead=settings.lookahead,
        cuda_graphs=settings.cuda_graphs,
    )
