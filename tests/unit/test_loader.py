"""From a directory to a model: what is strict, and what every refusal says."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from benchmarks.load_memory import LAYOUTS, make_checkpoint, measure
from model.checkpoint import Checkpoint, ModelError
from model.loader import DTYPES, LoadedModel, choose_device, load_model
from model.tokenizer import build_tokenizer
from tests.builders import TINY, make_native_model, make_tutorial_model


@pytest.fixture
def native(tmp_path: Path) -> Path:
    return make_native_model(tmp_path / "native")


@pytest.fixture
def tutorial(tmp_path: Path) -> Path:
    return make_tutorial_model(tmp_path / "tutorial")


def refusal(directory: Path, **options: str) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(directory, **{"device": "cpu", **options})
    return str(caught.value)


def change_config(directory: Path, **changes: Any) -> None:
    """Set keys; None removes one."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def change_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    """Set tensors, dots written as double underscores; None removes one."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path)


# --- what loads --------------------------------------------------------------------------------


def test_a_native_directory_loads_whole(native: Path) -> None:
    model = load_model(native, "cpu")
    assert model.directory == native
    assert model.spec.family == "seqserve"
    assert model.spec.decoder_start_ids == (1,)
    assert (model.spec.eos_id, model.spec.unk_id, model.spec.pad_id) == (2, 3, 0)
    assert (model.spec.max_src, model.spec.max_tgt) == (TINY["max_src"], TINY["max_tgt"])
    assert not model.spec.source_is_target
    assert model.source_tokenizer is not None
    assert model.target_tokenizer is not None
    assert model.source_tokenizer.vocab_size == model.spec.src_vocab_size
    assert model.device == torch.device("cpu")
    assert not model.network.training
    for name, parameter in model.network.named_parameters():
        assert parameter.device.type == "cpu", name
        assert not parameter.requires_grad
    stored = load_file(native / "model.safetensors")
    assert model.parameters == sum(tensor.numel() for tensor in stored.values())


def test_a_tied_output_is_one_tensor_and_counted_once(tmp_path: Path) -> None:
    model = load_model(make_native_model(tmp_path, tie_output=True), "cpu", packed=False)
    network: Any = model.network
    assert network.output.weight is network.decoder.embedding.tokens.weight
    stored = load_file(tmp_path / "model.safetensors")
    assert "output.weight" not in stored
    assert model.parameters == sum(tensor.numel() for tensor in stored.values())


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["native", "tutorial"])
def test_weights_take_the_asked_dtype_and_answer(
    dtype: str, family: str, packed: bool, request: pytest.FixtureRequest
) -> None:
    directory: Path = request.getfixturevalue(family)
    wide = load_model(directory, "cpu", packed=False)
    model = load_model(directory, "cpu", dtype, packed)
    ids = torch.tensor([[4, 5, 6]])
    assert model.dtype == dtype
    with torch.inference_mode():
        logits, _ = model.network(ids, ids)
        expected, _ = wide.network(ids, ids)
    assert logits.dtype == DTYPES[dtype]
    # 32 dimensions are few for int8; tests of it with more are those of model.packing
    atol = 0.6 if dtype == "int8" else 0.3
    torch.testing.assert_close(logits.float(), expected, atol=atol, rtol=0.1)


def test_a_directory_without_tokenizers_loads(native: Path) -> None:
    for path in native.glob("*_tokenizer.json"):
        path.unlink()
    model = load_model(native, "cpu")
    assert model.source_tokenizer is None
    assert model.target_tokenizer is None


def test_one_tokenizer_serves_both_sides_of_a_tutorial_model(tutorial: Path) -> None:
    assert load_model(tutorial, "cpu").source_tokenizer is None
    build_tokenizer(["abc"], "char").save(tutorial / "tokenizer.json")
    model = load_model(tutorial, "cpu")
    assert model.source_tokenizer is model.target_tokenizer
    assert model.source_tokenizer is not None


def test_auto_takes_cuda_where_there_is_one() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert choose_device("auto").type == expected


# --- directory and config ----------------------------------------------------------------------


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: no such directory"


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").mkdir()
    assert "no config.json" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"nonsense"])
def test_a_config_that_is_no_json_is_refused(native: Path, content: bytes) -> None:
    (native / "config.json").write_bytes(content)
    assert "config.json: not JSON" in refusal(native)


def test_a_config_that_is_no_object_is_refused(native: Path) -> None:
    (native / "config.json").write_text("[1]")
    assert "expected an object, got list" in refusal(native)


@pytest.mark.parametrize("model_type", ["llama", None, 3, ["seqserve"], ...])
def test_an_unknown_model_type_is_refused_with_the_known_ones(
    native: Path, model_type: object
) -> None:
    change_config(native, model_type=model_type)
    message = refusal(native)
    assert "model_type must be one of " in message
    assert "seqserve" in message
    assert "tutorial" in message


