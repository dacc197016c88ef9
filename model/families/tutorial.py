"""The model that readers of the tutorial end with: `state_dict` names, equations and all.

The tutorial is chapter 2 of "Happy-LLM" (https://github.com/datawhalechina/happy-llm). What differs
from the paper, and from this project's own family:

- One id sequence feeds encoder and decoder, which share one token table, unscaled. The decoder
  continues that sequence, so a longer one changes the encoder's output too and nothing is cached.
- No linear layer has a bias; the output layer is a matrix of its own.
- Its LayerNorm divides by a Bessel-corrected standard deviation, see `BesselLayerNorm`.
- Feed-forwards are as wide as the tensors say (the tutorial's own are as wide as the model).
- The norm before a feed-forward is `fnn_norm`; in decoder layers also `ffn_norm` occurs.
- That code also takes the residual around each *attention* from the normalised input; around
  feed-forwards it is the usual one. `"residual": "normalized"` in the config asks for this.
- It knows no padding. Here batches are padded, and every mask keeps that from showing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from model.attention import MultiHeadAttention
from model.checkpoint import ModelError
from model.config import ModelSpec
from model.layers import (
    BesselLayerNorm,
    Embedding,
    FeedForward,
    NormalizedResidual,
    PreNorm,
    Residual,
    SinusoidalPositions,
    token_table,
)
from model.loader import Blueprint
from model.pretrained import with_generation
from model.steppers import ResubmittingStepper
from model.tokenizer import JsonTokenizer, Tokenizer
from model.transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, Transformer

MODEL_TYPES = ("tutorial",)

PREFIX = ""

Shapes = Mapping[str, tuple[int, ...]]

NO_PADDING = -1
"""No id means padding to this model; in `targets` the tutorial ignores -1."""

RESIDUALS: Mapping[str, type[PreNorm] | type[NormalizedResidual]] = {
    "standard": PreNorm,
    "normalized": NormalizedResidual,
}
"""Around attentions, by the config's `residual`."""


@dataclass(frozen=True)
class TutorialConfig:
    """What `config.json` holds beside `model_type`; names are the tutorial's.

    Attributes:
        vocab_size: ids are below it.
        n_embd: width of the model; a multiple of `n_heads`.
        n_heads: attention heads.
        n_layer: depth of the encoder, and of the decoder.
        block_size: the longest sequence, prompt and generated tokens together.
        residual: "standard" or "normalized", around attentions.
        eos_token_id: ends generation; null where only length does.
        dim: the tutorial's second name for `n_embd`; its sums need the two equal.
        max_seq_len: size of the causal `mask` buffers; nothing else follows from it.
        dropout: while training.
    """

    vocab_size: int
    n_embd: int
    n_heads: int
    n_layer: int
    block_size: int
    residual: str = "standard"
    eos_token_id: int | None = None
    dim: int | None = None
    max_seq_len: int | None = None
    dropout: float = 0.0


def blueprint(
    config: dict[str, Any], shapes: Shapes, generation: dict[str, Any] | None
) -> Blueprint:
    """See `model.loader.Family.blueprint`."""
    parsed = parse(config)
    with torch.device("meta"):
        network = build(parsed, feed_forward_widths(parsed, shapes))
    model_spec = with_generation(spec(parsed), generation)
    return Blueprint(
        network=network,
        spec=model_spec,
        names=tensor_names(parsed, shapes),
        stepper=partial(ResubmittingStepper, network, model_spec),
        ignored=buffers(parsed, shapes),
    )


def tokenizers(directory: Path) -> tuple[Tokenizer | None, Tokenizer | None]:
    """See `model.loader.Family.tokenizers`: one `tokenizer.json` for both sides, or none."""
    path = directory / "tokenizer.json"
    tokenizer = JsonTokenizer.load(path) if path.exists() else None
    return tokenizer, tokenizer


# --- config.json -------------------------------------------------------------------------------


