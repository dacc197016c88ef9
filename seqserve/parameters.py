"""Every decoding parameter, once: bounds, no-op value, meaning.

The HTTP schema, the OpenAPI document, the SDK and the engine all take their parameters from here.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_SEED = 2**53 - 1
"""Seeds are exact in every JSON reader, JavaScript's included."""

FOREIGN_NO_OPS: dict[str, Any] = {
    "adapter_id": None,
    "best_of": 1,
    "decoder_input_details": False,
    "grammar": None,
    "min_new_tokens": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "bad_words": [],
    "logit_bias": {},
    "stop": [],
    "watermark": False,
}
"""Fields of other APIs and the value by which each asks for nothing.

That value, or null, is accepted; any other is refused as an unknown field, never ignored.
"""


class Strict(BaseModel):
    """What everything that a caller sends has in common: exact types, unknown fields refused, null
    the same as leaving a field out."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {k: v for k, v in data.items() if k in cls.model_fields and v is not None}
        # One unknown field is enough to refuse; an error for each of a million takes many seconds.
        unknown = (
            k for k, v in data.items() if k not in cls.model_fields and not cls.ignores(k, v)
        )
        return kept | {k: data[k] for k in islice(unknown, 1)}

    @classmethod
    def ignores(cls, name: str, value: Any) -> bool:
        """Whether a field that is not this class's own asks for nothing."""
        return False


class GenerationParameters(Strict):
    """How one input is continued. A field left out, or null, changes nothing."""

    max_new_tokens: int | None = Field(
        None,
        ge=0,
        description="Tokens to generate at most, `</s>` included, decoder start and target prefix "
        "excluded. Null: the model's default.",
    )
    do_sample: bool | None = Field(
        None,
        description="Draw tokens instead of taking the likeliest. Null: true if `temperature`, "
        "`top_k`, `top_p` or `seed` is set.",
    )
    temperature: float | None = Field(
        None,
        gt=0.0,
        le=100.0,
        description="Logits are divided by it before the softmax. No-op: 1.",
    )
    top_k: int | None = Field(
        None, ge=0, description="Draw from the k likeliest tokens only. No-op: 0."
    )
    top_p: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="Draw from the fewest likeliest tokens whose probabilities sum to at least "
        "top_p (Holtzman et al., 2020). No-op: 1.",
    )
    seed: int | None = Field(
        None,
        ge=0,
        le=MAX_SEED,
        description="Key of the random numbers: the same seed draws the same tokens, in any "
        "company. Null: one is drawn and returned.",
    )
    target_prefix: str | None = Field(
        None, description="Text that the target starts with; the decoder continues from it."
    )
    target_prefix_ids: Annotated[list[int], Field(fail_fast=True)] | None = Field(
        None, description="The same as ids, taken exactly as given. Not with `target_prefix`."
    )
    truncate: int | None = Field(
        None,
        ge=1,
        description="Cut the source to this many tokens. Null: a source longer than the model "
        "takes is refused.",
    )
    details: bool = Field(False, description="Return tokens, log-probabilities and counts.")
    top_n_tokens: int = Field(
        0,
        ge=0,
        le=100,
        description="In the details, the n likeliest tokens of each step. No-op: 0.",
    )
    return_full_text: bool = Field(
        False, description="Put the target prefix in front of the generated text."
    )

    @classmethod
    def ignores(cls, name: str, value: Any) -> bool:
        """Whether it is a field of another API that asks for nothing."""
        if name not in FOREIGN_NO_OPS:
            return False
        no_op = FOREIGN_NO_OPS[name]
        same = bool(value == no_op) and isinstance(value, bool) == isinstance(no_op, bool)
        return value is None or same

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.do_sample is False and self.sampling_fields:
            raise ValueError(
                f"do_sample is false, but {', '.join(self.sampling_fields)} would sample"
            )
        if self.target_prefix is not None and self.target_prefix_ids is not None:
            raise ValueError("target_prefix and target_prefix_ids exclude each other")
        return self

    @property
    def sampling_fields(self) -> list[str]:
        """The fields set that only sampling uses."""
        return [
            name
            for name in ("temperature", "top_k", "top_p", "seed")
            if getattr(self, name) is not None
        ]

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn."""
        return self.do_sample if self.do_sample is not None else bool(self.sampling_fields)
