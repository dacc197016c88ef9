"""Networks whose answers vary enough, in tokens and in length, to compare every way of decoding."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from service.check import Both
from tests.parity.checkpoints import SPREAD, save_and_load
from tests.parity.families import Family, Options

PAD, BOS, EOS = 0, 1, 2


@torch.no_grad()
def enliven(network: Any, seed: int) -> Any:
    """Draw weights such that greedy and beam answers vary in tokens and in length.

    Queries and keys are drawn wide, so that attention is not an average; the output's bias makes
    all tokens alike on average, and `</s>` the likelier the longer a target is.
    """
    config = network.config
    bart = config.model_type == "bart"
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if "embed_positions" in name and not bart:
            continue  # computed, not drawn
        if parameter.dim() == 1:
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(mean, 0.1, generator=draw)
        else:
            wide = 3.0 if "q_proj" in name or "k_proj" in name else 1.0
            parameter.normal_(0.0, wide / math.sqrt(parameter.shape[-1]), generator=draw)
    decoder, steep = network.model.decoder, 0.5 if bart else 1.5
    positions = decoder.embed_positions.weight
    if bart:
        slope = torch.randn(config.d_model, generator=draw)
        positions += torch.linspace(-1.5, 1.5, len(positions))[:, None] * slope / slope.norm()
    decoder.embed_tokens.weight.mul_(2.0)  # the next token shall depend on the last one
    network.lm_head.weight -= 0.7 * decoder.embed_tokens.weight  # and not repeat it
    network.lm_head.weight[EOS] += steep * (
        positions[config.max_position_embeddings // 2] - positions[2]
    )
    network.final_logits_bias.zero_()
    src = torch.randint(3, config.vocab_size, (64, 8), generator=draw)
    tgt = torch.randint(3, len(network.lm_head.weight), (64, 12), generator=draw)
    logits = network(input_ids=src, decoder_input_ids=tgt).logits
    scale = SPREAD / logits.std(dim=(0, 1)).mean()
    network.lm_head.weight *= scale
    network.final_logits_bias -= scale * logits.mean(dim=(0, 1))
    network.final_logits_bias[0, EOS] += SPREAD / 2 if bart else -1.5 * SPREAD
    network.final_logits_bias[0, PAD] = -torch.inf  # as Marian's checkpoints have it
    return network


SIZES: Options = {
    "max_position_embeddings": 40,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "forced_eos_token_id": None,
    "tie_word_embeddings": False,
}


def sized(dim: int, heads: int, layers: tuple[int, int], hidden: int, vocab: int) -> Options:
    """Sizes that both sides share; of layers, the encoder's come first."""
    sizes: Options = {"d_model": dim, "vocab_size": vocab}
    for side, count in zip(("encoder", "decoder"), layers, strict=True):
        sizes |= {f"{side}_attention_heads": heads, f"{side}_ffn_dim": hidden}
        sizes[f"{side}_layers"] = count
    return sizes


FAMILIES = (
    Family(
        config="MarianConfig",
        network="MarianMTModel",
        sizes=SIZES | {"activation_function": "relu", "decoder_start_token_id": PAD},
        shapes={
            "marian": sized(32, 4, (2, 2), 64, vocab=44) | {"scale_embedding": True},
            "marian-two-vocabularies": sized(24, 2, (1, 3), 40, vocab=37)
            | {"decoder_vocab_size": 59, "share_encoder_decoder_embeddings": False},
        },
        enliven=enliven,
    ),
    Family(
        config="BartConfig",
        network="BartForConditionalGeneration",
        sizes=SIZES | {"activation_function": "gelu", "decoder_start_token_id": EOS},
        shapes={"bart": sized(32, 2, (2, 1), 48, vocab=31)},
        enliven=enliven,
    ),
)

NAMES = tuple(name for family in FAMILIES for name in family.shapes)


def decoded_model(name: str) -> Both:
    """One of these networks, on both sides. Its file is gone, but what was mapped of it stays."""
    [family] = [family for family in FAMILIES if name in family.shapes]
    with TemporaryDirectory() as directory:
        return save_and_load(Path(directory), family.build(name))
