"""T5, Flan-T5, T5 v1.1, mT5 and ByT5, as `transformers` stores them.

References:
    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", 2019 (https://arxiv.org/abs/1910.10683).
    Shazeer, "GLU Variants Improve Transformer", 2020 (https://arxiv.org/abs/2002.05202).
    Xue et al., "mT5", 2020 (https://arxiv.org/abs/2010.11934), and "ByT5", 2021
    (https://arxiv.org/abs/2105.13626).

What differs from the paper's Transformer:

- Tokens carry no positions. Self-attentions add a bias to their scores by how far a key is from
  the query (`RelativePositionBias`): one table for the encoder, one for the decoder, each stored
  with its first layer. Cross-attention has none.
- Scores are not divided by the root of a head's width: the initialisation took that over. Heads
  may be wider or narrower than `d_model / num_heads`.
- Pre-norm with a final norm; norms take no mean off, and nothing has a bias.
- Feed-forwards have ReLU, or from v1.1 on a gate (`feed_forward_proj`). The second matrix
  leaves the range of float16 in published models, so that it stays float32 there, and with it the
  sum that skips the layers.
- v1.0 multiplies what goes into the output layer, which is its token table, by
  `d_model ** -0.5`. From v1.1 on there is no such factor, and the output layer has its own tensor.
- The decoder starts with `<pad>`.
- The vocabulary is padded to a round number, so that some ids are of no token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers as backends
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import MultiHeadAttention
from model.byte_level import byte_level
from model.checkpoint import ModelError
from model.languages import Languages
from model.layers import (
    Activation,
    Embedding,
    FeedForward,
    NoPositions,
    PreNorm,
    RelativePositionBias,
    RMSNorm,
    ScaledOutput,
    token_table,
)
from model.loader import Blueprint, read_config, read_object
from model.multilingual import added_tokens
from model.pretrained import ACTIVATIONS, Options, Shapes, SpecialTokens, Tables, read_spec
from model.steppers import CachedStepper
from model.tokenizer import EOS, PAD, UNK, JsonTokenizer, SentencePieceTokenizer, Tokenizer
from model.transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, Transformer

MODEL_TYPES = ("t5", "mt5")

PREFIX = ""

MAX_LENGTH = 4096
"""Tokens of a source, and of a target. The architecture has no such limit, but the bias takes
memory by the square of a length. (`n_positions` of published files is what they were trained
on; the reference does not read it either.)"""

GATED = "gated-"


@dataclass(frozen=True)
class T5Shape:
    """What a `config.json` says of the network, under its names.

    Attributes:
        d_kv: width of a head.
        feed_forward_proj: an activation, or "gated-" and an activation.
        scaled_output: whether hidden states are multiplied by `d_model ** -0.5` at the end.
    """

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_decoder_layers: int
    num_heads: int
    relative_attention_num_buckets: int
    relative_attention_max_distance: int
    layer_norm_epsilon: float
    feed_forward_proj: str
    scaled_output: bool

    @property
    def gated(self) -> bool:
        return self.feed_forward_proj.startswith(GATED)

    @property
    def activation(self) -> Activation:
        # What T5 calls gated GELU is the approximation by tanh.
        name = self.feed_forward_proj.removeprefix(GATED)
        return ACTIVATIONS["gelu_new" if self.gated and name == "gelu" else name]


def blueprint(
    config: dict[str, Any], shapes: Shapes, generation: dict[str, Any] | None
) -> Blueprint:
    """See `model.loader.Family.blueprint`."""
    family = config["model_type"]
    options = Options(config)
    shape = read_shape(family, options)
    start = options.token("pad_token_id", shape.vocab_size) or 0
    tokens = SpecialTokens(start, bos=None, eos=1, start=start, forced_eos=None)
    size = shape.vocab_size
    spec = read_spec(family, options, generation, tokens, (size, size), MAX_LENGTH)
    tables = find_tables(shapes)
    with torch.device("meta"):
        network = build(shape, tables, spec.pad_id)
    return Blueprint(
        network=network,
        spec=spec,
        names=tensor_names(shape, tables),
        stepper=partial(CachedStepper, network, spec),
        ignored={CROSS_BIAS: (shape.relative_attention_num_buckets, shape.num_heads)},
        copies=tables.copies,
        wide=[
            n for n, _ in network.named_parameters() if n.endswith("feed_forward.contract.weight")
        ],
    )


def read_shape(family: str, options: Options) -> T5Shape:
    """Take a network's sizes.

    Raises:
        ModelError: one is missing or of the wrong kind, or the feed-forward is not known.
    """
    required = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")
    sizes = {name: options.integer(name, least=1) for name in required}
    options.only("hidden_size", sizes["d_model"])  # the same again, as others call it
    options.only("num_attention_heads", sizes["num_heads"])
    epsilon = options.number("layer_norm_epsilon")
    shape = T5Shape(
        **sizes,
        num_decoder_layers=options.integer("num_decoder_layers", sizes["num_layers"], least=1),
        relative_attention_num_buckets=options.integer(
            "relative_attention_num_buckets", 32, least=2
        ),
        relative_attention_max_distance=options.integer(
            "relative_attention_max_distance", 128, least=2
        ),
        layer_norm_epsilon=1e-6 if epsilon is None else epsilon,
        feed_forward_proj=_feed_forward(family, options),
        scaled_output=_scaled_output(family, options),
    )
    options.ignore(["dropout_rate", "initializer_factor"])  # of training
    options.ignore(["n_positions"])  # see `MAX_LENGTH`
    return shape


def _feed_forward(family: str, options: Options) -> str:
    named = options.take("feed_forward_proj", "relu" if family == "t5" else "gated-gelu")
    known = [f"{gate}{activation}" for gate in ("", GATED) for activation in ACTIVATIONS]
    if named not in known:
        raise ModelError(f"feed_forward_proj must be one of {', '.join(known)}, got {named!r}")
    # Newer files say the same again.
    activation = named.removeprefix(GATED)
    options.only("is_gated_act", named != activation)
    options.only("dense_act_fn", "gelu_new" if named == "gated-gelu" else activation)
    return str(named)


def _scaled_output(family: str, options: Options) -> bool:
    """Files before `scale_decoder_outputs` say it by whether the output is tied; mT5 has none.

    Whether it is tied they need not say: an output layer of its own is in the file or it is not.
    """
    untied = options.flag("tie_word_embeddings", True) is False
    stated = options.flag("scale_decoder_outputs")
    if family == "mt5":
        return False
    return not untied if stated is None else stated


# --- composition ----------------------------------------------------------------------------------


class DenseFeedForward(FeedForward):
    """Feed-forward whose second matrix may be wider than the rest, see above."""

    def forward(self, x: Tensor) -> Tensor:
        plain = isinstance(self.contract, nn.Linear)  # a packed layer is as wide as the others
        dtype = self.contract.weight.dtype if plain else x.dtype
        contracted: Tensor = self.contract(self.hidden(x, dtype))
        return contracted

    def hidden(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """What goes into the second matrix, ``[batch, length, hidden]``."""
        activated: Tensor = self.activation(self.expand(x)).to(dtype)
        return activated


class GatedFeedForward(DenseFeedForward):
    """``(activation(x G) * x W1) W2`` (Shazeer)."""

    def __init__(self, dim: int, hidden: int, activation: Activation = F.relu) -> None:
        super().__init__(dim, hidden, bias=False, activation=activation)
        self.gate = nn.Linear(dim, hidden, bias=False)

    def hidden(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        gated: Tensor = self.activation(self.gate(x)).to(dtype) * self.expand(x).to(dtype)
        return gated


def build(shape: T5Shape, tables: Tables, pad_id: int) -> Transformer:
    """Compose the network."""
    dim = shape.d_model

    def attention() -> MultiHeadAttention:
        return MultiHeadAttention(dim, shape.num_heads, bias=False, head_dim=shape.d_kv, scale=1.0)

    def feed_forward() -> FeedForward:
        if shape.gated:
            return GatedFeedForward(dim, shape.d_ff, shape.activation)
        return DenseFeedForward(dim, shape.d_ff, bias=False, activation=shape.activation)

    def norm() -> RMSNorm:
        return RMSNorm(dim, shape.layer_norm_epsilon)

    def position_bias(bidirectional: bool) -> RelativePositionBias:
        return RelativePositionBias(
            shape.num_heads,
            shape.relative_attention_num_buckets,
            shape.relative_attention_max_distance,
            bidirectional,
        )

    embedding = Embedding(token_table(shape.vocab_size, dim), NoPositions())
    encoder = [
        EncoderLayer(attention(), feed_forward(), [PreNorm(norm()) for _ in range(2)])
        for _ in range(shape.num_layers)
    ]
    decoder = [
        DecoderLayer(attention(), attention(), feed_forward(), [PreNorm(norm()) for _ in range(3)])
        for _ in range(shape.num_decoder_layers)
    ]
    projection = nn.Linear(dim, shape.vocab_size, bias=False)
    if tables.output == tables.target:
        projection.weight = embedding.tokens.weight
    return Transformer(
        Encoder(embedding, encoder, norm(), position_bias(bidirectional=True)),
        Decoder(embedding, decoder, norm(), position_bias(bidirectional=False)),
        ScaledOutput(projection, dim**-0.5) if shape.scaled_output else projection,
        pad_id,
    )


# --- tensors --------------------------------------------------------------------------------------

TABLES = ("shared.weight", "decoder.embed_tokens.weight", "encoder.embed_tokens.weight")
OUTPUT = "lm_head.weight"
POSITION_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
CROSS_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
"""In files converted from the first release: a table that no version has ever used."""


def find_tables(shapes: Shapes) -> Tables:
    """The one token table under any of its names, and the output layer where it has a tensor.

    What the configuration says of tying is no help: files of tied models may hold the output
    layer, and newer files of untied ones say that they were tied.
    """
    found = [name for name in (*TABLES, OUTPUT) if name in shapes]
    table = found[0] if found else TABLES[0]
    copies = {name: table for name in TABLES if name != table}
    return Tables(table, table, OUTPUT if OUTPUT in shapes else table, copies)


def tensor_names(shape: T5Shape, tables: Tables) -> dict[str, str]:
    """Parameter name here -> tensor name."""
    names = {"encoder.embedding.tokens.weight": tables.source}
    if tables.output != tables.target:
        scaled = "projection." if shape.scaled_output else ""
        names[f"output.{scaled}weight"] = tables.output
    for side in ("encoder", "decoder"):
        names[f"{side}.position_bias.weight"] = f"{side}.{POSITION_BIAS}"
        names[f"{side}.norm.weight"] = f"{side}.final_layer_norm.weight"
    for i in range(shape.num_layers):
        ours, theirs = f"encoder.layers.{i}", f"encoder.block.{i}.layer"
        names |= _attention(f"{ours}.attention", f"{theirs}.0.SelfAttention")
        names |= _dense(f"{ours}.feed_forward", f"{theirs}.1.DenseReluDense", shape.gated)
        names |= _norms(ours, theirs, 2)
    for i in range(shape.num_decoder_layers):
        ours, theirs = f"decoder.layers.{i}", f"decoder.block.{i}.layer"
        names |= _attention(f"{ours}.self_attention", f"{theirs}.0.SelfAttention")
        names |= _attention(f"{ours}.cross_attention", f"{theirs}.1.EncDecAttention")
        names |= _dense(f"{ours}.feed_forward", f"{theirs}.2.DenseReluDense", shape.gated)
        names |= _norms(ours, theirs, 3)
    return names


def _attention(ours: str, theirs: str) -> dict[str, str]:
    words = ("query", "key", "value", "output")
    return {f"{ours}.{word}.weight": f"{theirs}.{word[0]}.weight" for word in words}


def _dense(ours: str, theirs: str, gated: bool) -> dict[str, str]:
    names = {"gate": "wi_0", "expand": "wi_1"} if gated else {"expand": "wi"}
    names["contract"] = "wo"
    return {f"{ours}.{own}.weight": f"{theirs}.{other}.weight" for own, other in names.items()}


def _norms(ours: str, theirs: str, count: int) -> dict[str, str]:
    return {
        f"{ours}.residuals.{i}.norm.weight": f"{theirs}.{i}.layer_norm.weight" for i in range(count)
    }


# --- tokenizers ----------------------------------------------------------------------------------

SENTINEL = re.compile(r"(<extra_id_\d+>)")
"""What stands for a gap in a text: the one kind of special token that callers do write."""


def tokenizers(directory: Path) -> tuple[Tokenizer | None, Tokenizer | None]:
    """See `model.loader.Family.tokenizers`, one for both sides.

    In order of preference: `tokenizer.json`; `spiece.model`; `vocab.json` with `merges.txt`, as
    models of programs have it (CodeT5), whose sentinels are added tokens; bytes, where
    `tokenizer_config.json` or `config.json` name ByT5's tokenizer, which has no file.
    """
    if (directory / "tokenizer.json").exists():
        both: Tokenizer = JsonSentinelTokenizer.load(directory / "tokenizer.json")
        return both, both
    config = read_config(directory)
    if (directory / "tokenizer_config.json").exists():
        config |= read_object(directory / "tokenizer_config.json")
    if (directory / "spiece.model").exists():
        # mT5's own pieces include sentinels.
        extra = Options(config).integer("extra_ids", 0 if config["model_type"] == "mt5" else 100)
        inner = SentencePieceTokenizer.load(directory / "spiece.model")
        both = SentinelTokenizer(inner, sentinel_ids(inner.vocab_size, extra, falling=True))
        refuse_added(directory, both)
        return both, both
    if (directory / "vocab.json").exists() and (directory / "merges.txt").exists():
        cutter = byte_level(directory / "vocab.json", directory / "merges.txt")
        both = JsonSentinelTokenizer.of(json.loads(cutter.backend.to_str()))
        return both, both
    if config.get("tokenizer_class") == "ByT5Tokenizer":
        # Later releases write 0, but mean the 125 that have always been there.
        extra = Options(config).integer("extra_ids", 0) or 125
        bytes_only = ByteTokenizer()
        ids = sentinel_ids(bytes_only.vocab_size, extra, falling=False)
        both = SentinelTokenizer(bytes_only, ids)
        refuse_added(directory, both)
        return both, both
    return None, None


def refuse_added(directory: Path, tokenizer: SentinelTokenizer) -> None:
    """Refuse tokens that were added later, which only the other formats are read with.

    Raises:
        ModelError: names them.
    """
    known = {tokenizer.token(id): id for id in range(tokenizer.vocab_size)}
    if added := added_tokens(directory, known).names:
        raise ModelError(
            f"{directory}: added tokens need a tokenizer.json here, got "
            f"{', '.join(map(repr, added.values()))}"
        )


def sentinel_ids(first: int, count: int, falling: bool) -> dict[str, int]:
    """Sentinels behind a vocabulary; T5's last one comes first.

    >>> sentinel_ids(7, 2, falling=True)
    {'<extra_id_0>': 8, '<extra_id_1>': 7}
    """
    return {f"<extra_id_{i}>": first + (count - 1 - i if falling else i) for i in range(count)}


class JsonSentinelTokenizer(JsonTokenizer):
    """A `tokenizer.json` whose sentinels are found in texts, unlike other special tokens."""

    def __init__(self, backend: backends.Tokenizer) -> None:
        super().__init__(backend)
        added = backend.get_added_tokens_decoder()
        self._sentinels = {id for id, token in added.items() if SENTINEL.fullmatch(token.content)}

    @classmethod
    def load(cls, path: Path) -> JsonSentinelTokenizer:
        """Raises ValueError where the file holds no tokenizer."""
        contents = read_object(path)
        try:
            return cls.of(contents)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path}: not a tokenizer: {error}") from error

    @classmethod
    def of(cls, contents: Mapping[str, Any]) -> JsonSentinelTokenizer:
        """The tokenizer that such a file describes."""
        for token in contents.get("added_tokens") or ():
            if SENTINEL.fullmatch(token["content"]):
                token["special"] = False  # the library finds all special ones or none
        return cls(backends.Tokenizer.from_str(json.dumps(contents)))

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode([id for id in ids if id not in self._sentinels])


class SentinelTokenizer:
    """A tokenizer, and sentinels behind its vocabulary.

    Args:
        inner: cuts what is between sentinels.
        sentinels: ids by name.
    """

    languages: Languages | None = None  # a task's prefix names them, in the text

    def __init__(
        self, inner: SentencePieceTokenizer | ByteTokenizer, sentinels: Mapping[str, int]
    ) -> None:
        self.inner = inner
        self.sentinels = sentinels
        self.suffix = inner.suffix
        self.unk_id = inner.unk_id
        self.vocab_size = inner.vocab_size + len(sentinels)
        self._names = {id: name for name, id in sentinels.items()}
        [self._tail] = inner.encode([""])

    def encode(self, texts: Sequence[str], *, framed: bool = True) -> list[list[int]]:
        return [self._ids(text) + (self._tail if framed else []) for text in texts]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in SENTINEL.split(text):
            known = self.sentinels.get(part)
            ids += self.inner.encode([part], framed=False)[0] if known is None else [known]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        pieces = [id for id in ids if 0 <= id < self.inner.vocab_size and id != self.unk_id]
        return self.inner.decode(pieces)

    def token(self, id: int) -> str:
        return self._names[id] if id in self._names else self.inner.token(id)

    def save(self, path: Path) -> None:
        self.inner.save(path)


class ByteTokenizer:
    """ByT5's: the bytes of UTF-8, each 3 higher, and `</s>`."""

    languages: Languages | None = None

    suffix = ".json"
    unk_id = 2
    vocab_size = 3 + 256

    def encode(self, texts: Sequence[str], *, framed: bool = True) -> list[list[int]]:
        tail = [1] if framed else []
        return [[byte + 3 for byte in text.encode()] + tail for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        # What is no UTF-8 is left out, as the reference does it.
        return bytes(id - 3 for id in ids if 3 <= id < self.vocab_size).decode(errors="ignore")

    def token(self, id: int) -> str:
        if not 0 <= id < self.vocab_size:
            raise KeyError(f"id {id} is not in the vocabulary of {self.vocab_size}")
        return (PAD, EOS, UNK)[id] if id < 3 else chr(id - 3)

    def save(self, path: Path) -> None:
        """A file that says what it is; there is nothing else to keep."""
        path.write_text('{"tokenizer_class": "ByT5Tokenizer"}\n', encoding="utf-8")
