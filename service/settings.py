"""Everything that can be configured, once.

Each field is an environment variable `SEQSERVE_<NAME>` and an option of `seqserve serve`; its
description is the option's help and stands in docs/settings.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from model.config import EngineConfig
from seqserve.schemas import TIMEOUT_LIMIT

DEFAULT_MODEL = Path(__file__).parent.parent / "weights" / "g2p-en"

LogLevel = Literal["debug", "info", "warning", "error"]


class Settings(BaseSettings):
    """Settings of `seqserve serve`. The command line wins over the environment."""

    model_config = SettingsConfigDict(
        env_prefix="SEQSERVE_", extra="forbid", frozen=True, env_ignore_empty=True
    )

    # NoDecode: the variable is a comma-separated list, not JSON.
    models: Annotated[tuple[str, ...], NoDecode] = Field(
        (str(DEFAULT_MODEL),),
        min_length=1,
        description="Models to serve, each NAME=DIR or DIR (its last part is then the name). The "
        "first answers requests that name none. Repeat the option; separate by commas in the "
        "variable.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 is all of them.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    root_path: str = Field(
        "", description="Path under which a proxy publishes the server, such as /seqserve."
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
    max_queue: int = Field(
        4096,
        ge=1,
        description="Inputs accepted and not yet answered, for each model; more get status 429.",
    )
    max_return_sequences: int = Field(
        64, ge=1, description="`num_return_sequences` of one input, at most"
    )
    max_inputs: int = Field(1024, ge=1, description="Inputs (or targets) of one request.")
    max_body_bytes: int = Field(
        4 * 1024 * 1024, ge=1024, description="Size of a request's body; more gets status 413."
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
    log_level: LogLevel = Field("info", description="debug, info, warning or error.")

    @field_validator("models", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
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
    def directories(self) -> dict[str, Path]:
        """Name of each model -> its directory, in order.

        Raises:
            ValueError: a name is empty or used twice.
        """
        found: dict[str, Path] = {}
        for model in self.models:
            name, directory = named_directory(model)
            if name in found:
                raise ValueError(f"two models are called {name!r}; name them with NAME=DIR")
            found[name] = directory
        return found


def named_directory(text: str) -> tuple[str, Path]:
    """`NAME=DIR` or `DIR` -> name and directory.

    Raises:
        ValueError: either is empty.
    """
    name, equals, directory = text.partition("=")
    if not equals or "/" in name:  # a directory whose path has "=" in it
        name, directory = Path(text).resolve().name, text
    if not name or not directory:
        raise ValueError(f"a model must be NAME=DIR or DIR, got {text!r}")
    return name, Path(directory).expanduser()


def engine_config(settings: Settings) -> EngineConfig:
    """The engine's share of the settings."""
    return EngineConfig(
        max_rows=settings.max_rows,
        max_encoder_tokens=settings.max_encoder_tokens,
        max_forward_tokens=settings.max_forward_tokens,
        max_cache_tokens=settings.max_cache_tokens,
        max_encoder_cache_bytes=settings.max_encoder_cache_bytes,
    )
