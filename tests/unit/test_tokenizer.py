"""Texts to ids and back; pieces of a growing text; specials that a text cannot forge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from model.tokenizer import (
    SPECIAL_TOKENS,
    AddedTokens,
    Granularity,
    IncrementalDetokenizer,
    JsonTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    build_tokenizer,
    load_tokenizer,
)

PAD, BOS, EOS, UNK = range(4)
CORPUS = ["the quick brown fox", "über café naïve", "hello world", "don't panic", "a b c d e"] * 20
PIECES = build_tokenizer(CORPUS, "sentencepiece", vocab_size=330)
LETTERS = build_tokenizer(CORPUS, "char")
WORDS = build_tokenizer(CORPUS, "whitespace")


def names(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token(id) for id in tokenizer.encode([text])[0]]


def round_trip(tokenizer: Tokenizer, text: str) -> str:
    return tokenizer.decode(tokenizer.encode([text])[0])


# --- round trips -------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [PIECES, LETTERS, WORDS], ids=["pieces", "letters", "words"])
def test_texts_of_the_corpus_come_back(tokenizer: Tokenizer) -> None:
    for text in set(CORPUS):
        assert round_trip(tokenizer, text) == text
    ids = tokenizer.encode(list(CORPUS))
    assert all(row[-1] == EOS for row in ids)
    assert all(id > UNK for row in ids for id in row[:-1])


@pytest.mark.parametrize("granularity", ["char", "whitespace", "sentencepiece"])
def test_a_saved_tokenizer_is_the_same_tokenizer(tmp_path: Path, granularity: Granularity) -> None:
    tokenizer = build_tokenizer(CORPUS, granularity, fold=True, vocab_size=330)
    tokenizer.save(tmp_path / f"source_tokenizer{tokenizer.suffix}")
    loaded = load_tokenizer(tmp_path, "source")
    assert loaded is not None
    assert load_tokenizer(tmp_path, "target") is None
    assert loaded.vocab_size == tokenizer.vocab_size
    texts = ["Hello WORLD", "naïve café", "zebra", "</s>", ""]
    assert loaded.encode(texts) == tokenizer.encode(texts)
    assert loaded.decode(loaded.encode(texts)[0]) == "hello world"


def test_added_tokens_are_found_longest_first() -> None:
    added = AddedTokens(ids={"<a>": 90, "<a>b": 91, ".": 92}, special={"<s>": 93})
    assert added.encode("x<a>b <a>.", lambda text: [len(text)]) == [1, 91, 1, 90, 92]
    assert added.encode("<s>", lambda text: [len(text)]) == [3]
    assert added.encode("", lambda text: [len(text)]) == []
    assert AddedTokens().encode("", lambda text: [len(text)]) == [0]
    assert added.names == {90: "<a>", 91: "<a>b", 92: ".", 93: "<s>"}


def test_the_vocabulary_is_what_occurs_after_the_special_tokens() -> None:
    tokenizer = build_tokenizer(["ba", "ca"], "char")
    assert [tokenizer.token(id) for id in range(tokenizer.vocab_size)] == [*SPECIAL_TOKENS, *"abc"]
    assert tokenizer.encode(["abc", ""]) == [[4, 5, 6, EOS], [EOS]]


def test_words_are_what_lies_between_white_space() -> None:
    assert names(WORDS, " the\tfox \n don't ") == ["the", "fox", "don't", "</s>"]
    assert WORDS.decode(WORDS.encode(["the\tfox"])[0]) == "the fox"


def test_spaces_are_letters() -> None:
    assert names(LETTERS, "a b") == ["a", " ", "b", "</s>"]


@given(st.text(alphabet=sorted({c for text in CORPUS for c in text}), max_size=30))
def test_any_text_of_known_letters_comes_back(text: str) -> None:
    assert round_trip(LETTERS, text) == text


@given(st.lists(st.sampled_from(sorted({w for text in CORPUS for w in text.split()}))))
def test_any_text_of_known_words_comes_back(words: list[str]) -> None:
    assert round_trip(WORDS, " ".join(words)) == " ".join(words)


@given(st.text(st.characters(codec="utf-8", categories=["L", "N"], max_codepoint=0x2FF)))
def test_pieces_fall_back_to_bytes_and_lose_no_letter(text: str) -> None:
    tokenizer = PIECES
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert round_trip(tokenizer, text) == tokenizer.backend.normalize(text).removeprefix("▁")
    assert UNK not in tokenizer.encode([text])[0]


@pytest.mark.parametrize("text", ["emoji 🙂 here", "日本語", "zażółć", "😀😀"])
def test_unseen_characters_come_back_through_bytes(text: str) -> None:
    assert round_trip(PIECES, text) == text


# --- folding -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("CAFÉ", "cafe"),
        ("cafe\u0301", "cafe"),  # a combining accent
        ("naïve", "naive"),
        ("O’Brien", "o'brien"),
        ("‘tis", "'tis"),
        ("co‐op", "co-op"),  # a hyphen
        ("co‑op", "co-op"),  # one that forbids a line break
        ("ﬁsh", "fish"),  # a ligature
        ("Ａbc", "abc"),  # full width
    ],
)
def test_folding_writes_plain_small_letters(text: str, folded: str) -> None:
    tokenizer = build_tokenizer(["abcdefghijklmnopqrstuvwxyz'-"], "char", fold=True)
    assert round_trip(tokenizer, text) == folded
    assert UNK not in tokenizer.encode([text])[0]


def test_folding_joins_what_was_learned_without_hyphens_and_spaces() -> None:
    words = build_tokenizer(["newyork", "coop"], "char", fold=True)
    assert round_trip(words, "New York") == "newyork"
    assert round_trip(words, " co‐op ") == "coop"
    phrases = build_tokenizer(["new york", "co-op"], "char", fold=True)
    assert round_trip(phrases, "New York") == "new york"
    assert round_trip(phrases, "co‐op") == "co-op"
    assert UNK in build_tokenizer(["newyork"], "char").encode(["new york"])[0]


def test_folding_decides_the_vocabulary_too() -> None:
    tokenizer = build_tokenizer(["É’E", "e'"], "char", fold=True)
    assert tokenizer.vocab_size == len(SPECIAL_TOKENS) + 2


def test_without_folding_case_and_accents_count() -> None:
    tokenizer = build_tokenizer(["aé"], "char")
    assert names(tokenizer, "Aae\u0301e") == ["<unk>", "a", "é", "<unk>", "</s>"]


# --- special tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [PIECES, LETTERS, WORDS], ids=["pieces", "letters", "words"])
@pytest.mark.parametrize("special", SPECIAL_TOKENS)
@pytest.mark.parametrize("text", ["{}", "a {} b", "a{}b", "{0} {0}"])
def test_a_special_tokens_name_in_a_text_is_text(
    tokenizer: Tokenizer, special: str, text: str
) -> None:
    (ids,) = tokenizer.encode([text.format(special)])
    assert ids[-1] == EOS
    assert not {PAD, BOS, EOS} & set(ids[:-1])
    if tokenizer is PIECES:
        assert tokenizer.decode(ids) == text.format(special)


@pytest.mark.parametrize("granularity", ["char", "whitespace", "sentencepiece"])
def test_special_names_in_the_data_move_no_special_id(granularity: Granularity) -> None:
    corpus = [*CORPUS, *(f"a {special} b" for special in SPECIAL_TOKENS)]
    tokenizer = build_tokenizer(corpus, granularity, vocab_size=330)
    assert [tokenizer.token(id) for id in range(4)] == list(SPECIAL_TOKENS)
    assert tokenizer.encode(["a b"])[0].count(EOS) == 1
    everything = [tokenizer.token(id) for id in range(tokenizer.vocab_size)]
    assert len(set(everything)) == tokenizer.vocab_size


@pytest.mark.parametrize("tokenizer", [PIECES, LETTERS, WORDS], ids=["pieces", "letters", "words"])
def test_decoding_leaves_special_tokens_out(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode(["hello world"])
    assert tokenizer.decode([BOS, *ids, PAD, PAD]) == "hello world"
    assert tokenizer.decode([PAD, BOS, EOS]) == ""
    assert tokenizer.decode([]) == ""


def test_unknown_pieces_become_unk() -> None:
    assert names(LETTERS, "aZ日") == ["a", "<unk>", "<unk>", "</s>"]
    assert names(WORDS, "the cat") == ["the", "<unk>", "</s>"]


@pytest.mark.parametrize("tokenizer", [PIECES, LETTERS, WORDS], ids=["pieces", "letters", "words"])
def test_ids_beyond_the_vocabulary_have_no_name(tokenizer: Tokenizer) -> None:
    for id in (tokenizer.vocab_size, 10**6):
        with pytest.raises(KeyError, match="not in the vocabulary"):
            tokenizer.token(id)


def test_a_file_that_asks_to_cut_and_pad_does_neither(tmp_path: Path) -> None:
    assert isinstance(LETTERS, JsonTokenizer)
    backend = tokenizers.Tokenizer.from_str(LETTERS.backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=12)
    backend.save(str(tmp_path / "source_tokenizer.json"))
    loaded = load_tokenizer(tmp_path, "source")
    assert loaded is not None
    assert [len(ids) for ids in loaded.encode(["abcde", "a"])] == [6, 2]


@pytest.mark.parametrize("suffix", [".json", ".spm"])
@pytest.mark.parametrize("content", [b"", b"{}", b"\x00nonsense"])
def test_a_broken_file_is_named(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"target_tokenizer{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=path.name):
        load_tokenizer(tmp_path, "target")


# --- growing texts -----------------------------------------------------------------------------


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    growing = IncrementalDetokenizer(tokenizer)
    return [*(growing.push(id) for id in ids), growing.finish()]


def test_words_bring_the_space_before_them() -> None:
    ids = WORDS.encode(["the quick fox"])[0]
    assert pieces(WORDS, ids) == ["the", " quick", " fox", "", ""]


def test_special_tokens_in_between_bring_no_text() -> None:
    the, fox = (WORDS.encode([word])[0][0] for word in ("the", "fox"))
    assert pieces(WORDS, [BOS, the, UNK, PAD, fox, EOS]) == ["", "the", "", "", " fox", "", ""]


def test_a_character_of_several_bytes_appears_whole() -> None:
    assert isinstance(PIECES, SentencePieceTokenizer)
    backend = PIECES.backend
    ids = [backend.piece_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    assert pieces(PIECES, [*ids, *ids]) == ["", "", "", "🙂", "", "", "", "🙂", ""]


def test_a_character_cut_short_is_told_at_the_end() -> None:
    assert isinstance(PIECES, SentencePieceTokenizer)
    backend = PIECES.backend
    ids = [backend.piece_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()[:2]]
    found = pieces(PIECES, ids)
    assert found[:2] == ["", ""]
    assert found[2] == PIECES.decode(ids)
    assert set(found[2]) == {"\ufffd"}


def test_spaces_in_a_row_are_all_told() -> None:
    assert isinstance(PIECES, SentencePieceTokenizer)
    a, space = (PIECES.backend.piece_to_id(piece) for piece in "a▁")
    assert pieces(PIECES, [a, space, space, a, space]) == ["a", " ", " ", "a", " ", ""]


@given(st.lists(st.integers(0, PIECES.vocab_size - 1), max_size=24))
def test_pieces_of_any_ids_add_up_to_their_text(ids: list[int]) -> None:
    assert "".join(pieces(PIECES, ids)) == PIECES.decode(ids)


BYTES = [id for id in range(PIECES.vocab_size) if PIECES.token(id).startswith("<0x")]
SPACED = [id for id in range(PIECES.vocab_size) if PIECES.token(id).startswith("▁")]


@given(st.lists(st.sampled_from([*BYTES, *SPACED, PAD, BOS, EOS, UNK]), max_size=24))
def test_pieces_of_bytes_spaces_and_specials_add_up_to_their_text(ids: list[int]) -> None:
    assert "".join(pieces(PIECES, ids)) == PIECES.decode(ids)


@given(st.text(max_size=20))
def test_pieces_of_any_encoded_text_add_up_to_it(text: str) -> None:
    (ids,) = PIECES.encode([text])
    assert "".join(pieces(PIECES, ids)) == PIECES.decode(ids)


@given(st.lists(st.integers(0, WORDS.vocab_size - 1), max_size=12))
def test_pieces_of_any_words_add_up_to_their_text(ids: list[int]) -> None:
    assert "".join(pieces(WORDS, ids)) == WORDS.decode(ids)


@given(st.lists(st.integers(0, LETTERS.vocab_size - 1), max_size=12))
def test_pieces_of_any_letters_add_up_to_their_text(ids: list[int]) -> None:
    assert "".join(pieces(LETTERS, ids)) == LETTERS.decode(ids)
