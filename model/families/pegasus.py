"""Pegasus, as `transformers` stores it.

Reference: Zhang et al., "PEGASUS", 2019 (https://arxiv.org/abs/1912.08777).

What differs from the paper's Transformer:

- Pre-norm, with a final norm on both sides.
- Position encodings are the paper's numbers in another order, all sines before all cosines. Files
  may hold them; then they are read, otherwise computed.
- One token table for both sides and the output, with a bias on the logits, `final_logits_bias`.
- The decoder starts with `<pad>`.
- SentencePiece's ids are 103 higher here: what is below are special tokens, see `by_pieces`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from model.layers import (
    Embedding,
    FixedPositions,
    LayerNorm,
    LearnedPositions,
    PreNorm,
    halved_sinusoidal_table,
)
from model.loader import Blueprint
from model.multilingual import PieceTokenizer, added_tokens, need_ids, read_settings
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
from model.tokenizer import EOS, PAD, UNK, JsonTokenizer, SentencePieceTokenizer, Tokenizer
from model.transformer import Decoder, Encoder, Transformer

MODEL_TYPES = ("pegasus",)

PREFIX = "model."

TOKENS = SpecialTokens(pad=0, bos=None, eos=1, start=0, forced_eos=1)
"""Where `config.json` names none."""


def blueprint(
    config: dict[str, Any], shapes: Shapes, generation: dict[str, Any] | None
) -> Blueprint:
    """See `model.loader.Family.blueprint`."""
    options = Options(config)
    shape = read_shape(options)
    # What older files state of the architecture is not read by the reference: it must be so.
    options.only("normalize_before", True)
    options.only("add_final_layer_norm", True)
    options.only("normalize_embedding", False)
    options.only("static_position_embeddings", True)
    size = shape.vocab_size
    length = shape.max_position_embeddings
    spec = read_spec(MODEL_TYPES[0], options, generation, TOKENS, (size, size), length)
    tables = Tables.find(shapes, one_vocabulary=True, tied=shape.tie_word_embeddings)
    with torch.device("meta"):
        network = build(shape, tables, shapes, spec.pad_id)
    return Blueprint(
        network=network,
        spec=spec,
        names=tensor_names(shape, network, tables),
        stepper=partial(CachedStepper, network, spec),
        ignored=ignored_tensors(shapes, tables, (size, shape.d_model)),
        copies=tables.copies,
    )


def build(shape: Shape, tables: Tables, shapes: Shapes, pad_id: int) -> Transformer:
    """Compose the network."""
    dim, length = shape.d_model, shape.max_position_embeddings

    def embedding(tokens: nn.Embedding, side: str) -> Embedding:
        if _positions(side) in shapes:
            positions: nn.Module = LearnedPositions(length, dim)
        else:
            positions = FixedPositions(halved_sinusoidal_table(length, dim))
        return Embedding(tokens, positions, shape.scale)

    source, target = token_tables(tables, (shape.vocab_size, shape.vocab_size), dim)
    return Transformer(
        Encoder(embedding(source, "encoder"), encoder_layers(shape, PreNorm), LayerNorm(dim)),
        Decoder(embedding(target, "decoder"), decoder_layers(shape, PreNorm), LayerNorm(dim)),
        output_layer(shapes, tables, target),
        pad_id,
    )


def tensor_names(shape: Shape, network: Transformer, tables: Tables) -> dict[str, str]:
    """Parameter name here -> tensor name."""
    names = stack_names(shape) | table_names(network, tables)
    for side, stack in (("encoder", network.encoder), ("decoder", network.decoder)):
        names |= pair(f"{side}.norm", f"model.{side}.layer_norm")
        if isinstance(stack.embedding.positions, LearnedPositions):
            names[f"{side}.embedding.positions.weight"] = _positions(side)
    return names


def _positions(side: str) -> str:
    return f"model.{side}.embed_positions.weight"


def tokenizers(directory: Path) -> tuple[Tokenizer | None, Tokenizer | None]:
    """See `model.loader.Family.tokenizers`: `tokenizer.json` or `spiece.model`, for both sides."""
    path, pieces = directory / "tokenizer.json", directory / "spiece.model"
    both: Tokenizer | None = None
    if path.exists():
        both = JsonTokenizer.load(path)
    elif pieces.exists():
        both = by_pieces(pieces)
    return both, both


OFFSET = 103
"""How much higher ids are than SentencePiece's, unless `tokenizer_config.json` says otherwise."""


def by_pieces(path: Path) -> PieceTokenizer:
    """Pegasus' own: `<pad>`, `</s>`, the tokens of its pretraining, and pieces.

    Pretraining hid sentences behind `<mask_1>`, words behind `<mask_2>`; `<unk_2>` and so on were
    never used. No text has any of them.

    Raises:
        ValueError: the file holds no SentencePiece model.
        ModelError: `offset` is no number of ids.
    """
    settings = Options(read_settings(path.parent), str(path.parent / "tokenizer_config.json"))
    offset = settings.integer("offset", OFFSET)
    pieces = SentencePieceTokenizer.load(path)
    vocabulary = {PAD: 0, EOS: 1}
    vocabulary |= {pieces.token(id): id + offset for id in range(2, pieces.vocab_size)}
    need_ids(path, vocabulary, UNK)
    unused = [f"<unk_{i}>" for i in range(2, offset)]
    hidden = ["<mask_1>", "<mask_2>", *unused] if offset else []
    names = {token: 2 + i for i, token in enumerate(hidden)}
    special = [vocabulary[token] for token in (PAD, EOS, UNK)]
    added = added_tokens(path.parent, {**vocabulary, **names})
    return PieceTokenizer(path, vocabulary, special, None, names, added)
