"""What the engine is told: about a model, and about its own limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSpec:
    """What everything outside the tensors has to know of a model.

    Attributes:
        family: `model_type` of the checkpoint.
        src_vocab_size, tgt_vocab_size: ids are below these.
        pad_id: fills short rows up; never a real token's id on the source side.
        decoder_start_ids: what every target starts with, before any prefix. Empty where the
            source itself is what the decoder continues (`source_is_target`).
        eos_id: ends a target; None where only length does.
        unk_id: what unknown source pieces become, or None.
        max_src: source tokens the model takes, `</s>` included.
        max_tgt: decoder positions: start, prefix and generated tokens but the last.
        default_max_new_tokens: where a request names none.
        source_is_target: one growing sequence feeds encoder and decoder (the tutorial's model).
    """

    family: str
    src_vocab_size: int
    tgt_vocab_size: int
    pad_id: int
    decoder_start_ids: tuple[int, ...]
    eos_id: int | None
    unk_id: int | None
    max_src: int
    max_tgt: int
    default_max_new_tokens: int
    source_is_target: bool = False

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
    """

    max_rows: int = 64
    max_encoder_tokens: int = 8192
    max_forward_tokens: int = 8192
    max_cache_tokens: int = 262_144
    max_encoder_cache_bytes: int = 64 * 2**20
