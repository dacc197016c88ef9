"""Small random models on disk, whose answers vary: for every test that needs something to serve.

A freshly initialised Transformer (standard deviation 0.02) answers the same token for ever, and a
test of batching on it cannot fail. These are drawn wider and answer differently to each source,
in different lengths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from model.families import m2m_100, marian, t5
from model.families.seqserve import TransformerConfig, build
from model.layers import SinusoidalPositions
from model.tokenizer import build_tokenizer
from model.transformer import Transformer

LETTERS = "abcdefghijklmnopqrstuvwxyz'"
SOUNDS = "AA AE AH B CH D EH F G HH IY JH K L M N OW P R S SH T UW V W Y Z"

SHARP = 4.0
"""How much wider than the rest queries and keys are drawn, so that attention is not an average."""

NativeShape = dict[str, Any]
TINY: NativeShape = {
    "dim": 32,
    "heads": 4,
    "hidden_dim": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "max_src": 48,
    "max_tgt": 48,
    "dropout": 0.1,
    "tie_output": False,
}
"""Shape of the tiny native model, where a test names nothing else."""

TINY_TUTORIAL: dict[str, Any] = {
    "vocab_size": 29,
    "n_embd": 24,
    "n_heads": 4,
    "n_layer": 2,
    "block_size": 40,
    "hidden": 24,
}
"""Shape of the tiny tutorial model; `hidden` is the feed-forward's width, not a config key."""


def make_native_model(directory: Path, seed: int = 0, **shape: Any) -> Path:
    """A directory of the project's own family: letters in, phoneme-like words out.

    Args:
        seed: of the weights.
        shape: overrides of `TINY`, fields of `TransformerConfig`.

    Returns:
        `directory`, with `config.json`, `model.safetensors` and both tokenizers.
    """
    directory.mkdir(parents=True, exist_ok=True)
    source = build_tokenizer([LETTERS], "char", fold=True)
    target = build_tokenizer([SOUNDS], "whitespace")
    sizes = {"src_vocab_size": source.vocab_size, "tgt_vocab_size": target.vocab_size}
    config = TransformerConfig(**{**sizes, **TINY, **shape})
    network = lively_network(config, seed)
    save_file(
        {name: p.detach().contiguous() for name, p in network.named_parameters()},
        directory / "model.safetensors",
    )
    write_config(directory, model_type="seqserve", **asdict(config))
    source.save(directory / f"source_tokenizer{source.suffix}")
    target.save(directory / f"target_tokenizer{target.suffix}")
    return directory


def make_relative_model(directory: Path, seed: int = 0, **shape: Any) -> Path:
    """`make_native_model`, with relative positions."""
    return make_native_model(directory, seed, relative_positions=True, **shape)


@torch.no_grad()
def lively_network(config: TransformerConfig, seed: int = 0) -> Transformer:
    """A random network, in eval mode, whose greedy outputs vary in tokens and in length."""
    network = build(config)
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if parameter.dim() == 1:
            mean = 1.0 if name.endswith("weight") else 0.0  # a norm's scale, or a bias
            parameter.normal_(mean, 0.1, generator=draw)
        else:
            width = SHARP if "query" in name or "key" in name else 1.0
            parameter.normal_(0.0, width / math.sqrt(parameter.shape[-1]), generator=draw)
    if not config.tie_output:
        _vary(network, config)
    return network.eval()


def _vary(network: Transformer, config: TransformerConfig) -> None:
    """Make a token unlikely to follow itself, and `</s>` the likelier the longer a target is."""
    embedding = network.decoder.embedding
    assert isinstance(embedding.positions, SinusoidalPositions)
    table = embedding.positions.table
    assert isinstance(network.output, nn.Linear)
    network.output.weight -= embedding.tokens.weight * embedding.scale
    network.output.weight[config.eos_id] = 1.5 * (table[-1] - table[0])


