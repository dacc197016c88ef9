"""The family `bart` (BART and mBART) against `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import ModelError
from model.config import EngineConfig
from model.engine import Engine
from model.loader import load_model
from model.sequence import Decoding
from model.sequence import Sequence as Row
from service.check import Both, cut, reference_tokens
from tests.parity.checkpoints import (
    ATOL,
    edit_config,
    largest_difference,
    our_defaults,
    save_and_load,
)
from tests.parity.families import make, reference_model

transformers = pytest.importorskip("transformers", reason="the reference is not installed")

REAL_MODEL = Path(__file__).parents[2].parent / "shared" / "data" / "bart-g2p-us"


# --- numbers -------------------------------------------------------------------------------------


def test_position_zero_is_row_two(tmp_path: Path) -> None:
    both = make(tmp_path, "bart")
    tensors = load_file(tmp_path / "model.safetensors")
    for side in ("encoder", "decoder"):
        tensors[f"model.{side}.embed_positions.weight"][:2] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    again = Both(both.reference, load_model(tmp_path, "cpu"))
    assert largest_difference(again) < ATOL


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_old_files_name_every_table(tied: bool, tmp_path: Path) -> None:
    both = make(tmp_path, "bart" if tied else "bart-untied")
    tensors = load_file(tmp_path / "model.safetensors")
    state = both.reference.state_dict()
    tables = [name for name in state if "embed_tokens" in name or "shared" in name]
    assert set(tables) - set(tensors) or not tied
    whole = {name: tensor.clone() for name, tensor in state.items()}
    (tmp_path / "model.safetensors").unlink()
    torch.save(whole, tmp_path / "pytorch_model.bin")
    again = Both(both.reference, load_model(tmp_path, "cpu"))
    assert largest_difference(again) < ATOL
    assert again.ours.parameters == both.ours.parameters


def test_shards_are_put_together(tmp_path: Path) -> None:
    reference = reference_model("bart-deep-scaled")
    both = save_and_load(tmp_path, reference, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert largest_difference(both) < ATOL


def test_a_file_without_a_logits_bias_has_none(tmp_path: Path) -> None:
    reference = reference_model("bart")
    reference.final_logits_bias.zero_()
    save_and_load(tmp_path, reference)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["final_logits_bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    again = Both(reference, load_model(tmp_path, "cpu"))
    assert largest_difference(again) < ATOL


def test_tables_that_are_tied_must_be_equal(tmp_path: Path) -> None:
    make(tmp_path, "bart")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.shared.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lm_head.weight is tied to model.shared.weight, but"):
        load_model(tmp_path, "cpu")


def test_missing_unexpected_and_misshaped_tensors_are_named(tmp_path: Path) -> None:
    make(tmp_path, "bart")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.encoder.layers.0.fc1.bias"]
    tensors["model.encoder.layers.1.fc1.bias"] = torch.zeros(3)
    tensors["final_logits_bias"] = torch.zeros(1, 7)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load_model(tmp_path, "cpu")
    for complaint in (
        "missing: model.encoder.layers.0.fc1.bias",
        "unexpected: model.encoder.layers.1.fc1.bias",
        "misshaped: final_logits_bias is [1, 7], expected [1, 53]",
    ):
        assert complaint in str(caught.value)


# --- config.json ---------------------------------------------------------------------------------

PUBLISHED = {
    "_num_labels": 3,
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "classif_dropout": 0.0,
    "extra_pos_embeddings": 2,
    "gradient_checkpointing": False,
    "id2label": {"0": "LABEL_0"},
    "normalize_before": False,
    "normalize_embedding": True,
    "num_hidden_layers": 12,
    "output_past": True,
    "prefix": " ",
    "static_position_embeddings": False,
    "task_specific_params": {"summarization": {"num_beams": 4}},
    "torch_dtype": "float32",
}
"""What the configs of published models hold beside what they need."""


def test_the_keys_of_published_configs_are_accepted(tmp_path: Path) -> None:
    make(tmp_path, "bart")
    edit_config(tmp_path, **PUBLISHED)
    load_model(tmp_path, "cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "gelu_fast"}, "activation_function must be one of relu, gelu"),
        ({"normalize_before": True}, "normalize_before must be False"),
        ({"add_final_layer_norm": True}, "add_final_layer_norm must be False"),
        ({"normalize_embedding": False}, "normalize_embedding must be True"),
        ({"static_position_embeddings": True}, "static_position_embeddings must be False"),
        ({"tie_encoder_decoder": True}, "tie_encoder_decoder must be False"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads must be {}"),
        ({"quantization_config": {"bits": 4}}, "quantization_config must be None"),
        ({"num_beam_groups": 2}, "num_beam_groups must be 1"),
        ({"wings": 2, "fins": 1}, "unknown keys: fins, wings"),
        ({"d_model": ...}, "missing key: d_model"),
        ({"d_model": "24"}, "d_model must be an integer of at least 1, got '24'"),
        ({"d_model": 25}, "dim must be a multiple of heads"),
        ({"eos_token_id": [2, 53]}, r"eos_token_id must be ids in \[0, 53\), got \[2, 53\]"),
        ({"eos_token_id": []}, r"eos_token_id must be ids in \[0, 53\), got \[\]"),
        ({"scale_embedding": 1}, "scale_embedding must be true or false, got 1"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make(tmp_path, "bart")
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        load_model(tmp_path, "cpu")


def test_a_generation_config_that_asks_for_too_much_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "bart")
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sequence_bias": [[[1], 2.0]]}))
    with pytest.raises(ModelError, match=r"generation_config\.json: sequence_bias must be None"):
        load_model(tmp_path, "cpu")
    path.write_text(json.dumps({"temperature": 0.0}))
    with pytest.raises(ModelError, match=r"temperature: Input should be greater than 0, got 0\.0"):
        load_model(tmp_path, "cpu")


# --- generation defaults -------------------------------------------------------------------------

SUMMARISER = {
    "num_beams": 3,
    "length_penalty": 2.0,
    "early_stopping": True,
    "no_repeat_ngram_size": 3,
    "min_length": 9,
    "max_length": 15,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
}
"""As in the configuration of BART for summaries."""


def test_generation_config_is_what_a_request_without_parameters_gets(tmp_path: Path) -> None:
    reference = reference_model("bart")
    reference.generation_config.update(**SUMMARISER)
    both = save_and_load(tmp_path, reference)
    assert both.ours.spec.default_max_new_tokens == 14
    answers = [our_defaults(both, source) for source in both.sources(6)]
    assert answers == [reference_tokens(both, source) for source in both.sources(6)]
    assert all(answer[0][0] == 0 and 9 <= len(answer[0]) <= 14 for answer in answers)


def test_older_models_keep_their_defaults_in_config_json(tmp_path: Path) -> None:
    reference = reference_model("bart")
    both = save_and_load(tmp_path, reference)
    (tmp_path / "generation_config.json").unlink()
    edit_config(tmp_path, **SUMMARISER)
    old = Both(reference, load_model(tmp_path, "cpu"))
    for source in both.sources(4):
        assert our_defaults(old, source) == reference_tokens(both, source, **SUMMARISER)


def test_a_request_overrides_field_by_field(tmp_path: Path) -> None:
    reference = reference_model("bart")
    reference.generation_config.update(**SUMMARISER)
    both = save_and_load(tmp_path, reference)
    for source in both.sources(4):
        for theirs, ours in (
            ({"num_beams": 1, "length_penalty": 1.0, "early_stopping": False}, {"num_beams": 1}),
            ({"length_penalty": -1.0}, {"length_penalty": -1.0}),
            ({"num_return_sequences": 3}, {"num_return_sequences": 3}),
            ({"min_length": 0, "min_new_tokens": 2}, {"min_new_tokens": 2}),
            ({"max_new_tokens": 12}, {"max_new_tokens": 12}),
        ):
            assert our_defaults(both, source, **ours) == reference_tokens(both, source, **theirs)


# --- a published model ---------------------------------------------------------------------------


@pytest.mark.skipif(not REAL_MODEL.is_dir(), reason="no published model beside the checkout")
def test_a_published_model_says_what_its_authors_library_says() -> None:
    model = load_model(REAL_MODEL, "cpu")
    assert model.source_tokenizer is not None
    assert model.target_tokenizer is not None
    engine = Engine(model, EngineConfig())
    cases = json.loads((REAL_MODEL / "expected.json").read_text(encoding="utf-8"))
    searches, rows = [], []
    for case in cases:
        [ids] = model.source_tokenizer.encode([case["word"]])
        assert ids == case["input_ids"]
        start = list(model.spec.decoder_start_ids)
        room = {"max_new_tokens": 62, "forced_eos_token_id": 2}
        rows.append(Row(ids, start, Decoding(**room)))
        searches.append(Row(ids, start, Decoding(**room, num_beams=4)))
    for row in [*rows, *searches]:
        engine.submit(row)
    found = {e.sequence: e.hypotheses for e in engine.run() if getattr(e, "hypotheses", ())}
    decode = model.target_tokenizer.decode
    for case, row, search in zip(cases, rows, searches, strict=True):
        assert row.tokens == cut(case["greedy_ids"][1:], {2})
        assert decode(row.tokens) == case["greedy"]
        hypotheses = found[search]
        assert [list(h.tokens) for h in hypotheses] == [
            cut(ids[1:], {2}) for ids in case["beam4_ids"]
        ]
        assert [decode(h.tokens) for h in hypotheses] == case["beam4"]
        assert [h.score for h in hypotheses] == pytest.approx(case["beam4_scores"], abs=1e-4)


@pytest.mark.skipif(not REAL_MODEL.is_dir(), reason="no published model beside the checkout")
def test_characters_that_the_published_model_does_not_know_are_unknown() -> None:
    model = load_model(REAL_MODEL, "cpu")
    assert model.source_tokenizer is not None
    assert model.spec.unk_id == 3
    assert model.source_tokenizer.encode(["é_a"]) == [[1, 3, 3, 50, 2]]
