"""Every decoding parameter, once: bounds, no-op value, meaning.

The HTTP schema, the OpenAPI document, the SDK and the engine all take their parameters from here.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

MAX_SEED = 2**53 - 1
"""Seeds are exact in every JSON reader, JavaScript's included."""

MAX_STOPS = 16
"""Stop strings of a request."""

ONE, MANY = "<one>", "<many>"
"""Tags of unions of a value and a list, dropped from error messages; no field can be called so."""


def list_or_not(value: Any) -> str:
    """Which branch of such a union is meant, so that an error names one place."""
    return MANY if isinstance(value, list) else ONE


Word = Annotated[
    Annotated[str, Field(max_length=1000), Tag(ONE)]
    | Annotated[list[int], Field(max_length=1000, fail_fast=True), Tag(MANY)],
    Discriminator(list_or_not),
]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]

FOREIGN_NO_OPS: dict[str, Any] = {
    "adapter_id": None,
    "best_of": 1,
    "decoder_input_details": False,
    "grammar": None,
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

    task: str | None = Field(
        None,
        max_length=100,
        description="One of the model's tasks: what its files ask for in this one is the default "
        "of the other parameters, and its prefix stands before an input text. No-op: null.",
    )
    max_new_tokens: int | None = Field(
        None,
        ge=0,
        description="Tokens to generate at most, `</s>` included, decoder start and target prefix "
        "excluded. Null: the model's default.",
    )
    min_new_tokens: int | None = Field(
        None,
        ge=0,
        description="`</s>` is banned until so many tokens were generated. No-op: 0.",
    )
    do_sample: bool | None = Field(
        None,
        description="Draw tokens instead of taking the likeliest. Null: true if `temperature`, "
        "`top_k`, `top_p`, `min_p`, `typical_p` or `seed` is set.",
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
    min_p: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description="Ban tokens with less than min_p times the likeliest one's probability "
        "(Nguyen et al., 2024). No-op: 0.",
    )
    typical_p: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="Draw from the tokens whose surprise is nearest to the entropy and whose "
        "probabilities sum to at least typical_p (Meister et al., 2023). No-op: 1.",
    )
    seed: int | None = Field(
        None,
        ge=0,
        le=MAX_SEED,
        description="Key of the random numbers: the same seed draws the same tokens, in any "
        "company. Null: one is drawn and returned.",
    )
    num_beams: int | None = Field(
        None,
        ge=1,
        description="Hypotheses searched side by side. No-op: 1, which is no beam search.",
    )
    num_return_sequences: int | None = Field(
        None,
        ge=1,
        description="Answers to return: of a beam search, the best (at most `num_beams`); of "
        "sampling, independent draws. No-op: 1.",
    )
    length_penalty: float | None = Field(
        None,
        ge=-10.0,
        le=10.0,
        description="A hypothesis' summed log-probability is divided by its length to this power: "
        "above 0 favours long ones. Only with beams. No-op: 1.",
    )
    early_stopping: Literal[True, False, "never"] | None = Field(
        None,
        description="A beam search ends, if true, once `num_beams` hypotheses have finished; if "
        'false, once no live one seems to do better; if "never", once none can. Only with beams. '
        "No-op: false.",
    )
    repetition_penalty: float | None = Field(
        None,
        gt=0.0,
        le=100.0,
        description="Positive scores of tokens in the target so far, decoder start included, are "
        "divided by it, negative ones multiplied (Keskar et al., 2019). No-op: 1.",
    )
    no_repeat_ngram_size: int | None = Field(
        None,
        ge=0,
        description="No n-gram of this size occurs twice in the target. No-op: 0.",
    )
    encoder_no_repeat_ngram_size: int | None = Field(
        None,
        ge=0,
        description="No n-gram of this size is copied from the source. No-op: 0.",
    )
    frequency_penalty: float | None = Field(
        None,
        ge=-2.0,
        le=2.0,
        description="Subtracted from a token's logit for each time it was generated. No-op: 0.",
    )
    presence_penalty: float | None = Field(
        None,
        ge=-2.0,
        le=2.0,
        description="Subtracted from a token's logit if it was generated. No-op: 0.",
    )
    bad_words: list[Word] | None = Field(
        None,
        max_length=1000,
        description="Token sequences never completed: texts, or lists of ids. No-op: [].",
    )
    logit_bias: dict[str, Bias] | None = Field(
        None,
        max_length=1000,
        description="Token id (as a JSON object's key) and what is added to its logit, in "
        "[-100, 100]. No-op: {}.",
    )
    stop: list[Annotated[str, Field(min_length=1, max_length=1000)]] | None = Field(
        None,
        max_length=MAX_STOPS,
        description="Texts that end the generation; they are matched across token boundaries and "
        "cut off the text. No-op: [].",
    )
    src_lang: str | None = Field(
        None,
        max_length=100,
        description="Language of a source text, as the model calls it. Null: the model's default.",
    )
    tgt_lang: str | None = Field(
        None,
        max_length=100,
        description="Language to answer in: its token is forced behind the decoder start, or "
        "wherever else the model expects it. Null: the model's default.",
    )
    forced_bos_token_id: int | None = Field(
        None,
        ge=0,
        description="The first token behind the decoder start. No-op: null.",
    )
    forced_eos_token_id: int | None = Field(
        None,
        ge=0,
        description="The last token that `max_new_tokens` allows. No-op: null.",
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
    beam_steps: bool = Field(
        False,
        description="In the details of a beam search: the hypotheses that each step left, those "
        "dropped later too. Only with beams.",
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
        if self.tgt_lang is not None and self.forced_bos_token_id is not None:
            raise ValueError("tgt_lang and forced_bos_token_id exclude each other")
        if self.num_beams is not None or self.samples:
            self.check_beams()  # otherwise it depends on the model, whose default may be beams
        least, most = self.min_new_tokens or 0, self.max_new_tokens
        if most is not None and least > most:
            raise ValueError(f"min_new_tokens must be at most max_new_tokens, {most}, got {least}")
        return self

    def check_beams(self) -> None:
        """Whether what concerns beams agrees; a server asks again, with the model's defaults.

        Raises:
            ValueError: it does not; the message begins with the field at fault.
        """
        beams, sequences = self.num_beams or 1, self.num_return_sequences or 1
        if beams > 1 and self.samples:
            raise ValueError(f"num_beams {beams} cannot be combined with sampling")
        if sequences > beams and not self.samples:
            raise ValueError(
                f"num_return_sequences must be at most num_beams, {beams}, without sampling, "
                f"got {sequences}"
            )
        only_beams = (("length_penalty", 1.0), ("early_stopping", False), ("beam_steps", False))
        for name, no_op in only_beams:
            value = getattr(self, name)
            if beams == 1 and value is not None and value != no_op:
                raise ValueError(f"{name} needs num_beams above 1, got {value}")

    @property
    def sampling_fields(self) -> list[str]:
        """The fields set that only sampling uses."""
        return [
            name
            for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed")
            if getattr(self, name) is not None
        ]

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn."""
        return self.do_sample if self.do_sample is not None else bool(self.sampling_fields)