def parse(config: Mapping[str, Any]) -> TutorialConfig:
    """The contents of a `config.json`.

    Raises:
        ModelError: a key is unknown or missing, or a value is of the wrong type or size.
    """
    given = {key: value for key, value in config.items() if key != "model_type"}
    known = {field.name: field for field in fields(TutorialConfig)}
    if unknown := sorted(given.keys() - known.keys()):
        raise ModelError(f"unknown keys: {', '.join(unknown)}")
    required = [name for name, field in known.items() if field.default is MISSING]
    if missing := [name for name in required if name not in given]:
        raise ModelError(f"missing keys: {', '.join(missing)}")
    for name in required:
        _check_count(name, given[name])
    _check_heads(given["n_embd"], given["n_heads"])
    _check_optional(given)
    return TutorialConfig(**given)


def _check_count(name: str, value: Any) -> None:
    if not _is_int(value) or value < 1:
        raise ModelError(f"{name} must be an integer of at least 1, got {value!r}")


def _check_heads(width: int, heads: int) -> None:
    if width % heads:
        raise ModelError(f"n_embd must be a multiple of n_heads, got {width} and {heads}")


def _check_optional(given: Mapping[str, Any]) -> None:
    residual = given.get("residual", "standard")
    if not isinstance(residual, str) or residual not in RESIDUALS:
        raise ModelError(f"residual must be one of {', '.join(RESIDUALS)}, got {residual!r}")
    eos = given.get("eos_token_id")
    if eos is not None and not (_is_int(eos) and 0 <= eos < given["vocab_size"]):
        raise ModelError(f"eos_token_id must be an id below vocab_size, got {eos!r}")
    dim = given.get("dim")
    if dim is not None and (not _is_int(dim) or dim != given["n_embd"]):
        raise ModelError(f"dim must equal n_embd, {given['n_embd']}, got {dim!r}")
    if given.get("max_seq_len") is not None:
        _check_count("max_seq_len", given["max_seq_len"])
    dropout = given.get("dropout", 0.0)
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ModelError(f"dropout must be a number in [0, 1), got {dropout!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def spec(config: TutorialConfig) -> ModelSpec:
    """What the engine must know of such a model."""
    return ModelSpec(
        family=MODEL_TYPES[0],
        src_vocab_size=config.vocab_size,
        tgt_vocab_size=config.vocab_size,
        pad_id=0,  # only fills up what masks hide; 0 is an ordinary token
        decoder_start_ids=(),
        eos_ids=() if config.eos_token_id is None else (config.eos_token_id,),
        unk_id=None,
        max_src=config.block_size,
        max_tgt=config.block_size,
        default_max_new_tokens=min(256, config.block_size),
        source_is_target=True,
    )


# --- composition -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Widths:
    """Hidden width of each feed-forward, per layer."""

    encoder: tuple[int, ...]
    decoder: tuple[int, ...]


def feed_forward_widths(config: TutorialConfig, shapes: Shapes) -> Widths:
    """Read off the tensors; where one is missing, as wide as the model, as the tutorial's own."""

    def widths(stack: str) -> tuple[int, ...]:
        names = (f"{layer}.feed_forward.w1.weight" for layer in _layers(config, stack))
        return tuple((shapes.get(name) or (config.n_embd,))[0] for name in names)

    return Widths(widths("encoder"), widths("decoder"))


def build(config: TutorialConfig, widths: Widths) -> Transformer:
    """Compose the network; dropout stands where the tutorial has it."""
    dim, dropout = config.n_embd, config.dropout
    around_attention = RESIDUALS[config.residual]

    def attention() -> MultiHeadAttention:
        return MultiHeadAttention(dim, config.n_heads, bias=False, dropout=dropout)

    def residuals(attentions: int) -> list[Residual]:
        around = [around_attention(BesselLayerNorm(dim), dropout) for _ in range(attentions)]
        return [*around, PreNorm(BesselLayerNorm(dim), dropout)]

    def feed_forward(hidden: int) -> FeedForward:
        return FeedForward(dim, hidden, bias=False)

    positions = SinusoidalPositions(config.block_size, dim)
    embedding = Embedding(token_table(config.vocab_size, dim), positions, dropout=dropout)
    encoder = Encoder(
        embedding,
        [EncoderLayer(attention(), feed_forward(n), residuals(1)) for n in widths.encoder],
        BesselLayerNorm(dim),
    )
    decoder = Decoder(
        embedding,
        [
            DecoderLayer(attention(), attention(), feed_forward(n), residuals(2))
            for n in widths.decoder
        ],
        BesselLayerNorm(dim),
    )
    output = nn.Linear(dim, config.vocab_size, bias=False)
    return Transformer(encoder, decoder, output, NO_PADDING)


# --- names -------------------------------------------------------------------------------------


def _layers(config: TutorialConfig, stack: str) -> list[str]:
    return [f"transformer.{stack}.layers.{i}" for i in range(config.n_layer)]


def buffers(config: TutorialConfig, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The buffers that a file may hold, with their shapes; computed here, never read."""
    allowed: dict[str, tuple[int, ...]] = {
        "transformer.wpe.pe": (1, config.block_size, config.n_embd)
    }
    for layer in _layers(config, "decoder"):
        name = f"{layer}.mask_attention.mask"
        size = config.max_seq_len or (shapes.get(name) or (config.block_size,))[-1]
        allowed[name] = (1, 1, size, size)
    return allowed


def tensor_names(config: TutorialConfig, shapes: Shapes) -> dict[str, str]:
    """Parameter name here -> tensor name in the tutorial."""
    names = {
        "encoder.embedding.tokens.weight": "transformer.wte.weight",
        "output.weight": "lm_head.weight",
        **_norm("encoder.norm", "transformer.encoder.norm"),
        **_norm("decoder.norm", "transformer.decoder.norm"),
    }
    for i, theirs in enumerate(_layers(config, "encoder")):
        ours = f"encoder.layers.{i}"
        names |= _attention(f"{ours}.attention", f"{theirs}.attention")
        names |= _feed_forward(f"{ours}.feed_forward", f"{theirs}.feed_forward")
        names |= _norm(f"{ours}.residuals.0.norm", f"{theirs}.attention_norm")
        names |= _norm(f"{ours}.residuals.1.norm", f"{theirs}.fnn_norm")
    for i, theirs in enumerate(_layers(config, "decoder")):
        ours = f"decoder.layers.{i}"
        names |= _attention(f"{ours}.self_attention", f"{theirs}.mask_attention")
        names |= _attention(f"{ours}.cross_attention", f"{theirs}.attention")
        names |= _feed_forward(f"{ours}.feed_forward", f"{theirs}.feed_forward")
        names |= _norm(f"{ours}.residuals.0.norm", f"{theirs}.attention_norm_1")
        names |= _norm(f"{ours}.residuals.1.norm", f"{theirs}.attention_norm_2")
        last = "ffn_norm" if f"{theirs}.ffn_norm.a_2" in shapes else "fnn_norm"
        names |= _norm(f"{ours}.residuals.2.norm", f"{theirs}.{last}")
    return names


def _norm(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.weight": f"{theirs}.a_2", f"{ours}.bias": f"{theirs}.b_2"}


def _attention(ours: str, theirs: str) -> dict[str, str]:
    letters = {"query": "wq", "key": "wk", "value": "wv", "output": "wo"}
    return {f"{ours}.{word}.weight": f"{theirs}.{w}.weight" for word, w in letters.items()}


def _feed_forward(ours: str, theirs: str) -> dict[str, str]:
    return {
        f"{ours}.expand.weight": f"{theirs}.w1.weight",
        f"{ours}.contract.weight": f"{theirs}.w2.weight",
    }