NATIVE_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"n_embd": 3}, "unknown keys: n_embd"),
    ({"src_vocab_size": ...}, "src_vocab_size"),
    ({"dim": "32"}, "dim must be"),
    ({"dim": 32.0}, "dim must be"),
    ({"dim": True}, "dim must be"),
    ({"dim": None}, "dim must be"),
    ({"dim": 0}, "dim must be"),
    ({"dim": -32}, "dim must be"),
    ({"dim": 30}, "dim must be a multiple of heads, got dim 30 and heads 4"),
    ({"heads": 0}, "heads must be"),
    ({"decoder_layers": 0}, "decoder_layers must be"),
    ({"max_tgt": 0}, "max_tgt must be"),
    ({"tie_output": 1}, "tie_output must be"),
    ({"dropout": "none"}, "dropout must be"),
    ({"dropout": 1.5}, "dropout must be in"),
    ({"undo_label_smoothing": 1.0}, "undo_label_smoothing must be below 1, got 1.0"),
    ({"undo_label_smoothing": -0.1}, "undo_label_smoothing must be at least 0, got -0.1"),
    ({"pad_id": 99}, "pad_id must be"),
    ({"eos_id": 99}, "eos_id must be"),
]


@pytest.mark.parametrize(("changes", "message"), NATIVE_FAULTS)
def test_faults_of_a_native_config_are_named(
    native: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(native, **changes)
    found = refusal(native)
    assert found.startswith(str(native / "config.json"))
    assert message in found


TUTORIAL_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"n_head": 4, "bias": False}, "unknown keys: bias, n_head"),
    ({"n_embd": ..., "block_size": ...}, "missing keys: n_embd, block_size"),
    ({"n_embd": 25}, "n_embd must be a multiple of n_heads, got 25 and 4"),
    ({"n_heads": 0}, "n_heads must be an integer of at least 1, got 0"),
    ({"n_heads": True}, "n_heads must be an integer"),
    ({"vocab_size": "29"}, "vocab_size must be an integer of at least 1, got '29'"),
    ({"vocab_size": 29.0}, "vocab_size must be an integer"),
    ({"n_layer": 0}, "n_layer must be"),
    ({"block_size": None}, "block_size must be"),
    ({"residual": "pre"}, "residual must be one of standard, normalized, got 'pre'"),
    ({"residual": ["standard"]}, "residual must be one of"),
    ({"residual": None}, "residual must be one of"),
    ({"eos_token_id": 29}, "eos_token_id must be an id below vocab_size, got 29"),
    ({"eos_token_id": -1}, "eos_token_id must be"),
    ({"eos_token_id": True}, "eos_token_id must be"),
    ({"dim": 48}, "dim must equal n_embd, 24, got 48"),
    ({"max_seq_len": 0}, "max_seq_len must be"),
    ({"dropout": 1.0}, "dropout must be a number in [0, 1), got 1.0"),
    ({"dropout": False}, "dropout must be"),
    ({"dropout": float("nan")}, "not JSON: NaN is no number"),
]


