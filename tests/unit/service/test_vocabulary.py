"""Texts to ids and back, with the tokenizers that models come with."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from model.config import ModelSpec
from model.tokenizer import JsonTokenizer, build_tokenizer
from seqserve.errors import InvalidRequestError
from service.vocabulary import Vocabulary, cut_source, read_sources

LETTERS = build_tokenizer(["abcdefghij"], "char")
WORDS = build_tokenizer(["HH AH L OW"], "whitespace")
PIECES = build_tokenizer(
    ["the cat sat on the mat", "ein Haus am See"] * 20, "sentencepiece", vocab_size=290
)

SPEC = ModelSpec(
    family="test",
    src_vocab_size=14,
    tgt_vocab_size=8,
    pad_id=0,
    decoder_start_ids=(1,),
    eos_ids=(2,),
    unk_id=3,
    max_src=6,
    max_tgt=8,
    default_max_new_tokens=8,
)

SOURCE = Vocabulary("source", 14, LETTERS)
TARGET = Vocabulary("target", WORDS.vocab_size, WORDS)
NO_TEXT = Vocabulary("source", 14, None)


@pytest.mark.parametrize(
    ("ids", "tail", "length", "cut"),
    [
        ([5, 6, 7, 2], [2], 3, [5, 6, 2]),
        ([5, 6, 7, 2], [2], 1, [2]),
        ([5, 6, 7, 2], [2], 4, [5, 6, 7, 2]),
        ([5, 6, 7, 2], [], 3, [5, 6, 7]),
        ([5, 6], [2], None, [5, 6]),
    ],
)
def test_cutting_keeps_the_end_that_the_tokenizer_put(
    ids: list[int], tail: list[int], length: int | None, cut: list[int]
) -> None:
    assert cut_source(ids, tail, length) == cut


def test_texts_become_sources() -> None:
    texts = ["ab", "", "a?"]
    plain, blank, odd = read_sources(SOURCE, SPEC, texts, [], ["x", "y", "z"])
    assert plain.ids[-1] == 2
    assert not plain.blank
    assert blank.blank
    assert odd.unknown == 1


def test_ids_are_sources_as_they_are() -> None:
    given, empty = read_sources(SOURCE, SPEC, None, [[5, 2, 5], []], ["x", "y"])
    assert given.ids == [5, 2, 5]
    assert empty.blank
    [end_only] = read_sources(SOURCE, SPEC, None, [[2]], ["x"])
    assert not end_only.blank


def test_a_long_source_is_refused_or_cut() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"inputs\[1\] has 7 tokens.* at most 6"
    ) as caught:
        read_sources(SOURCE, SPEC, ["a", "abcdef"], [], ["inputs[0]", "inputs[1]"], [None, None])
    assert caught.value.param == "inputs[1]"
    assert "truncate" in str(caught.value)
    [cut] = read_sources(SOURCE, SPEC, ["abcdef"], [], ["inputs"], [4])
    assert cut.truncated
    assert len(cut.ids) == 4


def test_without_a_tokenizer_text_is_refused_and_names_are_null() -> None:
    with pytest.raises(InvalidRequestError, match="source side does not have"):
        read_sources(NO_TEXT, SPEC, ["a"], [], ["inputs"])
    assert NO_TEXT.name(5) is None
    assert NO_TEXT.tail == []
    assert NO_TEXT.special_ids == frozenset()


def test_ids_outside_the_vocabulary_are_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"x\[1\] must be an id in \[0, 14\), got 14"):
        SOURCE.check([5, 14], "x")


def test_special_ids_add_no_text() -> None:
    assert {WORDS.token(id) for id in TARGET.special_ids} == {"<pad>", "<s>", "</s>", "<unk>"}


def test_an_id_beyond_the_tokenizer_has_no_name() -> None:
    assert Vocabulary("target", 100, WORDS).name(99) is None


def test_open_encoding_leaves_the_end_off() -> None:
    [ids] = TARGET.encode_open(["HH AH"], "targets")
    assert [WORDS.token(id) for id in ids] == ["HH", "AH"]
    assert TARGET.encode_open([""], "targets") == [[]]


def test_a_frame_may_stand_on_both_sides() -> None:
    ids = {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3}
    backend = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s> </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.add_special_tokens(["<s>", "</s>", "<unk>"])
    vocabulary = Vocabulary("source", 4, JsonTokenizer(backend))
    assert (vocabulary.frame, vocabulary.tail) == ([0, 1, 1], [1, 1])
    assert vocabulary.encode_open(["a a"], "targets") == [[0, 3, 3]]
    assert vocabulary.encode_bare(["a a"], "bad_words") == [[3, 3]]
    blank, cut = read_sources(vocabulary, SPEC, ["", "a a a"], [], ["x", "y"], [None, 4])
    assert blank.blank
    assert cut.ids == [0, 3, 1, 1]
