"""T5's tokenizers against theirs: `tokenizer.json`, `spiece.model`, and ByT5's bytes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from model.families import t5
from model.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.parity.tokenizer_files import charsmap, train_pieces

transformers = pytest.importorskip("transformers", reason="the reference is not installed")

TRICKY = [
    "",
    " ",
    "  two  spaces ",
    "\u3000wide\u3000space\u00a0and another",
    "Hello, world! It's 12.50€.",
    "naïve café — “quoted” … ﬁne Ａ",
    "e\u0301 against é",
    "🙂 and 🏳️‍🌈",
    "תמורה مرحبا 日本語",
    "tab\there\nline\r\n",
    "\x07bell \u200bzero \ufeffmark",
    "▁ the piece itself ▁▁",
    "translate English to German: The house is wonderful.",
    "The <extra_id_0> walks in <extra_id_1> park",
    "<extra_id_0><extra_id_99> <extra_id_100> <extra_id_7",
    "glued<extra_id_3>on both sides",
    "x" * 200,
]


def sentences(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    words = ["the", " moon", " Über", "ça", " 42", "don't", "🙂", ",", " ", "\n", " reads", "日本"]
    words += [" <extra_id_5>", "\t", "é", " walks"]
    return ["".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(count)]


@pytest.fixture(scope="module")
def serialized() -> bytes:
    return train_pieces(
        (s for s in sentences(600, 0) if "extra" not in s and s.strip()),
        vocab_size=60,
        character_coverage=0.99,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
    )


@pytest.fixture(scope="module")
def reference(serialized: bytes) -> Any:
    """What `T5Tokenizer` makes of that model."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=serialized)
    vocab = [(pieces.id_to_piece(i), pieces.get_score(i)) for i in range(len(pieces))]
    vocab += [(f"<extra_id_{i}>", 0.0) for i in reversed(range(100))]
    return transformers.T5Tokenizer(vocab=vocab, _spm_precompiled_charsmap=charsmap(serialized))


@pytest.fixture(scope="module", params=["spiece.model", "tokenizer.json"])
def ours(request: Any, serialized: bytes, reference: Any, tmp_path_factory: Any) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("t5")
    (directory / "config.json").write_text(json.dumps({"model_type": "t5"}))
    if request.param == "spiece.model":
        (directory / "spiece.model").write_bytes(serialized)
    else:
        reference.save_pretrained(directory)
    source, target = t5.tokenizers(directory)
    assert source is target
    assert source is not None
    return source


def test_ids_equal_the_reference_tokenizers(
    ours: Tokenizer, reference: Any, serialized: bytes
) -> None:
    pieces = sentencepiece.SentencePieceProcessor(model_proto=serialized)

    texts = TRICKY + sentences(1000, 1)
    ties = 0
    for found, text in zip(ours.encode(texts), texts, strict=True):
        expected = reference(text)["input_ids"]
        if found != expected:
            # The same pieces fit in another order. The reference adds their scores up in double
            # precision, SentencePiece, with which T5 was trained, in single.
            ties += 1
            assert sorted(found) == sorted(expected), text
            assert found == [*pieces.encode(text), 1]
    assert ties < 5
    assert ties == 0 or isinstance(ours, t5.SentinelTokenizer)
    assert any(ours.unk_id in ids for ids in ours.encode(texts))
    assert ours.vocab_size == len(reference)


def test_texts_equal_the_reference_tokenizers(ours: Tokenizer, reference: Any) -> None:
    rng = random.Random(2)
    rows = ours.encode(TRICKY + sentences(200, 3))
    rows += [rng.choices(range(ours.vocab_size), k=rng.randint(1, 12)) for _ in range(300)]
    for ids in rows:
        expected = reference.decode(ids, skip_special_tokens=True)
        if isinstance(ours, t5.SentinelTokenizer):  # SentencePiece takes all leading spaces off
            assert ours.decode(ids) == expected.lstrip(" "), ids
        else:
            assert ours.decode(ids) == expected, ids


