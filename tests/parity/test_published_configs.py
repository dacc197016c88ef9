"""Directories with the `config.json` and `generation_config.json` of models as published.

The keys are those of the models that each entry names, the sizes are small. What a request without
parameters gets equals what the reference makes of the same files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.loader import load_model
from service.check import Both, reference_tokens
from tests.parity.checkpoints import ATOL, SIZES, enliven, largest_difference, our_defaults
from tests.parity.test_t5 import reference_model as t5_reference

transformers = pytest.importorskip("transformers", reason="the reference is not installed")

LABELS = {
    "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
}
TRAINING = {
    "activation_dropout": 0.1,
    "attention_dropout": 0.1,
    "decoder_layerdrop": 0.0,
    "dropout": 0.1,
    "encoder_layerdrop": 0.0,
    "init_std": 0.02,
}
COMMON: dict[str, Any] = {
    **SIZES,
    **TRAINING,
    "is_encoder_decoder": True,
    "num_hidden_layers": SIZES["encoder_layers"],
    "use_cache": True,
}
CLASSIFIER = {"_num_labels": 3, "classif_dropout": 0.0, "classifier_dropout": 0.0, **LABELS}
PAD = SIZES["vocab_size"] - 1
SUMMARY = {
    "early_stopping": True,
    "length_penalty": 2.0,
    "max_length": 30,
    "min_length": 8,
    "no_repeat_ngram_size": 3,
    "num_beams": 4,
}

BART = {
    **COMMON,
    **CLASSIFIER,
    "activation_function": "gelu",
    "add_final_layer_norm": False,
    "architectures": ["BartForConditionalGeneration"],
    "bos_token_id": 0,
    "decoder_start_token_id": 2,
    "eos_token_id": 2,
    "gradient_checkpointing": False,
    "model_type": "bart",
    "normalize_before": False,
    "pad_token_id": 1,
    "scale_embedding": False,
}
MARIAN = {
    **COMMON,
    "activation_function": "swish",
    "architectures": ["MarianMTModel"],
    "bad_words_ids": [[PAD]],
    "bos_token_id": 0,
    "decoder_start_token_id": PAD,
    "decoder_vocab_size": SIZES["vocab_size"],
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
    "max_length": 40,
    "model_type": "marian",
    "normalize_embedding": False,
    "num_beams": 6,
    "pad_token_id": PAD,
    "scale_embedding": True,
    "share_encoder_decoder_embeddings": True,
    "static_position_embeddings": True,
}
M2M100 = {
    **COMMON,
    "activation_function": "relu",
    "architectures": ["M2M100ForConditionalGeneration"],
    "bos_token_id": 0,
    "decoder_start_token_id": 2,
    "eos_token_id": 2,
    "max_length": 30,
    "model_type": "m2m_100",
    "pad_token_id": 1,
    "scale_embedding": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "facebook/bart-large-cnn": BART
    | SUMMARY
    | {
        "force_bos_token_to_be_generated": True,
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 2,
        "output_past": True,
        "prefix": " ",
        "task_specific_params": {"summarization": SUMMARY},
        "transformers_version": "4.7.0.dev0",
    },
    "facebook/bart-base": BART
    | {
        "add_bias_logits": False,
        "architectures": ["BartModel"],
        "early_stopping": True,
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 2,
        "no_repeat_ngram_size": 3,
        "normalize_embedding": True,
        "num_beams": 4,
        "task_specific_params": {
            "summarization": {"length_penalty": 1.0, "max_length": 12, "num_beams": 4},
            "summarization_xsum": {"max_length": 62, "min_length": 11, "num_beams": 6},
        },
        "torch_dtype": "float32",
        "transformers_version": "4.12.0.dev0",
    },
    "sshleifer/distilbart-xsum-12-6": BART
    | SUMMARY
    | {
        "add_bias_logits": False,
        "extra_pos_embeddings": 2,
        "force_bos_token_to_be_generated": False,
        "forced_eos_token_id": 2,
        "normalize_embedding": True,
        "output_past": True,
        "prefix": " ",
        "replacing_rate": 0,
        "save_step": 58,
        "static_position_embeddings": False,
        "student_decoder_layers": None,
        "student_encoder_layers": None,
        "task_specific_params": {},
    },
    "gogamza/kobart-summarization": BART
    | {
        "add_bias_logits": False,
        "author": "A name",
        "bos_token_id": 1,
        "decoder_start_token_id": 1,
        "do_blenderbot_90_layernorm": False,
        "eos_token_id": 1,
        "extra_pos_embeddings": 2,
        "force_bos_token_to_be_generated": False,
        "forced_eos_token_id": 1,
        "kobart_version": 2.0,
        "normalize_embedding": True,
        "pad_token_id": 3,
        "static_position_embeddings": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    },
    "facebook/mbart-large-50-many-to-many-mmt": COMMON
    | CLASSIFIER
    | {
        "_name_or_path": "mbart-50-large",
        "activation_function": "relu",
        "add_bias_logits": False,
        "add_final_layer_norm": True,
        "architectures": ["MBartForConditionalGeneration"],
        "bos_token_id": 0,
        "decoder_start_token_id": 2,
        "early_stopping": True,
        "eos_token_id": 2,
        "forced_eos_token_id": 2,
        "gradient_checkpointing": False,
        "max_length": 20,
        "model_type": "mbart",
        "normalize_before": True,
        "normalize_embedding": True,
        "num_beams": 5,
        "output_past": True,
        "pad_token_id": 1,
        "scale_embedding": True,
        "static_position_embeddings": False,
        "tokenizer_class": "MBart50Tokenizer",
    },
    "Helsinki-NLP/opus-mt-en-de": MARIAN
    | CLASSIFIER
    | {
        "_name_or_path": "opus-mt-en-de",
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "extra_pos_embeddings": PAD + 1,
        "normalize_before": False,
        "transformers_version": "4.22.0.dev0",
    },
    "Helsinki-NLP/opus-mt-tc-big-en-pt": MARIAN
    | {
        "_name_or_path": "opus-mt-tc-big-en-pt",
        "activation_function": "relu",
        "classifier_dropout": 0.0,
        "eos_token_id": 47,
        "forced_eos_token_id": 47,
        "num_beams": 4,
        "torch_dtype": "float16",
    },
    "a fine-tuned opus-mt": MARIAN
    | CLASSIFIER
    | {
        "_attn_implementation_autoset": True,
        "bad_words_ids": None,
        "max_length": None,
        "num_beams": None,
        "transformers_version": "4.48.3",
    },
    "facebook/m2m100_418M": M2M100
    | {
        "early_stopping": True,
        "gradient_checkpointing": False,
        "num_beams": 5,
        "transformers_version": "4.4.0.dev0",
    },
    "facebook/nllb-200-distilled-600M": M2M100
    | {"tokenizer_class": "NllbTokenizer", "torch_dtype": "float32"},
    "alirezamsh/small100": M2M100 | {"max_length": 25, "num_beams": 5},
    "google/pegasus-xsum": COMMON
    | CLASSIFIER
    | {
        "activation_function": "relu",
        "add_bias_logits": False,
        "add_final_layer_norm": True,
        "architectures": ["PegasusForConditionalGeneration"],
        "bos_token_id": 0,
        "decoder_start_token_id": 0,
        "do_blenderbot_90_layernorm": False,
        "eos_token_id": 1,
        "extra_pos_embeddings": 0,
        "force_bos_token_to_be_generated": False,
        "forced_eos_token_id": 1,
        "gradient_checkpointing": False,
        "length_penalty": 0.6,
        "max_length": 24,
        "model_type": "pegasus",
        "normalize_before": True,
        "normalize_embedding": False,
        "num_beams": 8,
        "pad_token_id": 0,
        "scale_embedding": True,
        "static_position_embeddings": True,
        "task_specific_params": {
            "summarization_aeslc": {
                "length_penalty": 0.6,
                "max_length": 32,
                "max_position_embeddings": 512,
            }
        },
    },
}

GENERATION: dict[str, dict[str, Any]] = {
    "Helsinki-NLP/opus-mt-en-de": {
        "bad_words_ids": [[PAD]],
        "bos_token_id": 0,
        "decoder_start_token_id": PAD,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "max_length": 40,
        "num_beams": 6,
        "pad_token_id": PAD,
        "renormalize_logits": True,
        "transformers_version": "4.32.0.dev0",
    },
    "facebook/bart-large-cnn": {
        "_from_model_config": True,
        "bos_token_id": 0,
        "decoder_start_token_id": 2,
        "eos_token_id": 2,
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 2,
        "pad_token_id": 1,
        **SUMMARY,
    },
    "facebook/m2m100_418M": {
        "_from_model_config": True,
        "bos_token_id": 0,
        "decoder_start_token_id": 2,
        "early_stopping": True,
        "eos_token_id": 2,
        "max_length": 30,
        "num_beams": 5,
        "pad_token_id": 1,
        "transformers_version": "4.27.0.dev0",
    },
}


def write(directory: Path, name: str) -> None:
    """The files of `name`, with small random weights."""
    config = CONFIGS[name]
    parsed = transformers.AutoConfig.for_model(**config)
    network = enliven(transformers.AutoModelForSeq2SeqLM.from_config(parsed).float().eval())
    network.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))
    generation = directory / "generation_config.json"
    generation.unlink()
    if name in GENERATION:
        generation.write_text(json.dumps(GENERATION[name]))


def read(directory: Path) -> Both:
    """What both sides make of a directory."""
    reference = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32)
    return Both(reference.eval(), load_model(directory, "cpu"))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_means_what_it_means_to_the_reference(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    both = read(tmp_path)
    assert largest_difference(both) < ATOL
    assert not any(task.fault for task in both.ours.spec.tasks.values())
    assert both.ours.spec.tasks.keys() == (CONFIGS[name].get("task_specific_params") or {}).keys()
    length = {} if CONFIGS[name].get("max_length") else {"max_new_tokens": 19}
    for source in both.sources(3):
        expected = reference_tokens(both, source, **length)
        assert our_defaults(both, source, **length) == expected


BARE = "facebook/bart-base"


def test_a_task_asks_for_what_its_keys_mean_to_the_reference(tmp_path: Path) -> None:
    write(tmp_path, BARE)
    both = read(tmp_path)
    stated = CONFIGS[BARE]["task_specific_params"]["summarization"]
    for source in both.sources(3):
        expected = reference_tokens(both, source, **stated)
        assert our_defaults(both, source, task="summarization") == expected
        assert len(expected[0]) <= stated["max_length"] - 1


def test_the_file_of_a_model_without_its_head_is_read(tmp_path: Path) -> None:
    write(tmp_path, BARE)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["final_logits_bias"]  # a head's, like the output layer, which is tied
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    bare |= {f"{side}.version": torch.tensor([3.0]) for side in ("encoder", "decoder")}
    save_file(bare, tmp_path / "model.safetensors")
    both = read(tmp_path)
    assert largest_difference(both) < ATOL


T5 = {
    "architectures": ["T5WithLMHeadModel"],
    "bos_token_id": 3,
    "gradient_checkpointing": False,
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "label2id": {"LABEL_0": 0},
    "n_positions": 512,
    "output_past": True,
    "task_specific_params": {
        "summarization": {**SUMMARY, "prefix": "summarize: "},
        "translation_en_to_de": {
            "early_stopping": True,
            "max_length": 300,
            "num_beams": 4,
            "prefix": "translate English to German: ",
        },
    },
    "tokenizer_class": "T5Tokenizer",
    "transformers_version": "4.23.1",
    "xla_device": True,
}


@pytest.mark.parametrize("name", ["t5", "flan-deep", "mt5", "byt5"])
def test_a_published_config_of_t5_loads(name: str, tmp_path: Path) -> None:
    t5_reference(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | T5))
    both = read(tmp_path)
    [source] = both.sources(1)
    expected = reference_tokens(both, source, max_new_tokens=10)
    assert our_defaults(both, source, max_new_tokens=10) == expected
