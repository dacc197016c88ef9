"""BART and mBART, as `transformers` stores them.

References:
    Lewis et al., "BART", 2019 (https://arxiv.org/abs/1910.13461).
    Liu et al., "Multilingual Denoising Pre-training", 2020 (https://arxiv.org/abs/2001.08210).

What differs from the paper's Transformer:

- Positions are learned, and their table starts with two rows that nothing uses: position 0 is row
  2. (Fairseq counts positions from its padding id, 1, on.)
- A norm stands behind the sum of token and position, `layernorm_embedding`.
- Feed-forwards have GELU, or what `activation_function` says.
- One token table for both sides and the output, with a bias on the logits, `final_logits_bias`.
- mBART is pre-norm with a final norm, BART post-norm without.
- The decoder starts with `</s>` and then says `<s>` itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers as backends
import torch
from tokenizers import decoders, models, pre_tokenizers, processors
from torch import nn

from model.byte_level import byte_level
from model.checkpoint import ModelError
from model.layers import Embedding, LayerNorm, LearnedPositions, PostNorm, PreNorm
from model.loader import Blueprint, read_config
from model.multilingual import fairseq_tokenizer, json_tokenizer
from model.pretrained import (
    Options,
    Shape,
    Shapes,
    SpecialTokens,
    Tables,
    decoder_layers,
    encoder_layers,
    ignored_tensors,
    output_layer,
    pair,
    read_shape,
    read_spec,
    stack_names,
    table_names,
    token_tables,
)
from model.steppers import CachedStepper
from model.tokenizer import BOS, EOS, PAD, UNK, JsonTokenizer, Tokenizer
from model.transformer import Decoder, Encoder, Transformer

MODEL_TYPES = ("bart", "mbart")

PREFIX = "model."

OFFSET = 2
"""The row of position 0."""


@dataclass(frozen=True)
class Variant:
    """What tells the two apart.

    Attributes:
        residual: how residuals are taken.
        final_norm: whether a norm follows the last layer.
        tokens: ids where `config.json` names none.
    """

    residual: type[PreNorm] | type[PostNorm]
    final_norm: bool
    tokens: SpecialTokens


VARIANTS = {
    "bart": Variant(PostNorm, False, SpecialTokens(1, bos=0, eos=2, start=2, forced_eos=2)),
    "mbart": Variant(PreNorm, True, SpecialTokens(1, bos=0, eos=2, start=None, forced_eos=2)),
}


def blueprint(
    config: dict[str, Any], shapes: Shapes, generation: dict[str, Any] | None
) -> Blueprint:
    """See `model.loader.Family.blueprint`."""
    family = config["model_type"]
    variant = VARIANTS[family]
    options = Options(config)
    shape = read_shape(options)
    # What older files state of the architecture is not read by the reference: it must be so.
    options.only("normalize_before", variant.final_norm)
    options.only("add_final_layer_norm", variant.final_norm)
    options.only("normalize_embedding", True)
    options.only("static_position_embeddings", False)
    options.ignore(["grapheme_chars", "phoneme_chars"])  # see `tokenizers`
    size = shape.vocab_size
    spec = read_spec(
        family, options, generation, variant.tokens, (size, size), shape.max_position_embeddings
    )
    tables = Tables.find(shapes, one_vocabulary=True, tied=shape.tie_word_embeddings)
    with torch.device("meta"):
        network = build(shape, variant, tables, shapes, spec.pad_id)
    return Blueprint(
        network=network,
        spec=spec,
        names=tensor_names(shape, variant, network, tables),
        stepper=partial(CachedStepper, network, spec),
        ignored=ignored_tensors(shapes, tables, (size, shape.d_model)),
        copies=tables.copies,
    )


def build(
    shape: Shape, variant: Variant, tables: Tables, shapes: Shapes, pad_id: int
) -> Transformer:
    """Compose the network."""
    dim = shape.d_model

    def embedding(tokens: nn.Embedding) -> Embedding:
        positions = LearnedPositions(shape.max_position_embeddings, dim, OFFSET)
        return Embedding(tokens, positions, shape.scale, sum_norm=LayerNorm(dim))

    def final_norm() -> nn.Module:
        return LayerNorm(dim) if variant.final_norm else nn.Identity()

    source, target = token_tables(tables, (shape.vocab_size, shape.vocab_size), dim)
    residual = variant.residual
    return Transformer(
        Encoder(embedding(source), encoder_layers(shape, residual), final_norm()),
        Decoder(embedding(target), decoder_layers(shape, residual), final_norm()),
        output_layer(shapes, tables, target),
        pad_id,
    )


def tensor_names(
    shape: Shape, variant: Variant, network: Transformer, tables: Tables
) -> dict[str, str]:
    """Parameter name here -> tensor name."""
    names = stack_names(shape) | table_names(network, tables)
    for side in ("encoder", "decoder"):
        theirs = f"model.{side}"
        names[f"{side}.embedding.positions.weight"] = f"{theirs}.embed_positions.weight"
        names |= pair(f"{side}.embedding.sum_norm", f"{theirs}.layernorm_embedding")
        if variant.final_norm:
            names |= pair(f"{side}.norm", f"{theirs}.layer_norm")
    return names


# --- tokenizers ----------------------------------------------------------------------------------


def tokenizers(directory: Path) -> tuple[Tokenizer | None, Tokenizer | None]:
    """See `model.loader.Family.tokenizers`.

    In order of preference: `source_tokenizer.json` and `target_tokenizer.json`, for models whose
    two sides differ; `tokenizer.json` for both; `sentencepiece.bpe.model`, mBART's; `vocab.json`
    with `merges.txt`, as older checkpoints have it; `grapheme_chars` and `phoneme_chars` in
    `config.json`.
    """
    sides = directory / "source_tokenizer.json", directory / "target_tokenizer.json"
    if all(path.exists() for path in sides):
        return JsonTokenizer.load(sides[0]), JsonTokenizer.load(sides[1])
    config = read_config(directory)
    if (directory / "tokenizer.json").exists():
        both: Tokenizer = json_tokenizer(directory / "tokenizer.json")
        return both, both
    if (directory / "sentencepiece.bpe.model").exists():
        both = fairseq_tokenizer(directory / "sentencepiece.bpe.model", "MBartTokenizer")
        return both, both
    if (directory / "vocab.json").exists() and (directory / "merges.txt").exists():
        both = byte_level(directory / "vocab.json", directory / "merges.txt")
        return both, both
    if "grapheme_chars" in config and "phoneme_chars" in config:
        return by_character(config, "grapheme_chars"), by_character(config, "phoneme_chars")
    return None, None


def by_character(config: Mapping[str, Any], key: str) -> JsonTokenizer:
    """A vocabulary of characters, whose place in the config's string is their id.

    Ids that the config names as special, and the places of a character that occurs more than once
    (they are placeholders), are no characters: the first of these that is not special is `<unk>`.
    A text is `<s>`, its characters, `</s>`.
    """
    characters = config[key]
    if not isinstance(characters, str):
        raise ModelError(f"{key} must be a string, got {characters!r}")
    special = {config[f"{name}_token_id"]: token for name, token in NAMED.items()}
    vocabulary: dict[str, int] = {}
    for id, character in enumerate(characters):
        if id in special:
            vocabulary[special[id]] = id
        elif characters.count(character) == 1:
            vocabulary[character] = id
        else:
            vocabulary[UNK if UNK not in vocabulary else f"<unused{id}>"] = id
    if UNK not in vocabulary:
        raise ModelError(f"{key} has no place for unknown characters")
    backend = backends.Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(backends.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([token for token in vocabulary if len(token) > 1])
    frame = [(token, vocabulary[token]) for token in (BOS, EOS)]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=frame
    )
    return JsonTokenizer(backend)


NAMED = {"pad": PAD, "bos": BOS, "eos": EOS}
"""Special tokens by the names of their ids in a config."""
