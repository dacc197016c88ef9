"""Marian and OPUS-MT, as `transformers` stores them.

References:
    Junczys-Dowmunt et al., "Marian", 2018 (https://arxiv.org/abs/1804.00344).
    Tiedemann and Thottingal, "OPUS-MT", 2020 (https://aclanthology.org/2020.eamt-1.61).

What differs from the paper's Transformer:

- Position encodings are the paper's numbers in another order, all sines before all cosines. Files
  may hold them, rounded as they are; then they are read, otherwise computed.
- Feed-forwards have what `activation_function` says, in most published files swish.
- A bias on the logits, `final_logits_bias`.
- Source and target share one table, or each has its own (`share_encoder_decoder_embeddings`), which
  the output layer is tied to.
- The decoder starts with `<pad>`, which is in the vocabulary but must never be generated: the files
  say so by `bad_words_ids`.
- Texts are cut by SentencePiece, but ids are those of `vocab.json`, see `MarianTokenizer`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers as backends
import torch
from torch import nn

from model.checkpoint import ModelError
from model.languages import Languages, codes_among
from model.layers import (
    Embedding,
    FixedPositions,
    LearnedPositions,
    PostNorm,
    halved_sinusoidal_table,
)
from model.loader import Blueprint, read_object
from model.multilingual import added_tokens, need_ids
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
    read_shape,
    read_spec,
    stack_names,
    table_names,
    token_tables,
)
from model.steppers import CachedStepper
from model.tokenizer import (
    EOS,
    PAD,
    UNK,
    AddedTokens,
    JsonTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from model.transformer import Decoder, Encoder, Transformer

MODEL_TYPES = ("marian",)

PREFIX = "model."

TOKENS = SpecialTokens(pad=58100, bos=None, eos=0, start=58100, forced_eos=0)
"""Where `config.json` names none; they are those of the first published models."""


def blueprint(
    config: dict[str, Any], shapes: Shapes, generation: dict[str, Any] | None
) -> Blueprint:
    """See `model.loader.Family.blueprint`."""
    options = Options(config)
    shape = read_shape(options)
    one_vocabulary = bool(options.flag("share_encoder_decoder_embeddings", True))
    decoder_size = options.integer("decoder_vocab_size", shape.vocab_size, least=1)
    if one_vocabulary and decoder_size != shape.vocab_size:
        raise ModelError(
            "decoder_vocab_size must equal vocab_size where share_encoder_decoder_embeddings is "
            f"true, got {decoder_size} and {shape.vocab_size}"
        )
    # What older files state of the architecture is not read by the reference: it must be so.
    options.only("normalize_before", False)
    options.only("add_final_layer_norm", False)
    options.only("normalize_embedding", False)
    options.only("static_position_embeddings", True)
    sizes = (shape.vocab_size, decoder_size)
    spec = read_spec(
        MODEL_TYPES[0], options, generation, TOKENS, sizes, shape.max_position_embeddings
    )
    tables = Tables.find(shapes, one_vocabulary=one_vocabulary, tied=shape.tie_word_embeddings)
    with torch.device("meta"):
        network = build(shape, sizes, tables, shapes, spec.pad_id)
    return Blueprint(
        network=network,
        spec=spec,
        names=tensor_names(shape, network, tables),
        stepper=partial(CachedStepper, network, spec),
        ignored=ignored_tensors(shapes, tables, (sizes[0], shape.d_model)),
        copies=tables.copies,
    )


def build(
    shape: Shape, sizes: tuple[int, int], tables: Tables, shapes: Shapes, pad_id: int
) -> Transformer:
    """Compose the network."""
    dim, length = shape.d_model, shape.max_position_embeddings

    def embedding(tokens: nn.Embedding, side: str) -> Embedding:
        if _positions(side) in shapes:
            positions: nn.Module = LearnedPositions(length, dim)
        else:
            positions = FixedPositions(halved_sinusoidal_table(length, dim))
        return Embedding(tokens, positions, shape.scale)

    source, target = token_tables(tables, sizes, dim)
    return Transformer(
        Encoder(embedding(source, "encoder"), encoder_layers(shape, PostNorm), nn.Identity()),
        Decoder(embedding(target, "decoder"), decoder_layers(shape, PostNorm), nn.Identity()),
        output_layer(shapes, tables, target),
        pad_id,
    )


def tensor_names(shape: Shape, network: Transformer, tables: Tables) -> dict[str, str]:
    """Parameter name here -> tensor name."""
    names = stack_names(shape) | table_names(network, tables)
    for side, stack in (("encoder", network.encoder), ("decoder", network.decoder)):
        if isinstance(stack.embedding.positions, LearnedPositions):
            names[f"{side}.embedding.positions.weight"] = _positions(side)
    return names


def _positions(side: str) -> str:
    return f"model.{side}.embed_positions.weight"


# --- tokenizers ----------------------------------------------------------------------------------


class MarianTokenizer:
    """SentencePiece cuts a text, a separate vocabulary gives the pieces their ids.

    A language code `>>xxx<<` at the very beginning of a text is one token, whatever SentencePiece
    makes of it. What the vocabulary does not hold is `<unk>`. `</s>` ends every text.

    Args:
        cutter: SentencePiece model of the texts.
        speller: SentencePiece model that joins pieces again.
        vocabulary: piece -> id.
        languages: that a source may name. On the target side a code is text, if it ever occurs.
        added: to the vocabulary, later.
    """

    suffix = ".json"

    def __init__(
        self,
        cutter: sentencepiece.SentencePieceProcessor,
        speller: sentencepiece.SentencePieceProcessor,
        vocabulary: Mapping[str, int],
        languages: Languages | None = None,
        added: AddedTokens | None = None,
    ) -> None:
        self.languages = languages
        self.added = added or AddedTokens()
        self.cutter = cutter
        self.speller = speller
        self.vocabulary = vocabulary
        self.unk_id = vocabulary[UNK]
        self._eos = vocabulary[EOS]
        self._special = {vocabulary[token] for token in (PAD, EOS, UNK) if token in vocabulary}
        self._unsaid = self._special | set(self.added.special.values())

    @cached_property
    def pieces(self) -> dict[int, str]:
        return {id: piece for piece, id in self.vocabulary.items()} | self.added.names

    @property
    def vocab_size(self) -> int:
        return max(self.pieces) + 1

    def encode(self, texts: Sequence[str], *, framed: bool = True) -> list[list[int]]:
        end = [self._eos] if framed else []
        return [[*self.added.encode(text, self._cut), *end] for text in texts]

    def _cut(self, text: str) -> list[int]:
        code, text = split_language_code(text)
        pieces: list[str] = self.cutter.encode(text, out_type=str)
        ids = [self.vocabulary.get(piece, self.unk_id) for piece in [*code, *pieces]]
        # A caller's "</s>" is text: only the tokenizer itself may place special tokens.
        return [self.unk_id if id in self._special else id for id in ids]

    def decode(self, ids: Sequence[int]) -> str:
        pieces = [self.pieces[id] for id in ids if id not in self._unsaid and id in self.pieces]
        text: str = self.speller.decode_pieces(pieces)
        return text.replace("▁", " ").strip()

    def token(self, id: int) -> str:
        if id not in self.pieces:
            raise KeyError(f"id {id} is not in the vocabulary of {self.vocab_size}")
        return self.pieces[id]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.vocabulary, ensure_ascii=False), encoding="utf-8")


class JsonMarianTokenizer(JsonTokenizer):
    """A `tokenizer.json` of a Marian model, which does not know of leading language codes."""

    def __init__(self, backend: backends.Tokenizer, languages: Languages | None = None) -> None:
        super().__init__(backend)  # elsewhere in a text, a code is what the file makes of it
        self.languages = languages

    def encode(self, texts: Sequence[str], *, framed: bool = True) -> list[list[int]]:
        split = [split_language_code(text) for text in texts]
        encoded = super().encode([rest for _, rest in split], framed=framed)
        return [[*self._code(code), *ids] for (code, _), ids in zip(split, encoded, strict=True)]

    def _code(self, code: Sequence[str]) -> Iterator[int]:
        for token in code:
            id = self.backend.token_to_id(token)
            known = self.unk_id if id is None else id
            if known is not None:
                yield known


WRITTEN = re.compile(r">>(.*?)<<", re.DOTALL)
"""A language of the target, as a source begins with it; its group is the code."""


def split_language_code(text: str) -> tuple[list[str], str]:
    """A leading `>>xxx<<`, if there is one, and the rest.

    >>> split_language_code(">>fra<< Good morning")
    (['>>fra<<'], ' Good morning')
    """
    found = WRITTEN.match(text)
    return ([found[0]], text[found.end() :]) if found else ([], text)


def languages_among(vocabulary: Mapping[str, int]) -> Languages | None:
    """The targets that a source may name; None for a model of one target."""
    ids = codes_among(vocabulary.items(), WRITTEN)
    if not ids:
        return None
    return Languages(
        ids=ids,
        eos_id=vocabulary[EOS],
        before=True,
        source_names="tgt_lang",
        target="none",
        aliases={f">>{code}<<": code for code in ids},
        written=WRITTEN,
    )


def tokenizers(directory: Path) -> tuple[Tokenizer | None, Tokenizer | None]:
    """See `model.loader.Family.tokenizers`: `source.spm`, `target.spm`, `vocab.json`.

    Where source and target have their own vocabularies, the target's is `target_vocab.json`. A
    `tokenizer.json` serves both sides of directories that lack one of those files.
    """
    files = [directory / name for name in ("source.spm", "target.spm", "vocab.json")]
    if not all(path.exists() for path in files):
        path = directory / "tokenizer.json"
        return by_json(path) if path.exists() else (None, None)
    source, target = (SentencePieceTokenizer.load(path).backend for path in files[:2])
    vocabulary = read_vocabulary(files[2])
    added = added_tokens(directory, vocabulary)
    languages = languages_among({**vocabulary, **added.ids, **added.special})
    encoder = MarianTokenizer(source, source, vocabulary, languages, added)
    target_file = directory / "target_vocab.json"
    if target_file.exists():
        return encoder, MarianTokenizer(target, target, read_vocabulary(target_file))
    # One vocabulary: the reference joins pieces with the source's model, on both sides.
    return encoder, MarianTokenizer(target, source, vocabulary, added=added)


def by_json(path: Path) -> tuple[Tokenizer, Tokenizer]:
    """Both sides' tokenizers of a `tokenizer.json`.

    Raises:
        ValueError: the file holds no tokenizer.
        ModelError: it lacks `</s>` or `<unk>`.
    """
    target = JsonMarianTokenizer.load(path)
    vocabulary = target.backend.get_vocab()
    need_ids(path, vocabulary, EOS, UNK)
    return JsonMarianTokenizer(target.backend, languages_among(vocabulary)), target


def read_vocabulary(path: Path) -> dict[str, int]:
    """Piece -> id.

    Raises:
        ModelError: the file holds something else, or lacks `</s>` or `<unk>`.
    """
    vocabulary = read_object(path)
    if not all(isinstance(id, int) and id >= 0 for id in vocabulary.values()):
        raise ModelError(f"{path}: expected tokens with their ids")
    need_ids(path, vocabulary, EOS, UNK)
    return vocabulary
