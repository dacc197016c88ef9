"""BART's tokenizer files: `tokenizer.json`, and `vocab.json` with `merges.txt`, against theirs."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from model.checkpoint import ModelError
from model.families import bart, t5
from model.tokenizer import IncrementalDetokenizer, Tokenizer
from service.vocabulary import Vocabulary

transformers = pytest.importorskip("transformers", reason="the reference is not installed")

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
TEXTS = [
    "",
    " ",
    "  two  spaces ",
    "Hello, world! It's 12.50€.",
    "naïve café — “quoted” …",
    "🙂 and 🏳️‍🌈",
    "תמורה مرحبا 日本語",
    "tab\there\nline\r\n",
    "\x07\u200b\ufeff",
    "don't they'll I'm we've",
    "x" * 200,
]


def sentences(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    words = ["the", " moon", "Über", "ça", " 42", "don't", "🙂", ",", " ", "\n", "reads", "日本"]
    return ["".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(count)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE as published: vocab.json and merges.txt."""
    directory = tmp_path_factory.mktemp("bart")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL, "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(sentences(500, 0), trainer)
    backend.model.save(str(directory))
    (directory / "config.json").write_text(json.dumps({"model_type": "bart"}))
    return directory


@pytest.fixture(scope="module")
def reference(files: Path) -> Any:
    return transformers.BartTokenizer.from_pretrained(files)


@pytest.fixture(scope="module", params=["vocab and merges", "tokenizer.json"])
def ours(request: Any, files: Path, reference: Any, tmp_path_factory: Any) -> Tokenizer:
    directory = files
    if request.param == "tokenizer.json":
        directory = tmp_path_factory.mktemp("fast")
        reference.save_pretrained(directory)
        (directory / "config.json").write_text(json.dumps({"model_type": "bart"}))
        assert (directory / "tokenizer.json").exists()
    source, target = bart.tokenizers(directory)
    assert source is target
    assert source is not None
    return source


def test_ids_and_texts_equal_the_reference_tokenizers(ours: Tokenizer, reference: Any) -> None:
    texts = TEXTS + sentences(1000, 1)
    encoded = ours.encode(texts)
    assert encoded == reference(texts)["input_ids"]
    for ids, text in zip(encoded, texts, strict=True):
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True) == text


ADDED = {"<triplet>": True, "<term>": False}
"""Tokens of a model that somebody trained further, and whether they are special."""


def test_added_tokens_are_found_as_by_the_reference(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    size = len(json.loads((files / "vocab.json").read_text()))
    ids = {token: size + i for i, token in enumerate(ADDED)}
    (tmp_path / "added_tokens.json").write_text(json.dumps(ids))
    special = [token for token in ADDED if ADDED[token]]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_special_tokens": special}))
    reference = transformers.BartTokenizer.from_pretrained(tmp_path)
    found, _ = bart.tokenizers(tmp_path)
    assert found is not None
    texts = [*sentences(200, 5), "a<term>b", " <term> ", "<term><term>"]
    for row, text in zip(found.encode(texts), texts, strict=True):
        assert row == reference(text)["input_ids"]
        assert found.decode([*row, ids["<triplet>"]]) == text
    assert ids["<triplet>"] not in found.encode(["<triplet> a"])[0]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<term>": size + 7}))
    with pytest.raises(ModelError, match="added token '<term>' must have the next id, got"):
        bart.tokenizers(tmp_path)


def test_codet5_has_sentinels_behind_such_a_vocabulary(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    size = len(json.loads((files / "vocab.json").read_text()))
    sentinels = {f"<extra_id_{i}>": size + 9 - i for i in range(10)}
    (tmp_path / "added_tokens.json").write_text(json.dumps(sentinels))
    settings = {"tokenizer_class": "RobertaTokenizer", "extra_special_tokens": [*sentinels]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    reference = transformers.RobertaTokenizer.from_pretrained(tmp_path)
    found, both = t5.tokenizers(tmp_path)
    assert found is both
    assert found is not None
    assert found.vocab_size == len(reference) == size + 10
    texts = [*sentences(500, 6), "def f(<extra_id_0>):", "a <extra_id_3> b", "<extra_id_10>"]
    assert found.encode(texts) == reference(texts)["input_ids"]
    [ids] = found.encode(["moon<extra_id_1>river"])
    assert sentinels["<extra_id_1>"] in ids
    assert found.decode(ids) == "moonriver"


def test_a_frame_has_a_head_and_a_tail(ours: Tokenizer) -> None:
    vocabulary = Vocabulary("target", ours.vocab_size, ours)
    assert (vocabulary.frame, vocabulary.tail) == ([0, 2], [2])
    [whole], [bare] = ours.encode(["moon"]), ours.encode(["moon"], framed=False)
    assert whole == [0, *bare, 2]
    assert vocabulary.encode_open(["moon"], "targets") == [[0, *bare]]
    assert vocabulary.encode_bare(["moon"], "bad_words") == [bare]


def test_special_tokens_in_a_text_are_text(ours: Tokenizer) -> None:
    [ids] = ours.encode(["a </s> <mask> b"])
    assert ids.count(2) == 1
    assert ours.decode(ids) == "a </s> <mask> b"


def test_a_stream_keeps_characters_whole(ours: Tokenizer) -> None:
    for text in TEXTS:
        [ids] = ours.encode([text], framed=False)
        detokenizer = IncrementalDetokenizer(ours)
        pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
