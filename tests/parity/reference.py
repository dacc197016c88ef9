"""The bridge between `transformers` and the engine: the same random weights on both sides.

The families' own loaders are not used: our Transformer is composed here, from the parts of
`model.layers` and `model.transformer`, around a state dict in the reference's names. What is
compared is therefore the engine and the decoding, on a network that is shown to be the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelSpec
from model.layers import Embedding, LayerNorm, MultiHeadAttention, PostNorm
from model.loader import LoadedModel
from model.steppers import CachedStepper
from model.transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, Transformer

PAD, BOS, EOS = 0, 1, 2
POSITIONS = 40
"""Positions of every random model, on both sides."""

SPREAD = 2.0
"""Standard deviation of logits: certain enough to differ, open enough for beams to cross."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a network, and what its family does differently.

    Attributes:
        start: decoder start; BART's is `</s>`.
        bart: learned positions from 2 on, norms behind the embeddings, GELU. Otherwise Marian:
            sinusoidal positions, ReLU.
        scaled: token vectors times ``sqrt(dim)``.
    """

    dim: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    hidden: int
    src_vocab: int
    tgt_vocab: int
    start: int
    bart: bool
    scaled: bool
    positions: int = POSITIONS


SHAPES = {
    "marian": Shape(32, 4, 2, 2, 64, 44, 44, start=PAD, bart=False, scaled=True),
    "marian-two-vocabularies": Shape(24, 2, 1, 3, 40, 37, 59, start=PAD, bart=False, scaled=False),
    "bart": Shape(32, 2, 2, 1, 48, 31, 31, start=EOS, bart=True, scaled=False),
}


# --- the reference's side ------------------------------------------------------------------------


def reference_model(shape: Shape, seed: int) -> Any:
    """A model of `transformers` with lively random weights, in eval mode."""
    import transformers

    common = {
        "d_model": shape.dim,
        "encoder_layers": shape.encoder_layers,
        "decoder_layers": shape.decoder_layers,
        "encoder_attention_heads": shape.heads,
        "decoder_attention_heads": shape.heads,
        "encoder_ffn_dim": shape.hidden,
        "decoder_ffn_dim": shape.hidden,
        "max_position_embeddings": shape.positions,
        "vocab_size": shape.src_vocab,
        "scale_embedding": shape.scaled,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "decoder_start_token_id": shape.start,
        "tie_word_embeddings": False,
    }
    if shape.bart:
        config = transformers.BartConfig(
            **common, activation_function="gelu", forced_eos_token_id=None
        )
        network = transformers.BartForConditionalGeneration(config)
    else:
        config = transformers.MarianConfig(
            **common,
            activation_function="relu",
            decoder_vocab_size=shape.tgt_vocab,
            share_encoder_decoder_embeddings=shape.src_vocab == shape.tgt_vocab,
            forced_eos_token_id=None,
        )
        network = transformers.MarianMTModel(config)
    enliven(network.eval(), shape, seed)
    return network


@torch.no_grad()
def enliven(network: Any, shape: Shape, seed: int) -> None:
    """Draw weights such that greedy and beam answers vary in tokens and in length.

    Queries and keys are drawn wide, so that attention is not an average; the output's bias makes
    all tokens alike on average, and `</s>` the likelier the longer a target is.
    """
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if "embed_positions" in name and not shape.bart:
            continue  # computed, not drawn
        if parameter.dim() == 1:
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(mean, 0.1, generator=draw)
        else:
            wide = 3.0 if "q_proj" in name or "k_proj" in name else 1.0
            parameter.normal_(0.0, wide / math.sqrt(parameter.shape[-1]), generator=draw)
    decoder, steep = network.model.decoder, 0.5 if shape.bart else 1.5
    positions = decoder.embed_positions.weight
    if shape.bart:
        slope = torch.randn(shape.dim, generator=draw)
        positions += torch.linspace(-1.5, 1.5, len(positions))[:, None] * slope / slope.norm()
    decoder.embed_tokens.weight.mul_(2.0)  # the next token shall depend on the last one
    network.lm_head.weight -= 0.7 * decoder.embed_tokens.weight  # and not repeat it
    network.lm_head.weight[EOS] += steep * (positions[shape.positions // 2] - positions[2])
    network.final_logits_bias.zero_()
    src = torch.randint(3, shape.src_vocab, (64, 8), generator=draw)
    tgt = torch.randint(3, shape.tgt_vocab, (64, 12), generator=draw)
    logits = network(input_ids=src, decoder_input_ids=tgt).logits
    scale = SPREAD / logits.std(dim=(0, 1)).mean()
    network.lm_head.weight *= scale
    network.final_logits_bias -= scale * logits.mean(dim=(0, 1))
    network.final_logits_bias[0, EOS] += SPREAD / 2 if shape.bart else -1.5 * SPREAD
    network.final_logits_bias[0, PAD] = -torch.inf  # as Marian's checkpoints have it


# --- our side ------------------------------------------------------------------------------------


class Gelu(nn.Module):
    """BART's feed-forward."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.expand = nn.Linear(dim, hidden)
        self.contract = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        contracted: Tensor = self.contract(F.gelu(self.expand(x)))
        return contracted