def make_marian_model(directory: Path, seed: int = 0, **generation: Any) -> Path:
    """A directory as OPUS-MT publishes it, which would say `<pad>` if it could.

    Args:
        seed: of the weights.
        generation: further keys of `generation_config.json`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokens = ["</s>", "<unk>", "▁a", "▁b", "a", "b", ">>xyz<<", "<pad>"]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    pad = vocabulary["<pad>"]
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24)
    sizes |= {"d_model": 16, "max_position_embeddings": 40, "vocab_size": len(tokens)}
    ids = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0}
    config = {"model_type": "marian", "activation_function": "swish", **sizes, **ids}
    plan = marian.blueprint(config, {"final_logits_bias": (1, len(tokens))}, None)
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        plan.names[name]: torch.randn(parameter.shape, generator=draw) / parameter.shape[-1] ** 0.5
        for name, parameter in plan.network.named_parameters()
    }
    tensors["final_logits_bias"][0, pad] = 9.0
    save_file(tensors, directory / "model.safetensors")
    write_config(directory, **config)
    (directory / "generation_config.json").write_text(
        json.dumps({**ids, "bad_words_ids": [[pad]], **generation})
    )
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    for side in ("source", "target"):
        with (directory / f"{side}.spm").open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(["a b ab ba", "aab bba ab"] * 20),
                model_writer=file,
                vocab_size=7,
                hard_vocab_limit=False,
                minloglevel=2,
            )
    return directory


def make_m2m_model(directory: Path, seed: int = 0, **settings: Any) -> Path:
    """A directory as M2M100 is published: 100 languages behind a small vocabulary.

    Args:
        seed: of the weights.
        settings: of `tokenizer_config.json`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁b", "a", "b"]
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24)
    sizes |= {"d_model": 16, "max_position_embeddings": 40, "vocab_size": len(tokens) + 108}
    config = {"model_type": "m2m_100", **sizes}
    plan = m2m_100.blueprint(config, {}, None)
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        plan.names[name]: torch.randn(parameter.shape, generator=draw) / parameter.shape[-1] ** 0.5
        for name, parameter in plan.network.named_parameters()
    }
    save_file(tensors, directory / "model.safetensors")
    write_config(directory, **config)
    (directory / "vocab.json").write_text(json.dumps({t: id for id, t in enumerate(tokens)}))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "M2M100Tokenizer", **settings})
    )
    with (directory / "sentencepiece.bpe.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b ab ba", "aab bba ab"] * 20),
            model_writer=file,
            vocab_size=7,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    return directory


def make_byt5_model(directory: Path, seed: int = 0, **generation: Any) -> Path:
    """A directory as ByT5 is published: no tokenizer file, and ids that are of no token.

    Args:
        seed: of the weights.
        generation: keys of `generation_config.json`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sizes = {"d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 3}
    sizes |= {"vocab_size": 400, "num_decoder_layers": 1}
    config = {"model_type": "t5", **sizes, "feed_forward_proj": "gated-gelu"}
    config |= {"tie_word_embeddings": False, "tokenizer_class": "ByT5Tokenizer"}
    plan = t5.blueprint(config, {"lm_head.weight": (400, 16)}, None)
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        plan.names[name]: torch.randn(parameter.shape, generator=draw) / parameter.shape[-1] ** 0.5
        for name, parameter in plan.network.named_parameters()
    }
    save_file(tensors, directory / "model.safetensors")
    write_config(directory, **config)
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def make_tutorial_model(
    directory: Path,
    seed: int = 0,
    *,
    residual: str | None = None,
    feed_forward_norm: str = "fnn_norm",
    buffers: bool = True,
    tied: bool = False,
    file: str = "model.safetensors",
    prefix: str = "",
    wrapper: str | None = None,
    extra_config: dict[str, Any] | None = None,
    **shape: int,
) -> Path:
    """A directory as somebody who followed the tutorial has it, without a tokenizer.

    Args:
        seed: of the weights.
        residual: written into the config where given.
        feed_forward_norm: name of the decoder's third norm, `fnn_norm` or `ffn_norm`.
        buffers: whether the file holds `pe` and `mask` too.
        tied: whether `lm_head.weight` equals the embedding.
        file: `model.safetensors` or the name of a `.pt` file.
        prefix: in front of every tensor name, such as `module.`.
        wrapper: key under which a `.pt` holds its tensors.
        extra_config: further keys of the config.
        shape: overrides of `TINY_TUTORIAL`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sizes = {**TINY_TUTORIAL, **shape}
    tensors = tutorial_tensors(sizes, seed, feed_forward_norm, buffers, tied)
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    if file.endswith(".safetensors"):
        save_file(tensors, directory / file)
    else:
        torch.save({wrapper: tensors} if wrapper else tensors, directory / file)
    config = {key: value for key, value in sizes.items() if key != "hidden"}
    if residual is not None:
        config["residual"] = residual
    write_config(directory, model_type="tutorial", **config, **(extra_config or {}))
    return directory


