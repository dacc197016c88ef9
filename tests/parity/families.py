"""Every family's shapes, and the random networks that `transformers` makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from service.check import Both
from tests.parity.checkpoints import SIZES, SPREAD, enliven, save_and_load

Options = dict[str, Any]


@torch.no_grad()
def enliven_t5(network: Any, seed: int = 0) -> Any:
    """Draw weights such that answers vary in tokens and in length, and positions matter."""
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if parameter.dim() == 1:
            parameter.normal_(1.0, 0.1, generator=draw)
        elif "relative_attention_bias" in name:
            parameter.normal_(0.0, 1.5, generator=draw)
        else:
            width = 1.0 if "shared" in name else 1.0 / math.sqrt(parameter.shape[-1])
            parameter.normal_(0.0, width, generator=draw)
    eos = network.config.eos_token_id
    network.lm_head.weight[eos] *= 2.0  # likelier than others, or much less so
    vocab = network.config.vocab_size
    src = torch.randint(3, vocab, (32, 8), generator=draw)
    tgt = torch.randint(3, vocab, (32, 12), generator=draw)
    logits = network(input_ids=src, decoder_input_ids=tgt).logits
    # Negative, since a tied table would otherwise make every token likely to follow itself.
    network.decoder.final_layer_norm.weight *= -SPREAD / logits.std(dim=(0, 1)).mean()
    return network.eval()


@dataclass(frozen=True)
class Family:
    """A family as the reference has it.

    Attributes:
        config, network: its classes in `transformers`.
        sizes: what its shapes share.
        shapes: options of each checkpoint that is compared, by name.
        long: those whose cached steps are compared beyond 64 positions too.
        rounded: those compared in bfloat16 too.
        mean, most: by how much logits may move there, on average and at most.
        enliven: draws the weights.
        seed: of the weights.
        seeds: other ones, where that draws a model that says few different tokens.
        own_output: shapes whose output layer is no token table. (T5's constructor ties them,
            whatever the configuration says.)
    """

    config: str
    network: str
    shapes: Mapping[str, Options]
    sizes: Options = field(default_factory=lambda: SIZES)
    long: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    mean: float = 0.05
    most: float = 0.5
    enliven: Callable[[Any, int], Any] = enliven
    seed: int = 0
    seeds: Mapping[str, int] = field(default_factory=dict)
    own_output: tuple[str, ...] = ()

    def build(self, name: str, **options: Any) -> Any:
        """The network of one of the shapes, in eval mode."""
        import transformers

        config = getattr(transformers, self.config)(**(self.sizes | self.shapes[name] | options))
        network = getattr(transformers, self.network)(config).eval()
        if name in self.own_output:
            network.lm_head.weight = torch.nn.Parameter(network.lm_head.weight.clone())
        return self.enliven(network, self.seeds.get(name, self.seed))


DEEP = {"encoder_layers": 3, "decoder_layers": 2, "decoder_attention_heads": 4}
ODD = {"d_model": 21, "encoder_attention_heads": 3, "decoder_attention_heads": 1}
UNTIED = {"tie_word_embeddings": False}

BART = Family(
    config="BartConfig",
    network="BartForConditionalGeneration",
    shapes={
        "bart": {},
        "bart-deep-scaled": DEEP | {"scale_embedding": True},
        "bart-odd-heads": ODD,
        "bart-untied": UNTIED | {"activation_function": "relu"},
        "bart-silu": {"activation_function": "silu"},
        "bart-gelu-new": {"activation_function": "gelu_new"},
    },
    long=("bart-deep-scaled",),
    rounded=("bart",),
)

MBART = Family(
    config="MBartConfig",
    network="MBartForConditionalGeneration",
    shapes={
        "mbart": {"scale_embedding": True, "decoder_start_token_id": 5},
        "mbart-deep": DEEP | {"decoder_start_token_id": 2},
        "mbart-untied": UNTIED | {"decoder_start_token_id": 2},
    },
    long=("mbart",),
    rounded=("mbart",),
)

LAST = SIZES["vocab_size"] - 1
OPUS: Options = {"pad_token_id": LAST, "eos_token_id": 0, "decoder_start_token_id": LAST}
OPUS |= {"forced_eos_token_id": 0, "bos_token_id": 0}
OPUS |= {"scale_embedding": True, "activation_function": "swish"}
TWO = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 61}

MARIAN = Family(
    config="MarianConfig",
    network="MarianMTModel",
    sizes=SIZES | OPUS,
    shapes={
        "opus": {},
        "opus-deep": DEEP | {"encoder_attention_heads": 4, "decoder_attention_heads": 2},
        "opus-unscaled-relu": {"scale_embedding": False, "activation_function": "relu"},
        "opus-odd-heads": ODD,
        "opus-two-vocabularies": TWO,
        "opus-two-vocabularies-untied": TWO | UNTIED,
        "opus-untied": UNTIED,
    },
    long=("opus-deep", "opus-two-vocabularies"),
    rounded=("opus-deep",),
)

M2M_100 = Family(
    config="M2M100Config",
    network="M2M100ForConditionalGeneration",
    shapes={
        "m2m_100": {},
        "m2m_100-deep": DEEP,
        "m2m_100-unscaled": {"scale_embedding": False, "activation_function": "gelu"},
        "m2m_100-odd": ODD,
        "m2m_100-untied": UNTIED,
        "m2m_100-pad": {"pad_token_id": 5},
    },
    long=("m2m_100-deep", "m2m_100-odd"),
    rounded=("m2m_100",),
    seed=3,
    seeds={"m2m_100-odd": 5},
)

PEGASUS = Family(
    config="PegasusConfig",
    network="PegasusForConditionalGeneration",
    shapes={
        "pegasus": {"activation_function": "relu", "scale_embedding": True},
        "pegasus-deep": DEEP | {"scale_embedding": True},
        "pegasus-unscaled": {},
        "pegasus-odd": ODD | {"activation_function": "relu"},
        "pegasus-untied": UNTIED,
    },
    long=("pegasus-deep",),
    rounded=("pegasus",),
    seed=3,
)

T5_SIZES: Options = {
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 1,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "vocab_size": 53,
    "decoder_start_token_id": 0,
}
LAYERS = {"num_layers": 3, "num_decoder_layers": 2}
GATED = {"feed_forward_proj": "gated-gelu"}
BUCKETS = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}

T5 = Family(
    config="T5Config",
    network="T5ForConditionalGeneration",
    sizes=T5_SIZES,
    shapes={
        "t5": {},
        "t5-deep": LAYERS | BUCKETS,
        "t5-narrow-heads": {"d_kv": 5, "num_heads": 4},
        "t5-wide-heads": {"d_kv": 13, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 1},
        "t5-untied": UNTIED,
        "t5-v1.1": GATED | UNTIED,
        "flan-deep": LAYERS | GATED | UNTIED | {"d_kv": 5},
        "t5-gated-silu": {"feed_forward_proj": "gated-silu"},
        "byt5": GATED | UNTIED | {"num_layers": 3, "num_decoder_layers": 1, "vocab_size": 384},
    },
    long=("t5", "t5-deep", "flan-deep", "byt5"),
    rounded=("t5", "flan-deep"),
    mean=0.1,
    most=1.0,
    enliven=enliven_t5,
    own_output=("t5-untied", "t5-v1.1", "flan-deep", "byt5"),
)

MT5 = Family(
    config="MT5Config",
    network="MT5ForConditionalGeneration",
    sizes=T5_SIZES,
    shapes={"mt5": {}, "mt5-deep": LAYERS | BUCKETS | {"d_kv": 7}, "mt5-tied": {}},
    long=("mt5",),
    rounded=("mt5",),
    mean=0.1,
    most=1.0,
    enliven=enliven_t5,
    own_output=("mt5", "mt5-deep"),
)

FAMILIES = (BART, MBART, MARIAN, M2M_100, PEGASUS, T5, MT5)
FAMILY_OF: Mapping[str, Family] = {name: family for family in FAMILIES for name in family.shapes}
"""The family of every shape."""


def reference_model(name: str, **options: Any) -> Any:
    """The reference's network of a shape.

    Args:
        options: of its configuration, over the shape's.
    """
    return FAMILY_OF[name].build(name, **options)


def make(directory: Path, name: str, **options: Any) -> Both:
    """A shape's checkpoint, loaded by both sides."""
    return save_and_load(directory, reference_model(name, **options))
