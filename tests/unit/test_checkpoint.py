"""Tensors on disk: what is accepted, and what every refusal names."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from model.checkpoint import Checkpoint, ModelError, fill

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.0, -1.0])}


def same(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    assert dict(checkpoint.shapes) == {name: tuple(t.shape) for name, t in tensors.items()}
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor)


# --- files -------------------------------------------------------------------------------------


def test_safetensors_are_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    same(Checkpoint.open(tmp_path), TENSORS)


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.pth"])
def test_a_state_dict_is_read_whatever_its_file_is_called(tmp_path: Path, name: str) -> None:
    torch.save(OrderedDict(TENSORS), tmp_path / name)
    same(Checkpoint.open(tmp_path), TENSORS)


def test_parameters_of_a_module_are_read(tmp_path: Path) -> None:
    layer = nn.Linear(2, 3)
    torch.save(dict(layer.named_parameters()), tmp_path / "model.pt")
    same(Checkpoint.open(tmp_path), layer.state_dict())


def test_a_file_of_before_torch_1_6_is_read(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    same(Checkpoint.open(tmp_path), TENSORS)


def test_a_state_dict_beside_an_optimizer_is_found_under_model(tmp_path: Path) -> None:
    torch.save({"model": TENSORS, "step": 7, "optimizer": {"lr": 0.1}}, tmp_path / "model.pt")
    same(Checkpoint.open(tmp_path), TENSORS)


@pytest.mark.parametrize("file", ["model.safetensors", "model.pt"])
def test_the_prefix_of_data_parallel_is_taken_off(tmp_path: Path, file: str) -> None:
    prefixed = {f"module.{name}": tensor for name, tensor in TENSORS.items()}
    if file.endswith(".pt"):
        torch.save({"model": prefixed}, tmp_path / file)
    else:
        save_file(prefixed, tmp_path / file)
    same(Checkpoint.open(tmp_path), TENSORS)


def test_a_prefix_that_only_some_names_have_stays(tmp_path: Path) -> None:
    torch.save({"module.a": torch.zeros(1), "a": torch.ones(1)}, tmp_path / "model.pt")
    assert set(Checkpoint.open(tmp_path).shapes) == {"module.a", "a"}


def test_names_of_a_bare_model_get_their_prefix(tmp_path: Path) -> None:
    tensors = {"encoder.a": torch.tensor([1.0]), "shared.b": torch.tensor([2.0])}
    save_file(tensors, tmp_path / "model.safetensors")
    bare = Checkpoint.open(tmp_path)
    whole = bare.under("model.")
    assert set(whole.shapes) == {"model.encoder.a", "model.shared.b"}
    assert whole.read("model.shared.b").item() == 2.0
    assert bare.under("") is bare
    assert whole.under("model.") is whole


def test_tensors_that_a_safetensors_file_says_are_tied_are_both_there(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(4, 3)
            self.output = nn.Linear(3, 4, bias=False)
            self.output.weight = self.tokens.weight

    network = Tied()
    save_model(network, str(tmp_path / "model.safetensors"))
    same(Checkpoint.open(tmp_path), network.state_dict())


def test_safetensors_win_over_other_files(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    torch.save({"old": torch.zeros(1)}, tmp_path / "old.pt")
    same(Checkpoint.open(tmp_path), TENSORS)


# --- refusals ----------------------------------------------------------------------------------


def refusal(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(directory)
    message = str(caught.value)
    assert str(directory) in message
    return message


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    assert "found none" in refusal(tmp_path)


def test_a_choice_of_files_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("best.pt", "last.pth"):
        torch.save(TENSORS, tmp_path / name)
    assert "best.pt, last.pth" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 40, -1])
def test_a_truncated_safetensors_file_is_refused(tmp_path: Path, keep: int) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:keep])
    assert "not a readable safetensors file" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no tensors", b"\x80\x02.", b"PK\x03\x04broken"])
@pytest.mark.parametrize("file", ["model.safetensors", "model.pt"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, file: str, content: bytes) -> None:
    (tmp_path / file).write_bytes(content)
    assert file in refusal(tmp_path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # torch's, on its way to refuse
@pytest.mark.parametrize("keep", [1, 30, 200, -30, -1])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_pt_file_is_refused(tmp_path: Path, keep: int, zipped: bool) -> None:
    buffer = io.BytesIO()
    torch.save(TENSORS, buffer, _use_new_zipfile_serialization=zipped)
    (tmp_path / "model.pt").write_bytes(buffer.getvalue()[:keep])
    refusal(tmp_path)


class Mischief:
    """Runs code when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.witness,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickled_object_is_refused_and_its_code_not_run(tmp_path: Path, zipped: bool) -> None:
    witness = tmp_path / "witness"
    state = {**TENSORS, "mischief": Mischief(witness)}
    torch.save(state, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
    assert "save model.state_dict()" in refusal(tmp_path)
    assert not witness.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # torch's, on its way to refuse
def test_a_plain_pickle_is_refused_and_its_code_not_run(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Mischief(witness)))
    refusal(tmp_path)
    assert not witness.exists()


def test_a_whole_pickled_model_is_refused_with_advice(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    assert "save model.state_dict()" in refusal(tmp_path)


@pytest.mark.parametrize(
    "content",
    [[torch.zeros(1)], torch.zeros(1), {"a": 1.0}, {0: torch.zeros(1)}, {"model": {"a": "b"}}],
)
def test_what_is_no_dictionary_of_tensors_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "model.pt")
    assert "expected a dictionary of tensors" in refusal(tmp_path)


