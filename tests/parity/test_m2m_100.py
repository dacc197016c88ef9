"""The families `m2m_100` and `pegasus` against `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import ModelError
from model.loader import load_model
from model.sequence import Decoding
from service.check import Both, our_logits, reference_logits, reference_tokens
from tests.parity.checkpoints import ATOL, edit_config, largest_difference, our_defaults, our_tokens
from tests.parity.families import make

transformers = pytest.importorskip("transformers", reason="the reference is not installed")


# --- numbers -------------------------------------------------------------------------------------


def test_positions_far_out_are_the_references(tmp_path: Path) -> None:
    both = make(tmp_path, "m2m_100", max_position_embeddings=1024)
    source = both.sources(1, seed=3, longest=2)[0] * 500
    target = [*both.start, *(both.sources(1, seed=4, longest=2)[0] * 500)]
    [found] = our_logits(both, [(source[:1000], target[:1000])])
    expected = reference_logits(both, source[:1000], target[:1000])
    torch.testing.assert_close(found, expected, atol=ATOL, rtol=1e-5)


def test_a_generated_pad_has_no_position(tmp_path: Path) -> None:
    both = make(tmp_path, "m2m_100")
    for source in both.sources(4):
        [expected] = reference_tokens(
            both, source, num_beams=1, max_new_tokens=12, forced_bos_token_id=both.pad
        )
        decoding = Decoding(12, forced_bos_token_id=both.pad)
        assert our_tokens(both, [source], [decoding]) == [expected]
        assert expected[0] == both.pad
        assert len(expected) > 2


def test_a_forced_first_token_is_each_row_s_own(tmp_path: Path) -> None:
    both = make(tmp_path, "m2m_100")
    sources = both.sources(6, seed=9)
    languages = [40 + i % 3 for i in range(6)]
    expected = [
        reference_tokens(both, s, num_beams=n, max_new_tokens=12, forced_bos_token_id=id)[0]
        for n in (1, 3)
        for s, id in zip(sources, languages, strict=True)
    ]
    decodings = [
        Decoding(12, forced_bos_token_id=id, num_beams=n) for n in (1, 3) for id in languages
    ]
    found = our_tokens(both, sources * 2, decodings)
    assert [*found[:6], *(list(search[0].tokens) for search in found[6:])] == expected


# --- files ---------------------------------------------------------------------------------------


def test_position_encodings_in_a_file_are_read_or_computed(tmp_path: Path) -> None:
    both = make(tmp_path, "pegasus")
    tensors = load_file(tmp_path / "model.safetensors")
    positions = [name for name in tensors if "embed_positions" in name]
    for name in positions:
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    again = Both(both.reference, load_model(tmp_path, "cpu"))
    assert largest_difference(again) < ATOL
    assert len(positions) in (0, 2)


def test_old_files_name_every_table_and_hold_positions(tmp_path: Path) -> None:
    both = make(tmp_path, "m2m_100")
    whole = {name: tensor.clone() for name, tensor in both.reference.state_dict().items()}
    for side in ("encoder", "decoder"):
        whole[f"model.{side}.embed_positions.weights"] = torch.full((102, 24), torch.nan)
    (tmp_path / "model.safetensors").unlink()
    torch.save(whole, tmp_path / "pytorch_model.bin")
    again = Both(both.reference, load_model(tmp_path, "cpu"))
    assert largest_difference(again) < ATOL


PUBLISHED = {
    "early_stopping": True,
    "gradient_checkpointing": False,
    "max_length": 60,
    "num_beams": 5,
    "num_hidden_layers": 12,
    "torch_dtype": "float32",
    "tokenizer_class": "NllbTokenizer",
    "forced_eos_token_id": ...,
}
SUMMARISER = {
    "add_bias_logits": False,
    "add_final_layer_norm": True,
    "classif_dropout": 0.0,
    "extra_pos_embeddings": 1,
    "force_bos_token_to_be_generated": False,
    "length_penalty": 0.8,
    "max_length": 64,
    "normalize_before": True,
    "normalize_embedding": False,
    "num_beams": 8,
    "static_position_embeddings": True,
    "task_specific_params": {"summarization_xsum": {"length_penalty": 0.6}},
}


@pytest.mark.parametrize(("name", "keys"), [("m2m_100", PUBLISHED), ("pegasus", SUMMARISER)])
def test_the_keys_of_published_configs_are_accepted(
    name: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    both = make(tmp_path, name)
    (tmp_path / "generation_config.json").unlink()
    edit_config(tmp_path, **keys)
    old = Both(both.reference, load_model(tmp_path, "cpu"))
    options = {k: keys[k] for k in ("num_beams", "max_length", "early_stopping") if k in keys}
    options |= {"length_penalty": keys.get("length_penalty", 1.0)}
    for source in both.sources(3):
        assert our_defaults(old, source) == reference_tokens(both, source, **options)


@pytest.mark.parametrize("name", ["m2m_100", "pegasus"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "gelu_fast"}, "activation_function must be one of relu, gelu"),
        ({"normalize_before": False}, "normalize_before must be True"),
        ({"normalize_embedding": True}, "normalize_embedding must be False"),
        ({"wings": 2, "fins": 1}, "unknown keys: fins, wings"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make(tmp_path, name)
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        load_model(tmp_path, "cpu")


def test_a_width_without_position_encodings_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "m2m_100")
    edit_config(tmp_path, d_model=2)
    with pytest.raises(ModelError, match="d_model must be at least 4, got 2"):
        load_model(tmp_path, "cpu")
