"""Random models of the project's own family, where no peer has to load them too."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from model.families.seqserve import TransformerConfig, build

MARIAN_BASE = TransformerConfig(
    *(32_000, 32_000),
    dim=512,
    heads=8,
    hidden_dim=2048,
    encoder_layers=6,
    decoder_layers=6,
    max_src=512,
    max_tgt=512,
)
"""OPUS-MT's sizes."""


def write_model(directory: Path, shape: TransformerConfig, spread: float = 1.0) -> None:
    """A directory that can be served, without tokenizers.

    Args:
        spread: how much wider than a fresh model's weights are drawn, so that answers vary.
    """
    torch.manual_seed(0)
    tensors = {name: weight.detach() for name, weight in build(shape).named_parameters()}
    wide = {name: t * spread if t.dim() > 1 else t for name, t in tensors.items()}
    save_file(wide, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "seqserve", **asdict(shape)}))
