"""Directories that say things in unusual but real ways, against `transformers`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers, trainers

from model.checkpoint import ModelError
from model.families import bart, t5
from model.loader import load_model
from service.check import Both, check, reference_tokens
from tests.e2e.test_families import PUBLISHED, publish
from tests.parity.checkpoints import ATOL, SIZES, enliven, largest_difference, our_defaults
from tests.parity.test_bart_tokenizers import TEXTS, sentences
from tests.parity.test_t5 import reference_model as t5_reference
from tests.parity.tokenizer_files import write_pieces

transformers = pytest.importorskip("transformers", reason="the reference is not installed")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A small BART; what it asks for is in `config.json`, as in older directories."""
    config = transformers.BartConfig(**SIZES)
    enliven(transformers.BartForConditionalGeneration(config)).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    return tmp_path


def add(file: Path, **keys: Any) -> None:
    stated = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(stated | keys))


def read(directory: Path) -> Both:
    """What both sides make of a directory."""
    reference = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32)
    return Both(reference.eval(), load_model(directory, "cpu"))


@pytest.mark.parametrize(
    "keys",
    [
        {"forced_eos_token_id": None},
        {"decoder_start_token_id": None},
        {"forced_eos_token_id": None, "decoder_start_token_id": None, "num_beams": 3},
    ],
)
def test_a_special_id_that_is_null_is_none(keys: dict[str, Any], directory: Path) -> None:
    add(directory / "config.json", **keys)
    both = read(directory)
    assert both.start == [0 if "decoder_start_token_id" in keys else 2]
    forced = None if "forced_eos_token_id" in keys else 2
    assert both.ours.spec.defaults.forced_eos_token_id == forced
    for source in both.sources(3):
        expected = reference_tokens(both, source, max_new_tokens=4)
        assert our_defaults(both, source, max_new_tokens=4) == expected


def test_a_head_may_stand_beside_a_bare_model(directory: Path) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    bare["lm_head.weight"] = bare["shared.weight"].clone()
    save_file(bare, file, metadata={"format": "pt"})
    both = read(directory)
    assert both.ours.network.output.projection.bias.abs().max() > 0.1
    assert largest_difference(both) < ATOL


def test_sizes_under_the_names_of_other_architectures_must_agree(directory: Path) -> None:
    add(directory / "config.json", hidden_size=24, num_attention_heads=2)
    assert largest_difference(read(directory)) < ATOL
    add(directory / "config.json", hidden_size=25)
    with pytest.raises(ModelError, match=r"hidden_size must be 24 or left out .* got 25"):
        load_model(directory, "cpu")


def test_t5_may_name_its_sizes_twice_and_no_start(tmp_path: Path) -> None:
    t5_reference("t5").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    stated = json.loads((tmp_path / "config.json").read_text())
    names = {"hidden_size": stated["d_model"], "num_attention_heads": stated["num_heads"]}
    add(tmp_path / "config.json", **names, decoder_start_token_id=None)
    assert load_model(tmp_path, "cpu").spec.decoder_start_ids == (0,)
    add(tmp_path / "config.json", num_attention_heads=99)
    with pytest.raises(ModelError, match=r"num_attention_heads must be .* got 99"):
        load_model(tmp_path, "cpu")


def test_unknown_keys_that_are_null_ask_for_nothing(directory: Path) -> None:
    add(directory / "generation_config.json", eos_token_id=2, wings=None)
    add(directory / "config.json", fins=None)
    load_model(directory, "cpu")
    add(directory / "generation_config.json", wings=2, feet=None)
    with pytest.raises(ModelError, match=r"generation_config\.json: unknown keys: wings$"):
        load_model(directory, "cpu")


@pytest.mark.parametrize("place", ["config.json", "generation_config.json"])
def test_several_tokens_may_end_a_target(place: str, directory: Path) -> None:
    plain = read(directory)
    said = [our_defaults(plain, source, max_new_tokens=20)[0] for source in plain.sources(6)]
    common = Counter(token for answer in said for token in answer[1:-1])
    named = [2, *(token for token, _ in common.most_common(2))]
    add(directory / "generation_config.json", eos_token_id=2, decoder_start_token_id=2)
    if place == "config.json":
        (directory / "generation_config.json").unlink()
        add(directory / "config.json", forced_eos_token_id=None)
    add(directory / place, eos_token_id=named, bad_words_ids=[[named[1]], [5]])
    both = read(directory)
    assert both.ours.spec.eos_ids == tuple(named)
    ends = set()
    for source in both.sources(6):
        for asked in ({}, {"min_new_tokens": 5}, {"num_beams": 3}, {"num_beams": 4}):
            asked |= {"max_new_tokens": 20}
            expected = reference_tokens(both, source, **asked)
            assert our_defaults(both, source, **asked) == expected
            ends |= {tokens[-1] for tokens in expected if len(tokens) < 20}
    assert ends == set(named)


@pytest.mark.parametrize("name", ["mbart-large-en-ro", "small100"])
def test_a_sound_multilingual_model_passes_the_check_with_texts(name: str, tmp_path: Path) -> None:
    publish(tmp_path, PUBLISHED[name], write_pieces(tmp_path / "sentencepiece.bpe.model"))
    report = check(load_model(tmp_path, "cpu"), ["the moon reads 42"])
    assert report.equal, report.findings


# --- tokenizers ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_level_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("byte-level")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(sentences(500, 0), trainer)
    backend.model.save(str(directory))
    (directory / "config.json").write_text(json.dumps({"model_type": "bart"}))
    return directory


@pytest.mark.parametrize("space", [True, False])
def test_a_first_word_is_cut_as_behind_a_space_where_files_say_so(
    space: bool, byte_level_files: Path
) -> None:
    settings = {"tokenizer_class": "BartTokenizer", "add_prefix_space": space}
    (byte_level_files / "tokenizer_config.json").write_text(json.dumps(settings))
    reference = transformers.BartTokenizer.from_pretrained(byte_level_files, **settings)
    ours, _ = bart.tokenizers(byte_level_files)
    assert ours is not None
    texts = TEXTS + sentences(1000, 1)
    expected = [reference(text)["input_ids"] for text in texts]
    assert ours.encode(texts) == expected
    said = [reference.decode(ids, skip_special_tokens=True) for ids in expected]
    assert [ours.decode(ids) for ids in expected] == said
    assert (ours.encode(["moon"]) == ours.encode([" moon"])) == space


def test_a_prefix_space_that_is_neither_true_nor_false_is_refused(byte_level_files: Path) -> None:
    settings = {"add_prefix_space": "yes"}
    (byte_level_files / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="add_prefix_space must be true or false, got 'yes'"):
        bart.tokenizers(byte_level_files)


def test_tokens_added_to_byt5_are_refused_by_name(tmp_path: Path) -> None:
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    assert t5.tokenizers(tmp_path) != (None, None)
    more = transformers.ByT5Tokenizer()
    more.add_tokens(["<sep>"])
    more.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"added tokens need a tokenizer\.json here, got '<sep>'"):
        t5.tokenizers(tmp_path)
