"""The project's own family: the paper's Transformer with pre-norm, as `seqserve train` makes it.

Differences from the paper, each because it trains better in few hours on a CPU: pre-norm with a
final norm (Xiong et al., 2020), dropout on attention weights too, and where the config says so an
output layer tied to the target embedding (Press and Wolf, 2017, https://arxiv.org/abs/1608.05859)
and relative positions beside the sinusoids (Raffel et al., 2019, section 2.1). And one for those
who take probabilities at their word: label smoothing is undone in what is served.
"""

from __future__ import annotations

import math
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
    Embedding,
    FeedForward,
    LayerNorm,
    PreNorm,
    RelativePositionBias,
    SinusoidalPositions,
    UnsmoothedOutput,
    token_table,
)
from model.loader import Blueprint
from model.pretrained import with_generation
from model.steppers import CachedStepper
from model.tokenizer import Tokenizer, load_tokenizer
from model.transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, Transformer, initialise

MODEL_TYPES = ("seqserve",)

PREFIX = ""

BUCKETS, MAX_DISTANCE = 32, 128
"""Of relative positions; T5's."""


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a Transformer of this family; what `config.json` holds.

    Attributes:
        src_vocab_size, tgt_vocab_size: sizes of the two vocabularies.
        dim: width of the model; a multiple of `heads`.
        heads: attention heads.
        hidden_dim: width inside the feed-forward.
        encoder_layers, decoder_layers: depth of the stacks.
        max_src, max_tgt: the longest source and target the model was trained for, in tokens,
            `</s>` included.
        dropout: on embeddings, attention weights and residual branches while training.
        tie_output: whether the output layer is the target embedding.
        relative_positions: whether self-attentions add a learned number to each score, by how far
            key and query are apart.
        undo_label_smoothing: the label smoothing of the training, which the output layer takes back
            out; 0 while training.
        pad_id, bos_id, eos_id, unk_id: special ids, the same on both sides; `bos_id` starts the
            decoder.
    """

    src_vocab_size: int
    tgt_vocab_size: int
    dim: int = 256
    heads: int = 4
    hidden_dim: int = 1024
    encoder_layers: int = 3
    decoder_layers: int = 3
    max_src: int = 64
    max_tgt: int = 64
    dropout: float = 0.1
    tie_output: bool = True
    relative_positions: bool = False
    undo_label_smoothing: float = 0.0
    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    unk_id: int = 3


def build(config: TransformerConfig) -> Transformer:
    """Compose the Transformer that `config` describes, freshly initialised."""
    dim, dropout = config.dim, config.dropout

    def attention() -> MultiHeadAttention:
        return MultiHeadAttention(dim, config.heads, dropout=dropout)

    def feed_forward() -> FeedForward:
        return FeedForward(dim, config.hidden_dim, dropout=dropout)

    def residuals(count: int) -> list[PreNorm]:
        return [PreNorm(LayerNorm(dim), dropout) for _ in range(count)]

    def embedding(vocab_size: int, max_length: int) -> Embedding:
        tokens = token_table(vocab_size, dim)
        return Embedding(tokens, SinusoidalPositions(max_length, dim), math.sqrt(dim), dropout)

    def position_bias(bidirectional: bool) -> RelativePositionBias | None:
        if not config.relative_positions:
            return None
        return RelativePositionBias(config.heads, BUCKETS, MAX_DISTANCE, bidirectional)

    encoder = Encoder(
        embedding(config.src_vocab_size, config.max_src),
        [
            EncoderLayer(attention(), feed_forward(), residuals(2))
            for _ in range(config.encoder_layers)
        ],
        LayerNorm(dim),
        position_bias(bidirectional=True),
    )
    decoder = Decoder(
        embedding(config.tgt_vocab_size, config.max_tgt),
        [
            DecoderLayer(attention(), attention(), feed_forward(), residuals(3))
            for _ in range(config.decoder_layers)
        ],
        LayerNorm(dim),
        position_bias(bidirectional=False),
    )
    projection = nn.Linear(dim, config.tgt_vocab_size, bias=False)
    smoothing = config.undo_label_smoothing
    output = UnsmoothedOutput(projection, smoothing) if smoothing else projection
    model = Transformer(encoder, decoder, output, config.pad_id)
    if not projection.weight.is_meta:
        initialise(model)
    if config.tie_output:
        projection.weight = decoder.embedding.tokens.weight
    return model


def blueprint(
    config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], generation: dict[str, Any] | None
) -> Blueprint:
    """See `model.loader.Family.blueprint`."""
    shape = parse(config)
    with torch.device("meta"):
        network = build(shape)
    # Trained without what undoes the smoothing, the output layer is stored as if it were bare.
    names = {
        name: name.replace("output.projection.", "output.")
        for name, _ in network.named_parameters()
    }
    model_spec = with_generation(spec(shape), generation)
    return Blueprint(network, model_spec, names, partial(CachedStepper, network, model_spec))


def parse(config: Mapping[str, Any]) -> TransformerConfig:
    """The shape in a `config.json`.

    Raises:
        ModelError: a key is unknown, missing or of the wrong type or size.
    """
    given = {key: value for key, value in config.items() if key != "model_type"}
    known = {field.name: field for field in fields(TransformerConfig)}
    if unknown := sorted(given.keys() - known.keys()):
        raise ModelError(f"unknown keys: {', '.join(unknown)}")
    for name, value in given.items():
        kind = str(known[name].type)
        accepted: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": ()}
        is_bool = isinstance(value, bool)
        if is_bool != (kind == "bool") or not (is_bool or isinstance(value, accepted[kind])):
            raise ModelError(f"{name} must be of type {kind}, got {value!r}")
        least = 1 if kind == "int" and not name.endswith("_id") else 0
        if value < least:
            raise ModelError(f"{name} must be at least {least}, got {value!r}")
    required = [name for name, field in known.items() if field.default is MISSING]
    if missing := [name for name in required if name not in given]:
        raise ModelError(f"missing keys: {', '.join(missing)}")
    shape = TransformerConfig(**given)
    _check_ids(shape)
    if shape.undo_label_smoothing >= 1:
        raise ModelError(f"undo_label_smoothing must be below 1, got {shape.undo_label_smoothing}")
    return shape


def _check_ids(shape: TransformerConfig) -> None:
    smaller = min(shape.src_vocab_size, shape.tgt_vocab_size)
    for name in ("pad_id", "bos_id", "eos_id", "unk_id"):
        if (id := getattr(shape, name)) >= smaller:
            raise ModelError(f"{name} must be below both vocabulary sizes, got {id}")


def spec(shape: TransformerConfig) -> ModelSpec:
    """What the engine must know of a model of this shape."""
    return ModelSpec(
        family=MODEL_TYPES[0],
        src_vocab_size=shape.src_vocab_size,
        tgt_vocab_size=shape.tgt_vocab_size,
        pad_id=shape.pad_id,
        decoder_start_ids=(shape.bos_id,),
        eos_ids=(shape.eos_id,),
        unk_id=shape.unk_id,
        max_src=shape.max_src,
        max_tgt=shape.max_tgt,
        default_max_new_tokens=min(256, shape.max_tgt),
    )


def tokenizers(directory: Path) -> tuple[Tokenizer | None, Tokenizer | None]:
    """See `model.loader.Family.tokenizers`."""
    return load_tokenizer(directory, "source"), load_tokenizer(directory, "target")