def test_every_id_has_the_references_name(ours: Tokenizer, reference: Any) -> None:
    names = reference.convert_ids_to_tokens(range(len(reference)))
    assert [ours.token(id) for id in range(ours.vocab_size)] == names
    with pytest.raises(KeyError):
        ours.token(ours.vocab_size)


def test_ids_of_no_token_have_no_text(ours: Tokenizer) -> None:
    [ids] = ours.encode(["the moon"], framed=False)
    assert ours.decode([*ids, ours.vocab_size, ours.vocab_size + 20]) == "the moon"


def test_special_tokens_but_sentinels_in_a_text_are_text(ours: Tokenizer) -> None:
    [ids] = ours.encode(["</s> the <pad> <extra_id_0>"])
    assert ids.count(1) == 1
    assert 0 not in ids
    assert ids[-2:] == [ours.vocab_size - 1, 1]


def test_pieces_of_a_stream_concatenate_to_the_text(ours: Tokenizer) -> None:
    for text in TRICKY + sentences(50, seed=9):
        [ids] = ours.encode([text], framed=False)
        detokenizer = IncrementalDetokenizer(ours)
        streamed = "".join([*map(detokenizer.push, ids), detokenizer.finish()])
        assert streamed.rstrip() == ours.decode(ids).rstrip()


@pytest.mark.parametrize(
    ("family", "config", "sentinels"),
    [("t5", {}, 100), ("t5", {"extra_ids": 5}, 5), ("mt5", {}, 0), ("mt5", {"extra_ids": 7}, 7)],
)
def test_sentinels_are_as_many_as_the_files_say(
    family: str, config: dict[str, int], sentinels: int, serialized: bytes, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "spiece.model").write_bytes(serialized)
    found, _ = t5.tokenizers(tmp_path)
    assert found is not None
    pieces = sentencepiece.SentencePieceProcessor(model_proto=serialized)
    assert found.vocab_size == len(pieces) + sentinels
    [ids] = found.encode(["<extra_id_0>"])
    assert (ids == [found.vocab_size - 1, 1]) == (sentinels > 0)


@pytest.mark.parametrize("contents", ["{}", '{"added_tokens": ["<extra_id_0>"]}'])
def test_a_broken_tokenizer_is_refused(contents: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(contents)
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        t5.tokenizers(tmp_path)


def test_a_model_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    assert t5.tokenizers(tmp_path) == (None, None)


# --- bytes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["saved", "published"])
def bytewise(request: Any, tmp_path_factory: Any) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("byt5")
    config = {"model_type": "t5"}
    if request.param == "saved":
        transformers.ByT5Tokenizer().save_pretrained(directory)
    else:
        config["tokenizer_class"] = "ByT5Tokenizer"
        (directory / "tokenizer_config.json").write_text(json.dumps({"extra_ids": 125}))
    (directory / "config.json").write_text(json.dumps(config))
    source, target = t5.tokenizers(directory)
    assert source is target
    assert source is not None
    return source


def test_bytes_equal_the_reference_tokenizers(bytewise: Tokenizer) -> None:
    reference = transformers.ByT5Tokenizer()
    texts = TRICKY + sentences(1000, 4)
    for found, text in zip(bytewise.encode(texts), texts, strict=True):
        assert found == reference(text)["input_ids"], text
        assert bytewise.decode(found) == reference.decode(found, skip_special_tokens=True)
    rng = random.Random(5)
    for _ in range(300):
        ids = rng.choices(range(384), k=rng.randint(1, 12))
        assert bytewise.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    names = reference.convert_ids_to_tokens(range(len(reference)))
    assert [bytewise.token(id) for id in range(bytewise.vocab_size)] == names
    with pytest.raises(KeyError):
        bytewise.token(384)


def test_a_stream_of_bytes_keeps_characters_whole(bytewise: Tokenizer) -> None:
    for text in TRICKY:
        [ids] = bytewise.encode([text], framed=False)
        detokenizer = IncrementalDetokenizer(bytewise)
        pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
        assert "".join(pieces) == bytewise.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces)
