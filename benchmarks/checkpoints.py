"""Random checkpoints of well-known shapes, for us and for the peers: speed does not ask for sense.

Weights are drawn wider than a fresh model's, so that greedy outputs vary from token to token.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ctranslate2.converters import transformers as converters
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

CT2_DTYPES = ("float32", "int8")


def marian_base() -> PreTrainedModel:
    """OPUS-MT's shape: 6+6 layers of 512, vocabulary 32,000."""
    config = MarianConfig(
        vocab_size=32000,
        decoder_vocab_size=32000,
        max_position_embeddings=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        d_model=512,
        activation_function="swish",
        scale_embedding=True,
        static_position_embeddings=True,
        pad_token_id=31999,
        eos_token_id=0,
        bos_token_id=None,
        forced_eos_token_id=None,
        decoder_start_token_id=31999,
    )
    return widened(MarianMTModel(config))


def t5_small() -> PreTrainedModel:
    """T5-small's shape: 6+6 layers of 512, vocabulary 32,128."""
    config = T5Config(
        vocab_size=32128,
        d_model=512,
        d_kv=64,
        d_ff=2048,
        num_layers=6,
        num_heads=8,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return T5ForConditionalGeneration(config)


def bart_base() -> PreTrainedModel:
    """BART-base's shape: 6+6 layers of 768, vocabulary 50,265."""
    config = BartConfig(
        vocab_size=50265,
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        forced_eos_token_id=None,
        normalize_before=False,  # CTranslate2's converter asks for it
    )
    return widened(BartForConditionalGeneration(config))


SHAPES: dict[str, Callable[[], PreTrainedModel]] = {
    "marian-base": marian_base,
    "t5-small": t5_small,
    "bart-base": bart_base,
}


def widened(model: PreTrainedModel) -> PreTrainedModel:
    """Draw matrices and embeddings wide, and let the source and the feed-forward weigh in."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "embed" not in name and "shared" not in name:
            torch.nn.init.xavier_uniform_(parameter)
    network: Any = model.get_decoder()
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.normal_(0, table.shape[1] ** -0.5)
        for layer in network.layers:
            layer.encoder_attn.out_proj.weight.mul_(4)
            layer.encoder_attn.v_proj.weight.mul_(2)
            layer.fc2.weight.mul_(4)
    return model


def build(name: str, root: Path) -> dict[str, Path]:
    """Make a shape's directories, unless they are there.

    Returns:
        "checkpoint" and each of `CT2_DTYPES` -> directory.
    """
    directories = {
        "checkpoint": root / name,
        **{d: root / f"{name}-ct2-{d}" for d in CT2_DTYPES},
    }
    done = root / f"{name}.done"
    if done.exists():
        return directories
    torch.manual_seed(0)
    model = SHAPES[name]().eval()
    model.save_pretrained(directories["checkpoint"])
    for dtype in CT2_DTYPES:
        convert(model, directories[dtype], dtype)
    done.touch()
    return directories


def convert(model: PreTrainedModel, directory: Path, dtype: str) -> None:
    """Write a model in CTranslate2's format; token ``i`` is spelled ``t<i>``.

    Its own converter wants a tokenizer, which random checkpoints do not have.
    """
    config: Any = model.config
    loader = converters._MODEL_LOADERS[type(config).__name__]
    with torch.no_grad():
        spec = loader.get_model_spec(model)
        # Marian's loader leaves the last token out: padding, which starts targets. There a target
        # starts from zeros, whatever token is named.
        size = spec.get_target_vocabulary_size()
        vocabulary = [f"t{i}" for i in range(size)]
        loader.set_vocabulary(spec, vocabulary)
    spec.config.bos_token = "t2"  # unused: what starts a target is named below
    spec.config.eos_token = f"t{config.eos_token_id}"
    spec.config.unk_token = "t3"
    start = config.decoder_start_token_id
    spec.config.decoder_start_token = f"t{start if start < size else config.eos_token_id}"
    spec.validate()
    spec.optimize(quantization=None if dtype == "float32" else dtype)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    spec.save(str(directory))