def test_a_foreign_zip_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    refusal(tmp_path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [True, False])
def test_no_damage_to_a_pt_file_raises_anything_but_a_refusal(tmp_path: Path, zipped: bool) -> None:
    buffer = io.BytesIO()
    torch.save(TENSORS, buffer, _use_new_zipfile_serialization=zipped)
    draw = random.Random(0)
    for _ in range(200):
        damaged = bytearray(buffer.getvalue())
        for _ in range(draw.randrange(1, 6)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        (tmp_path / "model.pt").write_bytes(damaged[: draw.randrange(1, 2 * len(damaged))])
        with contextlib.suppress(ModelError):
            Checkpoint.open(tmp_path)


# --- filling -----------------------------------------------------------------------------------


class Pair(nn.Module):
    """Two parameters, one of them held in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.again = nn.Linear(3, 2, bias=False)
        self.again.weight = self.first.weight


NAMES = {"first.weight": "a", "first.bias": "b"}


def filled(found: dict[str, Tensor], ignored: dict[str, tuple[int, ...]] | None = None) -> Pair:
    with torch.device("meta"):
        network = Pair()
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    checkpoint = Checkpoint(Path("weights.pt"), shapes, found.__getitem__)
    fill(network, checkpoint, NAMES, ignored or {}, torch.device("cpu"), torch.float32)
    return network


def test_parameters_are_filled_and_tied_ones_stay_tied() -> None:
    network = filled(TENSORS)
    assert torch.equal(network.first.weight, TENSORS["a"])
    assert network.again.weight is network.first.weight
    assert torch.equal(network.first.bias, TENSORS["b"])
    assert not network.first.weight.requires_grad


def test_tensors_take_the_asked_dtype() -> None:
    network = filled({name: tensor.half() for name, tensor in TENSORS.items()})
    assert network.first.weight.dtype == torch.float32


def test_every_fault_is_named_at_once() -> None:
    found = {"a": torch.zeros(3, 2), "c": torch.zeros(1), "mask": torch.zeros(2, 2)}
    with pytest.raises(ModelError) as caught:
        filled(found, {"mask": (4, 4), "pe": (1,)})
    assert str(caught.value) == (
        "weights.pt: missing: b; misshaped: a is [3, 2], expected [2, 3]; unexpected: c; "
        "misshaped: mask is [2, 2], expected [4, 4]"
    )


def test_ignored_tensors_may_be_there_or_not() -> None:
    filled(TENSORS, {"mask": (2, 2)})
    filled({**TENSORS, "mask": torch.zeros(2, 2)}, {"mask": (2, 2)})


# --- shards ------------------------------------------------------------------------------------


def write_shards(directory: Path, weight_map: Any = None, bin: bool = False) -> None:
    """Each tensor in a file of its own, and the index."""
    for name, tensor in TENSORS.items():
        if bin:
            torch.save({name: tensor}, directory / f"{name}.bin")
        else:
            save_file({name: tensor}, directory / f"{name}.safetensors")
    suffix = "bin" if bin else "safetensors"
    weight_map = weight_map or {name: f"{name}.{suffix}" for name in TENSORS}
    index = "pytorch_model.bin.index.json" if bin else "model.safetensors.index.json"
    (directory / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("bin", [False, True])
def test_shards_are_one_checkpoint(tmp_path: Path, bin: bool) -> None:
    write_shards(tmp_path, bin=bin)
    same(Checkpoint.open(tmp_path), TENSORS)


def test_shards_may_be_links_into_a_hub_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write_shards(tmp_path / "blobs")
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    same(Checkpoint.open(tmp_path / "snapshot"), TENSORS)


def test_pytorch_model_bin_is_preferred_to_other_files_of_torch(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    torch.save({"x": torch.ones(1)}, tmp_path / "optimizer.pt")
    same(Checkpoint.open(tmp_path), TENSORS)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../a.safetensors"}, "'../a.safetensors' lies outside"),
        ({"a": "sub/../../a.safetensors"}, "lies outside"),
        ({"a": "/etc/passwd"}, "'/etc/passwd' lies outside"),
        ({"a": "c.safetensors"}, "there is no c.safetensors"),
        ({"a": 3}, "must name files, got 3"),
        ({"a": "b.safetensors"}, "a is not in b.safetensors"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    tmp_path: Path, weight_map: Any, message: str
) -> None:
    write_shards(tmp_path, weight_map)
    with pytest.raises(ModelError, match=rf"index\.json: .*{message}"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match="not an index with a weight_map"):
        Checkpoint.open(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file(TENSORS, tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match=r"a is in b\.safetensors as well"):
        Checkpoint.open(tmp_path)


# --- copies ------------------------------------------------------------------------------------


def test_a_copy_may_be_there_and_must_be_one(tmp_path: Path) -> None:
    network = nn.Linear(2, 3, bias=False)
    cpu, names = torch.device("cpu"), {"weight": "w"}
    weight = torch.arange(6.0).reshape(3, 2)
    for copy, complaint in (
        (weight.clone(), None),
        (weight + 1, "different: copy is tied to w, but does not equal it"),
        (weight.T.contiguous(), r"misshaped: copy is \[2, 3\], expected \[3, 2\]"),
    ):
        save_file({"w": weight, "copy": copy}, tmp_path / "model.safetensors")
        fails = (
            pytest.raises(ModelError, match=complaint) if complaint else contextlib.nullcontext()
        )
        with fails:
            fill(network, Checkpoint.open(tmp_path), names, {}, cpu, torch.float32, {"copy": "w"})
