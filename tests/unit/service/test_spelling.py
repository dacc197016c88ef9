"""Tokens become text piece by piece; nothing handed out is taken back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.sequence import Decoding, FinishReason, TokenEvent
from model.sequence import Sequence as Row
from model.tokenizer import Tokenizer, build_tokenizer
from service.spelling import Spelled, Speller, StopStrings
from service.vocabulary import Vocabulary

WORDS = build_tokenizer(["HH AH L OW AE B"], "whitespace")
LETTERS = build_tokenizer(["ab c"], "char")
PIECES = build_tokenizer(["the cat sat on the mat, naïve"] * 20, "sentencepiece", vocab_size=300)
END = 2


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary("target", tokenizer.vocab_size, tokenizer)


def events(ids: Sequence[int], reason: FinishReason = "eos_token") -> list[TokenEvent]:
    row = Row([5], [1], Decoding(len(ids)))
    last = len(ids) - 1
    return [
        TokenEvent(row, i, id, None, (), reason if i == last else None) for i, id in enumerate(ids)
    ]


def spell(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    prefix: Sequence[int] = (),
    stops: Sequence[str] = (),
    reason: FinishReason = "eos_token",
) -> tuple[Speller, list[Spelled]]:
    speller = Speller(vocabulary(tokenizer), prefix, stops)
    return speller, [s for event in events(ids, reason) for s in speller.push(event)]


def texts(spelled: Sequence[Spelled]) -> list[str | None]:
    return [s.text for s in spelled]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    [ids] = tokenizer.encode([text])
    return ids


class TestPieces:
    def test_words_are_spelt_with_their_spaces(self) -> None:
        speller, spelled = spell(WORDS, ids_of(WORDS, "HH AH L OW"))
        assert texts(spelled) == ["HH", " AH", " L", " OW", "</s>"]
        assert [s.special for s in spelled] == [False, False, False, False, True]
        assert speller.text == "HH AH L OW"

    def test_a_prefix_is_spelt_apart_and_keeps_the_space_behind_it(self) -> None:
        ids = ids_of(WORDS, "HH AH L OW")
        speller, spelled = spell(WORDS, ids[2:], prefix=ids[:2])
        assert speller.before == "HH AH"
        assert texts(spelled) == [" L", " OW", "</s>"]

    @pytest.mark.parametrize("text", ["the cat", "naïve 日本語 🙂 mat", "on  the", "🙂"])
    def test_pieces_concatenate_also_across_multi_byte_characters(self, text: str) -> None:
        ids = ids_of(PIECES, text)
        for split in range(len(ids)):
            speller, spelled = spell(PIECES, ids[split:], prefix=ids[:split])
            shown = [s.text or "" for s in spelled if not s.special]
            assert speller.before + "".join(shown) == PIECES.decode(ids)

    def test_an_incomplete_character_waits_and_is_not_lost(self) -> None:
        ids = ids_of(PIECES, "🙂")[:-2]  # without its last byte
        speller = Speller(vocabulary(PIECES), ())
        *inner, last = events([*ids, END])
        released = [s for event in inner for s in speller.push(event)]
        assert "\ufffd" not in "".join(s.text or "" for s in released)
        released += speller.push(last)
        assert [s.event.token for s in released] == [*ids, END]
        assert speller.text == PIECES.decode(ids)
        assert "\ufffd" in speller.text

    def test_an_incomplete_character_waits_behind_a_special_token_too(self) -> None:
        ids = ids_of(PIECES, "🙂")[:-2]
        speller, _ = spell(PIECES, [*ids, 1, END])
        assert speller.text == PIECES.decode(ids)

    def test_ids_that_the_tokenizer_does_not_know_add_nothing(self) -> None:
        ids = ids_of(PIECES, "the cat")[:-1]
        beyond = PIECES.vocab_size + 5
        speller, spelled = spell(PIECES, [beyond, ids[0], beyond, *ids[1:], END], [beyond])
        assert speller.text == "the cat"
        assert len(spelled) == len(ids) + 3

    def test_without_a_tokenizer_there_is_no_text(self) -> None:
        speller = Speller(Vocabulary("target", 10, None), [3])
        assert texts([s for event in events([4, 5]) for s in speller.push(event)]) == [None, None]


class TestStopStrings:
    def test_a_stop_is_cut_off_also_inside_a_token(self) -> None:
        ids = ids_of(WORDS, "HH AH L")[:-1]
        speller, spelled = spell(WORDS, ids, stops=["H L"], reason="stop_sequence")
        assert speller.text == "HH A"
        assert texts(spelled) == ["HH", " A", ""]

    def test_text_that_may_begin_a_stop_waits_until_it_is_certain(self) -> None:
        speller = Speller(vocabulary(LETTERS), (), ["abc"])
        a, b, c = (ids_of(LETTERS, letter)[0] for letter in "abc")
        first, second, third, fourth = events([a, b, a, c])
        assert texts(speller.push(first)) == []
        assert texts(speller.push(second)) == []
        assert texts(speller.push(third)) == ["a", "b"]  # "aba": only the last a may begin it
        assert texts(speller.push(fourth)) == ["a", "c"]

    def test_the_end_lets_go_of_what_waited(self) -> None:
        speller, spelled = spell(LETTERS, ids_of(LETTERS, "ab"), stops=["abc"])
        assert texts(spelled) == ["a", "b", "</s>"]
        assert speller.text == "ab"

    def test_the_first_of_several_stops_counts(self) -> None:
        ids = ids_of(LETTERS, "cab")[:-1]
        speller, _ = spell(LETTERS, ids, stops=["b", "ab"], reason="stop_sequence")
        assert speller.text == "c"

    def test_the_engine_is_told_when_a_stop_is_complete(self) -> None:
        ids = ids_of(WORDS, "HH AH L OW")
        stop = StopStrings(vocabulary(WORDS), ids[:1], ["H L"])
        assert [stop(ids[1:n]) for n in range(2, 5)] == [False, True, True]

    def test_a_stop_in_the_prefix_does_not_count(self) -> None:
        ids = ids_of(WORDS, "HH AH L OW")
        assert not StopStrings(vocabulary(WORDS), ids[:2], ["HH"])(ids[2:])

    @pytest.mark.parametrize("stop", ["🙂", " s", "日本", "t t"])
    def test_a_stop_is_found_at_the_end_of_a_long_text_too(self, stop: str) -> None:
        ids = ids_of(PIECES, "the cat on the mat, naïve " * 20 + f"é{stop}, mat")[:-1]
        told = StopStrings(vocabulary(PIECES), (), [stop])
        for n in range(1, len(ids) + 1):
            whole = stop in PIECES.decode(ids[:n])
            assert told(ids[:n]) == whole
            if whole:
                return
        pytest.fail("the stop never came")

    def test_a_stop_that_the_prefix_begins_within_a_character_is_found(self) -> None:
        *prefix, last_byte = ids_of(PIECES, "🙂")[:-1]
        assert StopStrings(vocabulary(PIECES), prefix, ["🙂"])([last_byte])
        speller, _ = spell(PIECES, [last_byte], prefix, ["🙂"], "stop_sequence")
        assert speller.text == ""

    @settings(max_examples=300)
    @given(
        text=st.text("ab c", min_size=1, max_size=20),
        stops=st.lists(st.text("ab c", min_size=1, max_size=4), min_size=1, max_size=3),
    )
    def test_what_is_handed_out_is_the_text_before_the_first_stop(
        self, text: str, stops: list[str]
    ) -> None:
        ids = ids_of(LETTERS, text)[:-1]
        told = StopStrings(vocabulary(LETTERS), (), stops)
        length = next((n for n in range(1, len(ids) + 1) if told(ids[:n])), len(ids))
        stopped = told(ids[:length])
        speller = Speller(vocabulary(LETTERS), (), stops)
        seen = ""
        whole = LETTERS.decode(ids[:length])
        cut = min((whole.find(stop) for stop in stops if stop in whole), default=len(whole))
        for event in events(ids[:length], "stop_sequence" if stopped else "length"):
            seen += "".join(s.text or "" for s in speller.push(event))
            assert whole[:cut].startswith(seen), "never more than may be kept"
        assert seen == speller.text == whole[:cut]