def tutorial_tensors(
    sizes: dict[str, Any],
    seed: int = 0,
    feed_forward_norm: str = "fnn_norm",
    buffers: bool = True,
    tied: bool = False,
) -> dict[str, Tensor]:
    """The tutorial's state dict, drawn wide enough that answers vary."""
    dim, hidden, vocab = sizes["n_embd"], sizes["hidden"], sizes["vocab_size"]
    block = sizes["block_size"]
    draw = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, width: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * (width / math.sqrt(columns))

    def norm(name: str) -> dict[str, Tensor]:
        return {
            f"{name}.a_2": 1 + 0.1 * torch.randn(dim, generator=draw),
            f"{name}.b_2": 0.1 * torch.randn(dim, generator=draw),
        }

    def attention(name: str) -> dict[str, Tensor]:
        widths = {"wq": 1.5, "wk": 1.5, "wv": 1.0, "wo": 1.0}
        return {f"{name}.{w}.weight": matrix(dim, dim, width) for w, width in widths.items()}

    def feed_forward(name: str) -> dict[str, Tensor]:
        return {f"{name}.w1.weight": matrix(hidden, dim), f"{name}.w2.weight": matrix(dim, hidden)}

    table = matrix(vocab, dim, width=0.5 * math.sqrt(dim))
    tensors = {"transformer.wte.weight": table}
    for i in range(sizes["n_layer"]):
        layer = f"transformer.encoder.layers.{i}"
        tensors |= norm(f"{layer}.attention_norm") | attention(f"{layer}.attention")
        tensors |= norm(f"{layer}.fnn_norm") | feed_forward(f"{layer}.feed_forward")
        layer = f"transformer.decoder.layers.{i}"
        tensors |= norm(f"{layer}.attention_norm_1") | attention(f"{layer}.mask_attention")
        tensors |= norm(f"{layer}.attention_norm_2") | attention(f"{layer}.attention")
        tensors |= norm(f"{layer}.{feed_forward_norm}") | feed_forward(f"{layer}.feed_forward")
        if buffers:
            minus_infinity = torch.full((1, 1, block, block), float("-inf"))
            tensors[f"{layer}.mask_attention.mask"] = minus_infinity.triu(1)
    tensors |= norm("transformer.encoder.norm") | norm("transformer.decoder.norm")
    # Against its own embedding: a random network would otherwise repeat one token for ever.
    tensors["lm_head.weight"] = (
        table.clone() if tied else matrix(vocab, dim, width=0.3 * math.sqrt(dim)) - table
    )
    if buffers:
        tensors["transformer.wpe.pe"] = tutorial_positions(block, dim)[None]
    return tensors


def tutorial_positions(length: int, dim: int) -> Tensor:
    """Sine on even, cosine on odd dimensions, element by element."""
    rows: list[Sequence[float]] = [
        [(math.cos if d % 2 else math.sin)(p / 10000.0 ** ((d - d % 2) / dim)) for d in range(dim)]
        for p in range(length)
    ]
    return torch.tensor(rows)


def write_config(directory: Path, **config: Any) -> None:
    """`config.json` of these keys."""
    text = json.dumps(config, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
