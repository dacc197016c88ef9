"""The family `t5` (T5, v1.1, Flan-T5, mT5, ByT5) against `transformers`."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.checkpoint import ModelError
from model.config import EngineConfig
from model.engine import Engine
from model.layers import RelativePositionBias, relative_buckets
from model.loader import load_model
from model.sequence import Decoding, Forward
from model.sequence import Sequence as Row
from service.check import (
    Both,
    cut,
    our_logits,
    our_memory,
    reference_logits,
    reference_memory,
    reference_tokens,
)
from tests.parity.checkpoints import (
    ATOL,
    check_long_targets,
    edit_config,
    largest_difference,
    our_defaults,
    save_and_load,
)
from tests.parity.families import make, reference_model

transformers = pytest.importorskip("transformers", reason="the reference is not installed")


# --- numbers -------------------------------------------------------------------------------------


def test_rows_with_prefixes_of_different_lengths_decode_side_by_side(tmp_path: Path) -> None:
    both = make(tmp_path, "flan-deep")
    rng = random.Random(4)
    sources = both.sources(6, seed=3)
    prefixes = [[*both.start, *rng.choices(range(2, 53), k=i * 6)] for i in range(6)]
    greedy, beams = Decoding(30), Decoding(30, num_beams=3)
    rows = [
        Row(src, prefix, decoding)
        for decoding in (greedy, beams)
        for src, prefix in zip(sources, prefixes, strict=True)
    ]
    engine = Engine(both.ours, EngineConfig())
    for row in rows:
        engine.submit(row)
    found = {e.sequence: e.hypotheses for e in engine.run() if getattr(e, "hypotheses", ())}
    for i, (src, prefix) in enumerate(zip(sources, prefixes, strict=True)):
        ids = torch.tensor([src])
        for row, width in ((rows[i], 1), (rows[6 + i], 3)):
            [answer] = both.reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                decoder_input_ids=torch.tensor([prefix]),
                max_new_tokens=30,
                num_beams=width,
            )
            expected = cut(answer[len(prefix) :].tolist(), {1})
            assert list(found[row][0].tokens if width > 1 else row.tokens) == expected


def without_bias_on_steps(bias: RelativePositionBias, positions: Tensor, mask: Tensor) -> Tensor:
    whole = ORIGINAL(bias, positions, mask)
    return whole if positions.shape[1] > 1 else whole.clamp(-0.0, 0.0).masked_fill(~mask, -math.inf)


def without_ragged_rows(bias: RelativePositionBias, positions: Tensor, mask: Tensor) -> Tensor:
    return ORIGINAL(bias, positions.amax(dim=0, keepdim=True), mask)


def without_the_last_bucket(bias: RelativePositionBias, positions: Tensor, mask: Tensor) -> Tensor:
    keys = torch.arange(mask.shape[-1])
    far = (positions[..., None] - keys > bias.max_distance)[:, None]
    return ORIGINAL(bias, positions, mask).masked_fill(far & mask, 0.0)


ORIGINAL = RelativePositionBias.forward


@pytest.mark.parametrize(
    "fault", [without_bias_on_steps, without_ragged_rows, without_the_last_bucket]
)
def test_the_comparison_of_cached_steps_notices_a_wrong_bias(
    fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = make(tmp_path, "t5")
    monkeypatch.setattr(RelativePositionBias, "forward", fault)
    with pytest.raises(AssertionError, match="not close"):
        check_long_targets(both)


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (6, 100), (4, 3)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_are_the_references(buckets: int, distance: int, bidirectional: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    relative = torch.arange(-4 * distance, 4 * distance + 1)
    expected = T5Attention._relative_position_bucket(relative, bidirectional, buckets, distance)
    found = relative_buckets(buckets, distance, bidirectional)
    assert torch.equal(found[relative.clamp(-distance, distance) + distance], expected)


@pytest.mark.parametrize("name", ["t5-deep", "flan-deep"])
def test_attention_weights_equal_the_reference(name: str, tmp_path: Path) -> None:
    both = make(tmp_path, name)
    both.reference.set_attn_implementation("eager")
    pairs = list(zip(both.sources(4), both.targets(4), strict=True))
    stepper = both.ours.stepper(EngineConfig())
    with torch.inference_mode():
        maps = stepper.attention([Forward(src, tgt) for src, tgt in pairs])
    for (src, tgt), ours in zip(pairs, maps, strict=True):
        with torch.no_grad():
            theirs = both.reference(
                input_ids=torch.tensor([src]),
                decoder_input_ids=torch.tensor([tgt]),
                output_attentions=True,
            )
        for found, expected in (
            (ours.encoder, theirs.encoder_attentions),
            (ours.decoder, theirs.decoder_attentions),
            (ours.cross, theirs.cross_attentions),
        ):
            torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["t5", "t5-v1.1"])
def test_float16_bears_feed_forwards_beyond_its_range(name: str, tmp_path: Path) -> None:
    reference = reference_model(name)
    with torch.no_grad():
        for parameter_name, parameter in reference.named_parameters():
            if parameter_name.endswith("wo.weight"):
                parameter *= 3e5
    exact = save_and_load(tmp_path, reference)
    half = Both(reference, load_model(tmp_path, "cpu", "float16"))
    assert {p.dtype for p in half.network.parameters()} == {torch.float16, torch.float32}
    layer = half.network.encoder.layers[0]
    x = torch.randn(1, 5, 24).half()
    assert layer.feed_forward(x).abs().max() > torch.finfo(torch.float16).max
    pairs = list(zip(exact.sources(4), exact.targets(4), strict=True))
    for (src, tgt), found in zip(pairs, our_logits(half, pairs), strict=True):
        assert (found - reference_logits(exact, src, tgt)).abs().max() < 0.1


def test_an_empty_source_is_finite(tmp_path: Path) -> None:
    both = make(tmp_path, "t5")
    memory = our_memory(both, [[3, 4], []])
    assert memory.isfinite().all()
    torch.testing.assert_close(memory[:1], reference_memory(both, [[3, 4]]), atol=ATOL, rtol=0)


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t5", "t5-v1.1"])
def test_old_files_name_every_table_and_one_that_nobody_uses(name: str, tmp_path: Path) -> None:
    both = make(tmp_path, name)
    whole = {n: tensor.clone() for n, tensor in both.reference.state_dict().items()}
    assert {"encoder.embed_tokens.weight", "lm_head.weight"} < set(whole)
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    whole[unused] = torch.full((8, 3), torch.nan)
    (tmp_path / "model.safetensors").unlink()
    torch.save(whole, tmp_path / "pytorch_model.bin")
    again = Both(both.reference, load_model(tmp_path, "cpu"))
    assert largest_difference(again) < ATOL


def test_a_table_under_another_name_is_found(tmp_path: Path) -> None:
    both = make(tmp_path, "t5")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["decoder.embed_tokens.weight"] = tensors.pop("shared.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    again = Both(both.reference, load_model(tmp_path, "cpu"))
    assert largest_difference(again) < ATOL


def test_older_files_say_by_their_tie_whether_the_output_is_scaled(tmp_path: Path) -> None:
    for name, tied in (("t5", True), ("t5", ...), ("t5-v1.1", False)):
        directory = tmp_path / f"{name}{tied}"
        both = make(directory, name)
        edit_config(directory, tie_word_embeddings=tied, scale_decoder_outputs=...)
        again = Both(both.reference, load_model(directory, "cpu"))
        assert largest_difference(again) < ATOL


def test_missing_unexpected_and_misshaped_tensors_are_named(tmp_path: Path) -> None:
    make(tmp_path, "t5")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["encoder.block.0.layer.0.SelfAttention.q.weight"]
    tensors["encoder.block.1.layer.0.SelfAttention.q.weight"] = torch.zeros(3)
    tensors["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = torch.zeros(
        9, 3
    )
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load_model(tmp_path, "cpu")
    for complaint in (
        "missing: encoder.block.0.layer.0.SelfAttention.q.weight",
        "unexpected: encoder.block.1.layer.0.SelfAttention.q.weight",
        "relative_attention_bias.weight is [9, 3], expected [8, 3]",
    ):
        assert complaint in str(caught.value)


# --- config.json ---------------------------------------------------------------------------------

PUBLISHED = {
    "gradient_checkpointing": False,
    "initializer_factor": 1.0,
    "n_positions": 512,
    "output_past": True,
    "task_specific_params": {"translation_en_to_de": {"prefix": "translate English to German: "}},
    "tokenizer_class": "T5Tokenizer",
    "torch_dtype": "float32",
    "dense_act_fn": ...,
    "is_gated_act": ...,
}
"""What the configs of published models hold beside what they need, or leave out."""


def test_the_keys_of_published_configs_are_accepted(tmp_path: Path) -> None:
    make(tmp_path, "t5")
    edit_config(tmp_path, **PUBLISHED)
    spec = load_model(tmp_path, "cpu").spec
    assert (spec.max_src, spec.max_tgt, spec.decoder_start_ids) == (4096, 4096, (0,))


def test_the_decoder_starts_with_padding_where_nothing_else_is_said(tmp_path: Path) -> None:
    make(tmp_path, "t5")
    (tmp_path / "generation_config.json").unlink()
    edit_config(tmp_path, decoder_start_token_id=..., pad_token_id=7)
    assert load_model(tmp_path, "cpu").spec.decoder_start_ids == (7,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feed_forward_proj": "gated-mish"}, "feed_forward_proj must be one of relu, gelu"),
        ({"dense_act_fn": "gelu"}, "dense_act_fn must be 'relu'"),
        ({"is_gated_act": True}, "is_gated_act must be False"),
        ({"is_decoder": True}, "is_decoder must be False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config must be None"),
        ({"wings": 2, "fins": 1}, "unknown keys: fins, wings"),
        ({"d_kv": ...}, "missing key: d_kv"),
        ({"num_heads": "3"}, "num_heads must be an integer of at least 1, got '3'"),
        ({"relative_attention_num_buckets": 7}, "cannot sort distances up to 20 into 7 buckets"),
        ({"relative_attention_max_distance": 2}, "cannot sort distances up to 2 into 8 buckets"),
        ({"scale_decoder_outputs": 1}, "scale_decoder_outputs must be true or false, got 1"),
        ({"model_type": "umt5"}, "model_type must be one of .* got 'umt5'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make(tmp_path, "t5")
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        load_model(tmp_path, "cpu")


def test_generation_config_is_what_a_request_without_parameters_gets(tmp_path: Path) -> None:
    reference = reference_model("t5")
    asked = {"num_beams": 3, "length_penalty": 2.0, "no_repeat_ngram_size": 2, "max_length": 15}
    reference.generation_config.update(**asked, early_stopping=True, min_length=5)
    both = save_and_load(tmp_path, reference)
    assert both.ours.spec.default_max_new_tokens == 14
    answers = [our_defaults(both, source) for source in both.sources(6)]
    assert answers == [reference_tokens(both, source) for source in both.sources(6)]
