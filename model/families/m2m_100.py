"""M2M100, NLLB and SMaLL-100, as `transformers` stores them.

References:
    Fan et al., "Beyond English-Centric Multilingual Machine Translation", 2020
    (https://arxiv.org/abs/2010.11125).
    NLLB Team, "No Language Left Behind", 2022 (https://arxiv.org/abs/2207.04672).
    Mohammadshahi et al., "SMaLL-100", 2022 (https://arxiv.org/abs/2210.11621).

What differs from the paper's Transformer:

- Pre-norm, with a final norm on both sides.
- Position encodings are tensor2tensor's, see `position_table`. Position 0 has the encoding of
  `pad_token_id + 1`, since fairseq counts positions from there, and `<pad>` has none.
- One token table for both sides and the output.
- The decoder starts with `</s>` and is then told the target language.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.checkpoint import ModelError
from model.languages import codes_among
from model.layers import Embedding, FixedPositions, LayerNorm, PreNorm
from model.loader import Blueprint, read_object
from model.multilingual import (
    M2M100,
    PieceTokenizer,
    added_tokens,
    convention_of,
    fairseq_tokenizer,
    json_tokenizer,
    need_ids,
    read_settings,
    speak,
)
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
from model.tokenizer import BOS, EOS, PAD, UNK, Tokenizer
from model.transformer import Decoder, Encoder, Transformer

MODEL_TYPES = ("m2m_100",)

PREFIX = "model."

TOKENS = SpecialTokens(pad=1, bos=0, eos=2, start=2, forced_eos=None)
"""Where `config.json` names none."""

OLD_POSITIONS = [f"model.{side}.embed_positions.weights" for side in ("encoder", "decoder")]
"""Old files hold the encodings. The reference computes them anew."""


def blueprint(
    config: dict[str, Any], shapes: Shapes, generation: dict[str, Any] | None
) -> Blueprint:
    """See `model.loader.Family.blueprint`."""
    options = Options({"activation_function": "relu", "scale_embedding": True} | config)
    shape = read_shape(options)
    if shape.d_model < 4:  # `position_table` divides by d_model // 2 - 1
        raise ModelError(f"d_model must be at least 4, got {shape.d_model}")
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
        network = build(shape, tables, spec.pad_id)
    ignored = ignored_tensors(shapes, tables, (size, shape.d_model))
    rows = {name: shapes[name][0] for name in OLD_POSITIONS if name in shapes}
    return Blueprint(
        network=network,
        spec=spec,
        names=tensor_names(shape, network, tables),
        stepper=partial(CachedStepper, network, spec),
        ignored=ignored | {name: (count, shape.d_model) for name, count in rows.items()},
        copies=tables.copies,
    )


class PadlessEmbedding(Embedding):
    """An embedding in which `<pad>`, should a target hold it, has no position encoding.

    Args:
        length: positions `0 .. length - 1` exist.
    """

    def __init__(self, tokens: nn.Embedding, length: int, scale: float, pad_id: int) -> None:
        dim = tokens.weight.shape[1]
        with torch.device("cpu"):  # real numbers also where a model is only sketched on "meta"
            table = position_table(pad_id + 1 + length, dim)[pad_id + 1 :]
            table = torch.cat([torch.zeros(1, dim), table])  # row 0: none
        super().__init__(tokens, FixedPositions(table), scale)
        self.pad_id = pad_id

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """See `Embedding.forward`."""
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None, :]
        rows = (positions + 1).expand(ids.shape)
        return super().forward(ids, rows.masked_fill(ids == self.pad_id, 0))


def position_table(length: int, dim: int) -> Tensor:
    """``[length, dim]``: all sines, all cosines, and a zero where `dim` is odd.

    ``table[p, i] = sin(p / 10000^(i / (half - 1)))``, ``half = dim // 2``: tensor2tensor's, whose
    exponents run up to 1, the last one included, where the paper's stop short of it. In float32, as
    the reference has it: at position 1000 its angles are off by up to 3e-5.
    """
    half = dim // 2
    rate = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angle = torch.arange(length).float()[:, None] * rate[None, :]  # [length, half]
    return torch.cat([angle.sin(), angle.cos(), torch.zeros(length, dim % 2)], dim=1)


def build(shape: Shape, tables: Tables, pad_id: int) -> Transformer:
    """Compose the network."""
    dim, length = shape.d_model, shape.max_position_embeddings

    def embedding(tokens: nn.Embedding) -> Embedding:
        return PadlessEmbedding(tokens, length, shape.scale, pad_id)

    source, target = token_tables(tables, (shape.vocab_size, shape.vocab_size), dim)
    return Transformer(
        Encoder(embedding(source), encoder_layers(shape, PreNorm), LayerNorm(dim)),
        Decoder(embedding(target), decoder_layers(shape, PreNorm), LayerNorm(dim)),
        output_layer({}, tables, target),  # the reference has no bias on the logits here
        pad_id,
    )


def tensor_names(shape: Shape, network: Transformer, tables: Tables) -> dict[str, str]:
    """Parameter name here -> tensor name."""
    names = stack_names(shape) | table_names(network, tables)
    for side in ("encoder", "decoder"):
        names |= pair(f"{side}.norm", f"model.{side}.layer_norm")
    return names


# --- tokenizers ----------------------------------------------------------------------------------

CODES = {
    "m2m100": (
        "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd "
        "gl gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg "
        "mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw "
        "ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
    ),
    "wmt21": "en ha is ja cs ru zh de",
}
"""Languages by `language_codes` of `tokenizer_config.json`; their tokens follow the vocabulary in
this order, no file of the older models holds them."""


def tokenizers(directory: Path) -> tuple[Tokenizer | None, Tokenizer | None]:
    """See `model.loader.Family.tokenizers`.

    In order of preference: `tokenizer.json`, `vocab.json` with `sentencepiece.bpe.model` (M2M100,
    SMaLL-100), `sentencepiece.bpe.model` alone (NLLB); each for both sides.
    """
    path = directory / "tokenizer.json"
    pieces, vocab = directory / "sentencepiece.bpe.model", directory / "vocab.json"
    both: Tokenizer | None = None
    if path.exists():
        both = json_tokenizer(path)
    elif pieces.exists() and vocab.exists():
        both = by_pieces(pieces, vocab)
    elif pieces.exists():
        both = fairseq_tokenizer(pieces, "NllbTokenizer")
    return both, both


def by_pieces(path: Path, vocab: Path) -> PieceTokenizer:
    """M2M100's and SMaLL-100's own: a vocabulary, and languages behind it."""
    vocabulary = read_object(vocab)
    if not all(isinstance(id, int) and id >= 0 for id in vocabulary.values()):
        raise ModelError(f"{vocab}: expected tokens with their ids")
    need_ids(vocab, vocabulary, EOS, UNK)
    settings = read_settings(path.parent)
    kind = settings.get("language_codes", "m2m100")
    if kind not in CODES:
        raise ModelError(
            f"{path.parent / 'tokenizer_config.json'}: language_codes must be one of "
            f"{', '.join(CODES)}, got {kind!r}"
        )
    ids = {code: len(vocabulary) + i for i, code in enumerate(CODES[kind].split())}
    added = added_tokens(path.parent, vocabulary)
    names = {**{f"__{code}__": id for code, id in ids.items()}, **added.special}
    convention = convention_of(settings) or M2M100
    ids = codes_among(names.items(), convention.pattern)
    languages = speak(convention, ids, vocabulary[EOS], settings)
    special = [vocabulary[token] for token in (PAD, BOS, EOS, UNK) if token in vocabulary]
    return PieceTokenizer(path, vocabulary, special, languages, names, added)
