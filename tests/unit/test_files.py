"""Model directories that are not to be trusted: each is refused by the file at fault."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint import ModelError
from model.files import LARGEST_TEXT, SUMS, check_files
from model.loader import load_model
from tests.builders import make_native_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_native_model(tmp_path / "model")


def refusal(directory: Path) -> str:
    began = time.monotonic()
    with pytest.raises(ModelError) as caught:
        load_model(directory, "cpu")
    assert time.monotonic() - began < 60  # seconds; a shared core is slow, but nothing hangs
    message = str(caught.value)
    assert len(message) < 20_000
    return message


# --- where files lie -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "source_tokenizer.json"])
def test_a_link_out_of_the_directory_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    (model / name).rename(tmp_path / "elsewhere")
    (model / name).symlink_to("../elsewhere")
    message = refusal(model)
    assert message.startswith(f"{model / name}: ")
    assert "leads out of the model's directory" in message
    assert str(tmp_path / "elsewhere") not in message


def test_so_is_one_in_a_folder_of_it_or_through_a_linked_folder(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("x")
    (model / "shards").mkdir()
    (model / "shards" / "a").symlink_to(tmp_path / "outside" / "file")
    assert "leads out" in refusal(model)
    (model / "shards" / "a").unlink()
    (model / "shards" / "b").symlink_to(tmp_path / "outside")
    assert "leads out" in refusal(model)


def test_links_that_lead_nowhere_are_refused(model: Path) -> None:
    (model / "a").symlink_to("nothing")
    assert "leads nowhere" in refusal(model)
    (model / "a").unlink()
    (model / "b").symlink_to("b")
    assert "leads nowhere" in refusal(model)


def test_links_inside_are_followed_and_the_directory_may_be_one(
    model: Path, tmp_path: Path
) -> None:
    (model / "config.json").rename(model / "settings.json")
    (model / "config.json").symlink_to("settings.json")
    (tmp_path / "name").symlink_to(model)
    assert load_model(tmp_path / "name", "cpu").parameters


def test_a_hub_cache_keeps_files_beside_its_snapshots(model: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "hub/blobs", tmp_path / "hub/snapshots/abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(model.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert load_model(snapshot, "cpu").parameters
    (snapshot / "other").symlink_to("/etc/passwd")
    assert "leads out" in refusal(snapshot)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "target_tokenizer.json", "x"])
def test_a_pipe_is_not_opened(model: Path, name: str) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    assert name in refusal(model) or "config.json" in refusal(model)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "source_tokenizer.json"])
def test_a_directory_is_no_file(model: Path, name: str) -> None:
    (model / name).unlink()
    (model / name).mkdir()
    assert name in refusal(model)


def test_a_huge_text_is_not_read(model: Path) -> None:
    with (model / "source_tokenizer.json").open("wb") as file:
        file.truncate(LARGEST_TEXT + 1)  # sparse
    assert "source_tokenizer.json: has 268435457 bytes" in refusal(model)
    (model / "source_tokenizer.json").rename(model / "tf_model.h5")
    check_files(model)


# --- configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["src_vocab_size", "dim", "hidden_dim", "max_src", "heads"])
@pytest.mark.parametrize(
    "value", [10**12, 10**100, 2**24, -1, 0, 1.5, "7", True, [7], {}, None, 1e300]
)
def test_a_size_that_cannot_be_is_refused(model: Path, name: str, value: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {name: value}))
    message = refusal(model)
    assert "config.json: " in message or "model.safetensors: " in message


@pytest.mark.parametrize("value", [10**9, 10**6, 1000])
def test_more_layers_than_tensors_are_refused(model: Path, value: int) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"encoder_layers": value}))
    message = refusal(model)
    tensors = len(load_file(model / "model.safetensors"))
    assert (f"encoder_layers is {value}, but there are {tensors}" in message) or value > 2**24


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"dim": NaN}', "NaN is no number"),
        ('{"dim": -Infinity}', "-Infinity is no number"),
        ('{"dim": ' + "9" * 10_000 + "}", "not JSON"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "expected an object"),
    ],
    ids=lambda v: v[:20],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_strange_file_of_json_is_refused(
    model: Path, file: str, content: str, message: str
) -> None:
    (model / file).write_text(content)
    assert f"{file}: " in refusal(model)
    assert message in refusal(model)


# --- weights -------------------------------------------------------------------------------------


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int, end: int, shape: list[int]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        safetensors({}, length=2**63),
        safetensors({}, length=10**9),
        safetensors(b"{" * 100_000),
        safetensors(b"\xff\xfe"),
        safetensors({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, b"\x00" * 4),
        safetensors({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"\x00" * 12),
        safetensors({"a": entry(0, 4 * 10**12, [10**12])}, b"\x00" * 4),
        safetensors({"a": entry(0, 4, [2**62, 4])}, b"\x00" * 4),
        safetensors({"a": entry(4, 0, [1])}, b"\x00" * 4),
        safetensors({"a": entry(0, 4, [-1])}, b"\x00" * 4),
        safetensors({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, b"\x00" * 4),
        safetensors({"a": entry(0, 4, [1])}, b"\x00" * 9),
    ],
    ids=lambda v: str(v[:60]),
)
def test_a_false_header_is_refused(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    message = refusal(model)
    assert "model.safetensors: not a readable safetensors file" in message


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "", 7, None])
def test_an_index_names_files_of_the_directory_only(model: Path, name: Any) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "model.safetensors.index.json: " in refusal(model)


def test_an_index_nested_too_deeply_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text("[" * 100_000)
    assert "not an index" in refusal(model)


def test_a_view_that_repeats_one_number_is_not_made_real(model: Path) -> None:
    (model / "model.safetensors").unlink()
    vast = torch.zeros(1).expand(2**24, 2**24)
    torch.save({"encoder.embedding.tokens.weight": vast}, model / "pytorch_model.bin")
    message = refusal(model)
    assert "encoder.embedding.tokens.weight [16777216, 16777216] is larger than its file" in message


def test_of_a_thousand_faults_a_hundred_are_named(model: Path) -> None:
    entries = {f"t{i}": entry(4 * i, 4 * i + 4, [1]) for i in range(10_000)}
    (model / "model.safetensors").write_bytes(safetensors(entries, b"\x00" * 40_000))
    message = refusal(model)
    assert "missing: " in message
    assert " more" in message[-20:]


# --- hashes --------------------------------------------------------------------------------------

LISTED = ("config.json", "model.safetensors", "source_tokenizer.json", "target_tokenizer.json")


def list_sums(model: Path) -> None:
    """As `sha256sum` would, in the directory."""
    lines = [f"{hashlib.sha256((model / n).read_bytes()).hexdigest()}  {n}\n" for n in LISTED]
    (model / SUMS).write_text("".join(lines))


def test_a_directory_whose_files_have_their_hashes_is_served(model: Path) -> None:
    list_sums(model)
    load_model(model, "cpu")


def test_sha256sum_s_own_output_is_read(model: Path) -> None:
    command = ["sha256sum", "--binary", *LISTED]
    done = subprocess.run(command, cwd=model, capture_output=True, text=True, check=True)
    assert " *" in done.stdout
    (model / SUMS).write_text(done.stdout)
    load_model(model, "cpu")


@pytest.mark.parametrize("name", LISTED)
def test_a_listed_file_with_one_other_bit_is_refused_with_both_hashes(
    model: Path, name: str
) -> None:
    list_sums(model)
    content = bytearray((model / name).read_bytes())
    expected = hashlib.sha256(content).hexdigest()
    content[-1] ^= 1
    (model / name).write_bytes(content)
    message = refusal(model)
    assert message.startswith(f"{model / name}: not the file that SHA256SUMS names")
    assert expected in message
    assert hashlib.sha256(content).hexdigest() in message


def test_a_listed_file_that_is_not_there_is_named(model: Path) -> None:
    list_sums(model)
    (model / "target_tokenizer.json").unlink()
    assert "target_tokenizer.json: SHA256SUMS lists it, but there is no such file" in refusal(model)


@pytest.mark.parametrize("line", ["", "config.json", "0" * 63 + "  config.json", "<<<<<<< ours"])
def test_a_list_with_a_line_that_is_no_hash_is_refused(model: Path, line: str) -> None:
    list_sums(model)
    (model / SUMS).write_text((model / SUMS).read_text() + line + "\n")
    assert "SHA256SUMS, line 5: expected a SHA-256 and a file, got" in refusal(model)


def test_a_list_leads_nowhere_else(model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (model / SUMS).write_text(f"{'0' * 64}  ../secret\n")
    assert "leads out of the model's directory" in refusal(model)


# --- tokenizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0.0, 0.3, 0.9])
def test_a_truncated_tokenizer_is_refused(model: Path, cut: float) -> None:
    content = (model / "source_tokenizer.json").read_bytes()
    (model / "source_tokenizer.json").write_bytes(content[: int(len(content) * cut)])
    assert "source_tokenizer.json: not a tokenizer" in refusal(model)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"model":' * 50_000, b"\xff", b"null"])
def test_a_strange_tokenizer_is_refused(model: Path, content: bytes) -> None:
    (model / "source_tokenizer.json").write_bytes(content)
    assert "source_tokenizer.json: not a tokenizer" in refusal(model)


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 1000, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a" * 99]
)
def test_a_strange_sentencepiece_model_is_refused(model: Path, content: bytes) -> None:
    (model / "source_tokenizer.json").unlink()
    (model / "source_tokenizer.spm").write_bytes(content)
    assert "source_tokenizer.spm: not a SentencePiece model" in refusal(model)