class Relu(Gelu):
    """Marian's."""

    def forward(self, x: Tensor) -> Tensor:
        contracted: Tensor = self.contract(F.relu(self.expand(x)))
        return contracted


class Table(nn.Module):
    """Positions looked up in a table, from a row of it on."""

    def __init__(self, table: Tensor, offset: int) -> None:
        super().__init__()
        self.table = nn.Parameter(table)
        self.offset = offset

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions + self.offset, self.table)


class NormedEmbedding(Embedding):
    """BART's embeddings, with a norm behind them."""

    norm: nn.Module

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        normed: Tensor = self.norm(super().forward(ids, positions))
        return normed


def bridge(shape: Shape, weights: dict[str, Tensor]) -> LoadedModel:
    """Our model of the same weights, given under the reference's names."""
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    encoder = Encoder(
        _embedding(shape, weights, "model.encoder"),
        [_encoder_layer(shape, weights, i) for i in range(shape.encoder_layers)],
        nn.Identity(),
    )
    decoder = Decoder(
        _embedding(shape, weights, "model.decoder"),
        [_decoder_layer(shape, weights, i) for i in range(shape.decoder_layers)],
        nn.Identity(),
    )
    output = nn.Linear(shape.dim, shape.tgt_vocab)
    output.weight = nn.Parameter(weights.get("lm_head.weight", weights.get("model.shared.weight")))
    output.bias = nn.Parameter(weights["final_logits_bias"][0])
    network = Transformer(encoder, decoder, output, PAD).eval().requires_grad_(False)
    spec = ModelSpec(
        family="bart" if shape.bart else "marian",
        src_vocab_size=shape.src_vocab,
        tgt_vocab_size=shape.tgt_vocab,
        pad_id=PAD,
        decoder_start_ids=(shape.start,),
        eos_id=EOS,
        unk_id=None,
        max_src=shape.positions,
        max_tgt=shape.positions,
        default_max_new_tokens=20,
    )
    return LoadedModel(
        directory=Path("nowhere"),
        spec=spec,
        network=network,
        source_tokenizer=None,
        target_tokenizer=None,
        parameters=network.parameter_count(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        stepper=lambda config: CachedStepper(network, spec, config),
    )


def _embedding(shape: Shape, weights: dict[str, Tensor], side: str) -> Embedding:
    table = weights.get(f"{side}.embed_tokens.weight", weights.get("model.shared.weight"))
    assert table is not None
    kind = NormedEmbedding if shape.bart else Embedding
    embedding = kind(
        nn.Embedding.from_pretrained(table),
        Table(weights[f"{side}.embed_positions.weight"], 2 if shape.bart else 0),
        math.sqrt(shape.dim) if shape.scaled else 1.0,
    )
    if isinstance(embedding, NormedEmbedding):
        embedding.norm = _load(LayerNorm(shape.dim), weights, f"{side}.layernorm_embedding")
    return embedding


def _encoder_layer(shape: Shape, weights: dict[str, Tensor], i: int) -> EncoderLayer:
    name = f"model.encoder.layers.{i}"
    norms = ("self_attn_layer_norm", "final_layer_norm")
    return EncoderLayer(
        _attention(shape, weights, f"{name}.self_attn"),
        _feed_forward(shape, weights, name),
        [_residual(shape, weights, f"{name}.{norm}") for norm in norms],
    )


def _decoder_layer(shape: Shape, weights: dict[str, Tensor], i: int) -> DecoderLayer:
    name = f"model.decoder.layers.{i}"
    norms = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
    return DecoderLayer(
        _attention(shape, weights, f"{name}.self_attn"),
        _attention(shape, weights, f"{name}.encoder_attn"),
        _feed_forward(shape, weights, name),
        [_residual(shape, weights, f"{name}.{norm}") for norm in norms],
    )


def _attention(shape: Shape, weights: dict[str, Tensor], name: str) -> MultiHeadAttention:
    attention = MultiHeadAttention(shape.dim, shape.heads)
    for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "out")):
        _load(getattr(attention, ours), weights, f"{name}.{theirs}_proj")
    return attention


def _feed_forward(shape: Shape, weights: dict[str, Tensor], layer: str) -> Any:
    network = (Gelu if shape.bart else Relu)(shape.dim, shape.hidden)
    _load(network.expand, weights, f"{layer}.fc1")
    _load(network.contract, weights, f"{layer}.fc2")
    return network


def _residual(shape: Shape, weights: dict[str, Tensor], norm: str) -> PostNorm:
    return PostNorm(_load(LayerNorm(shape.dim), weights, norm))


def _load(module: nn.Module, weights: dict[str, Tensor], name: str) -> nn.Module:
    module.load_state_dict({part: weights[f"{name}.{part}"] for part in ("weight", "bias")})
    return module