@pytest.mark.parametrize(("changes", "message"), TUTORIAL_FAULTS)
def test_faults_of_a_tutorial_config_are_named(
    tutorial: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(tutorial, **changes)
    found = refusal(tutorial)
    assert found.startswith(str(tutorial / "config.json"))
    assert message in found


def test_all_known_keys_of_a_tutorial_config_are_accepted(tutorial: Path) -> None:
    change_config(
        tutorial, dim=24, max_seq_len=40, dropout=0.1, residual="standard", eos_token_id=None
    )
    load_model(tutorial, "cpu")


# --- tensors -----------------------------------------------------------------------------------


def test_missing_extra_and_misshaped_tensors_are_named(native: Path) -> None:
    change_tensors(
        native,
        encoder__norm__weight=None,
        decoder__norm__scale=torch.ones(32),
        output__weight=torch.ones(31, 16),
    )
    message = refusal(native)
    assert message.startswith(str(native / "model.safetensors"))
    assert "missing: encoder.norm.weight" in message
    assert "unexpected: decoder.norm.scale" in message
    assert "misshaped: output.weight is [31, 16], expected [31, 32]" in message


def test_missing_extra_and_misshaped_tensors_of_a_tutorial_model_are_named(tutorial: Path) -> None:
    layer = "transformer__decoder__layers__1"
    change_tensors(
        tutorial,
        **{
            f"{layer}__fnn_norm__b_2": None,
            f"{layer}__attention__wq__bias": torch.ones(24),
            f"{layer}__feed_forward__w2__weight": torch.ones(24, 9),
            f"{layer}__mask_attention__mask": torch.zeros(1, 1, 3, 5),
            "transformer__wpe__pe": torch.zeros(1, 39, 24),
            "lm_head__weight": None,
        },
    )
    message = refusal(tutorial)
    layer = layer.replace("__", ".")
    for complaint in (
        f"missing: {layer}.fnn_norm.b_2",
        "missing: lm_head.weight",
        f"unexpected: {layer}.attention.wq.bias",
        f"misshaped: {layer}.feed_forward.w2.weight is [24, 9], expected [24, 24]",
        f"misshaped: {layer}.mask_attention.mask is [1, 1, 3, 5], expected [1, 1, 5, 5]",
        "misshaped: transformer.wpe.pe is [1, 39, 24], expected [1, 40, 24]",
    ):
        assert complaint in message


def test_a_mask_may_have_the_size_of_max_seq_len_only(tmp_path: Path) -> None:
    make_tutorial_model(tmp_path, extra_config={"max_seq_len": 7})
    assert "mask is [1, 1, 40, 40], expected [1, 1, 7, 7]" in refusal(tmp_path)


def test_one_decoder_layer_cannot_have_both_norm_names(tutorial: Path) -> None:
    layer = "transformer__decoder__layers__0__ffn_norm"
    change_tensors(tutorial, **{f"{layer}__{w}": torch.ones(24) for w in ("a_2", "b_2")})
    message = refusal(tutorial)
    assert "unexpected: transformer.decoder.layers.0.fnn_norm.a_2" in message


def test_layers_beyond_n_layer_are_unexpected(tutorial: Path) -> None:
    change_config(tutorial, n_layer=1)
    assert "unexpected: transformer.encoder.layers.1.attention.wq.weight" in refusal(tutorial)


def test_broken_weights_are_named(native: Path) -> None:
    path = native / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    assert refusal(native).startswith(f"{path}: not a readable safetensors file")


# --- tokenizers and options --------------------------------------------------------------------


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_tokenizer_larger_than_the_model_is_refused(native: Path, side: str) -> None:
    letters = "".join(chr(c) for c in range(0x41, 0x7B))
    build_tokenizer([letters], "char").save(native / f"{side}_tokenizer.json")
    assert f"the {side} tokenizer has 62 tokens, the model 31" in refusal(native)


def test_special_tokens_that_the_model_lost_are_no_obstacle(native: Path) -> None:
    path = native / "source_tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    size = backend.get_vocab_size()
    backend.add_special_tokens(["<mask>"])
    backend.save(str(path))
    model = load_model(native, "cpu")
    assert model.source_tokenizer is not None
    assert (model.source_tokenizer.vocab_size, model.spec.src_vocab_size) == (size + 1, size)
    assert all(id < size for id in model.source_tokenizer.encode(["<mask>"])[0])


@pytest.mark.parametrize("file", ["source_tokenizer.json", "target_tokenizer.spm"])
@pytest.mark.parametrize("content", [b"", b"{}", b"\x00\x01broken"])
def test_a_broken_tokenizer_is_refused_by_name(native: Path, file: str, content: bytes) -> None:
    for path in native.glob(f"{file.split('_')[0]}_tokenizer.*"):
        path.unlink()
    (native / file).write_bytes(content)
    assert file in refusal(native)


def test_unknown_dtype_is_refused(native: Path) -> None:
    assert "dtype must be one of float32" in refusal(native, dtype="int4")


@pytest.mark.parametrize("device", ["gpu", "meta", "mps", "", "cuda:99"])
def test_devices_that_are_not_there_are_refused(native: Path, device: str) -> None:
    assert repr(device) in refusal(native, device=device)


# --- memory ------------------------------------------------------------------------------------

MOST = 1.3
"""Anonymous memory while loading, in sizes of the model."""

LIBRARIES = 0.2
"""What the matrix library takes when it is first used, some 7 MB, in sizes of this small model."""


@pytest.fixture(scope="module", params=LAYOUTS)
def large(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 MB of float32: what Python itself allocates on the way is little beside it."""
    return make_checkpoint(tmp_path_factory.mktemp("large"), request.param, 80)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_holds_the_model_once(large: Path, dtype: str) -> None:
    assert measure(large, dtype).growth < MOST + LIBRARIES


def test_plain_loading_to_the_dtype_of_the_file_copies_nothing(large: Path) -> None:
    """Weights are pages of the mapped file, which are not anonymous."""
    assert measure(large, "float32", partial(load_model, packed=False)).growth < 0.5


def load_from_a_state_dict(directory: Path, device: str, dtype: str) -> LoadedModel:
    """As if all tensors were read before the first one finds its place."""
    checkpoint = Checkpoint.open(directory)
    state = {name: checkpoint.read(name).clone() for name in checkpoint.shapes}
    model = load_model(directory, device, dtype)
    assert state
    return model


def test_a_state_dict_in_memory_would_show(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "model.safetensors", 80)
    assert measure(directory, "bfloat16", load_from_a_state_dict).growth > 2.5
