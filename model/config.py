"""What the engine is told: about a model, and about its own limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class GenerationDefaults:
    """What a model's own files ask for where a request says nothing; None where they do not either.

    Names and meanings are those of the request's parameters, but for `renormalize_logits`, which
    only a model can ask for.

    Attributes:
        do_sample: whether tokens are drawn.
        temperature, top_k, top_p, min_p, typical_p: used when tokens are drawn.
        num_beams, length_penalty, early_stopping: used when they are not.
        bad_words: sequences of ids; a request's own come on top.
        renormalize_logits: whether what the processors left is a distribution again before a beam
            search adds it up.
    """

    min_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    encoder_no_repeat_ngram_size: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    bad_words: tuple[tuple[int, ...], ...] | None = None
    renormalize_logits: bool | None = None

    @property
    def stated(self) -> dict[str, Any]:
        """Those that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Task:
    """What a model's files ask for where a request names one of its tasks.

    Attributes:
        prefix: stands before a source text.
        max_new_tokens: as `ModelSpec.default_max_new_tokens`; None leaves that.
        defaults: before the model's own.
        fault: why it cannot be used; empty where it can.
    """

    prefix: str = ""
    max_new_tokens: int | None = None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    fault: str = ""

    @property
    def stated(self) -> dict[str, Any]:
        """What it says, under the names of a request's parameters, and `prefix`."""
        own = {"prefix": self.prefix or None, "max_new_tokens": self.max_new_tokens}
        return {name: value for name, value in own.items() if value is not None} | (
            self.defaults.stated
        )


@dataclass(frozen=True)
class ModelSpec:
    """What everything outside the tensors has to know of a model.

    Attributes:
        family: `model_type` of the checkpoint.
        src_vocab_size, tgt_vocab_size: ids are below these.
        pad_id: fills short rows up; never a real token's id on the source side.
        decoder_start_ids: what every target starts with, before any prefix. Empty where the
            source itself is what the decoder continues (`source_is_target`).
        eos_ids: any of them ends a target, the first is `</s>`; without any, only length does.
        unk_id: what unknown source pieces become, or None.
        max_src: source tokens the model takes, `</s>` included.
        max_tgt: decoder positions: start, prefix and generated tokens but the last.
        default_max_new_tokens: where a request names none.
        source_is_target: one growing sequence feeds encoder and decoder (the tutorial's model).
        defaults: of all else that a request may leave open.
        tasks: that a request may name.
    """

    family: str
    src_vocab_size: int
    tgt_vocab_size: int
    pad_id: int
    decoder_start_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    unk_id: int | None
    max_src: int
    max_tgt: int
    default_max_new_tokens: int
    source_is_target: bool = False
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    tasks: Mapping[str, Task] = field(default_factory=dict)

    @property
    def eos_id(self) -> int | None:
        """`</s>`, where there is one."""
        return self.eos_ids[0] if self.eos_ids else None

    def under(self, task: Task) -> ModelSpec:
        """The same model as it is in one of its tasks."""
        length = task.max_new_tokens or self.default_max_new_tokens
        return replace(
            self,
            default_max_new_tokens=min(length, self.max_tgt),
            defaults=replace(self.defaults, **task.defaults.stated),
        )

    def room(self, src_tokens: int, prefix_tokens: int) -> int:
        """Tokens that can be generated behind a prefix (decoder start included).

        The last generated token is never fed back, so that it needs no position; only a sequence
        that is its own source counts whole.
        """
        if self.source_is_target:
            return self.max_tgt - src_tokens - prefix_tokens
        return self.max_tgt - prefix_tokens + 1


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine; counts are of rows and tokens.

    Attributes:
        max_rows: sequences decoded side by side in one step.
        max_encoder_tokens: padded source tokens encoded between two steps.
        max_forward_tokens: padded target tokens of /logits and /next run between two steps, so
            that decoding never waits for more than one such chunk.
        max_cache_tokens: positions (source + prefix + new tokens) reserved by all live rows.
        max_encoder_cache_bytes: of encoder outputs kept for sources that come again; 0 keeps none.
        lookahead: tokens of its source that are guessed to follow in one row at one step, at
            most; 0 guesses none. See `model.lookahead`.
        cuda_graphs: whether decoding steps are recorded on CUDA devices, see `model.graphs`.
    """

    max_rows: int = 64
    max_encoder_tokens: int = 8192
    max_forward_tokens: int = 8192
    max_cache_tokens: int = 262_144
    max_encoder_cache_bytes: int = 64 * 2**20
    lookahead: int = 15
    cuda_graphs: bool = False
