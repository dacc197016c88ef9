"""Pegasus' tokenizers against the reference's: `spiece.model` and `tokenizer.json`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from model.checkpoint import ModelError
from model.families import pegasus
from model.multilingual import PieceTokenizer
from model.tokenizer import IncrementalDetokenizer
from service.vocabulary import Vocabulary
from tests.parity.tokenizer_files import charsmap

transformers = pytest.importorskip("transformers", reason="the reference is not installed")

WORDS = [
    "the",
    "moon",
    "Über",
    "ça",
    "42",
    "don't",
    "reads",
    "日本",
    ",",
    "🙂",
    "river",
    "\n",
    "  ",
]
TRICKY = [
    "",
    "two  spaces",
    "Hello, world! It's 12.50€.",
    "naïve café — “quoted” … ﬁne Ａ",
    "tab\there\nline",
    "\u3000wide\u3000space\u00a0and another",
    "▁ the piece itself",
    "x" * 200,
]


def sentences(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 10))).strip() for _ in range(count)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained as published: `<n>` for a line break, which its texts do not have."""
    path: Path = tmp_path_factory.mktemp("pegasus")
    with (path / "spiece.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(s for s in sentences(500, 0) if s),
            model_writer=file,
            vocab_size=70,
            hard_vocab_limit=False,
            character_coverage=0.99,
            user_defined_symbols=["<n>"],
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            minloglevel=2,
        )
    return path


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    """What `PegasusTokenizer` makes of that model."""
    spm = sentencepiece.SentencePieceProcessor(model_file=str(directory / "spiece.model"))
    hidden = ["<mask_1>", "<mask_2>", *(f"<unk_{i}>" for i in range(2, 103))]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), *((token, -100.0) for token in hidden)]
    vocab += [(spm.id_to_piece(i), spm.get_score(i)) for i in range(2, len(spm))]
    vocab[105] = ("<unk>", 0.0)
    rules = charsmap((directory / "spiece.model").read_bytes())
    return transformers.PegasusTokenizer(vocab=vocab, _spm_precompiled_charsmap=rules)


@pytest.fixture(scope="module")
def ours(directory: Path) -> PieceTokenizer:
    source, target = pegasus.tokenizers(directory)
    assert source is target
    assert isinstance(source, PieceTokenizer)
    return source


def test_every_id_has_the_references_name(ours: PieceTokenizer, reference: Any) -> None:
    names = reference.convert_ids_to_tokens(range(len(reference)))
    assert [ours.token(id) for id in range(ours.vocab_size)] == names
    assert (names[0], names[2], names[104], names[105]) == (
        "<pad>",
        "<mask_1>",
        "<unk_102>",
        "<unk>",
    )
    assert ours.unk_id == 105


def test_ids_equal_the_reference_tokenizers(ours: PieceTokenizer, reference: Any) -> None:
    texts = TRICKY + sentences(1000, 1)
    spm = ours._cutter
    for found, text in zip(ours.encode(texts), texts, strict=True):
        expected = reference(text)["input_ids"]
        if found != expected:  # the same pieces in another order, see test_t5_tokenizers
            assert sorted(found) == sorted(expected), text
        assert found == [*(id + 103 for id in spm.encode(text)), 1]
    assert any(ours.unk_id in ids for ids in ours.encode(texts))
    assert Vocabulary("source", 200, ours).frame == [1]


def test_texts_equal_the_reference_tokenizers(ours: PieceTokenizer, reference: Any) -> None:
    rng = random.Random(2)
    rows = ours.encode(TRICKY + sentences(200, 3))
    rows += [rng.choices(range(ours.vocab_size), k=rng.randint(1, 12)) for _ in range(300)]
    for ids in rows:
        expected = reference.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids) == expected.strip(), ids


def test_a_line_break_is_a_piece_of_its_own(ours: PieceTokenizer) -> None:
    [ids] = ours.encode(["moon<n>river"], framed=False)
    assert [ours.token(id) for id in ids].count("<n>") == 1
    assert ours.decode(ids) == "moon<n>river"


def test_special_tokens_in_a_text_are_text(ours: PieceTokenizer) -> None:
    [ids] = ours.encode(["<mask_1> moon </s> <unk_7>"])
    assert ids.count(1) == 1
    assert min(ids[:-1]) >= 105


def test_pieces_of_a_stream_concatenate_to_the_text(ours: PieceTokenizer) -> None:
    for text in TRICKY + sentences(50, 9):
        [ids] = ours.encode([text], framed=False)
        detokenizer = IncrementalDetokenizer(ours)
        streamed = "".join([*map(detokenizer.push, ids), detokenizer.finish()])
        assert streamed.rstrip() == ours.decode(ids)


def test_the_offset_is_what_the_files_say(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes((directory / "spiece.model").read_bytes())
    path = tmp_path / "tokenizer_config.json"
    for offset, first in ((0, 2), (5, 7)):
        path.write_text(json.dumps({"offset": offset}))
        found, _ = pegasus.tokenizers(tmp_path)
        assert found is not None
        assert (found.token(first), found.unk_id) == ("<unk>", first)
    path.write_text(json.dumps({"offset": -1}))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: offset must be an integer"):
        pegasus.tokenizers(tmp_path)


def test_a_model_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    assert pegasus.tokenizers(tmp_path) == (None, None)
