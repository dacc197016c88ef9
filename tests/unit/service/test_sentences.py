"""Sentences: where texts are cut, and that nothing of them is lost."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.sentences import SplitText, split

MARKS = "aBé7日🙂.!?…。！,;、，\"')(“”「」«»-– \n\t\u00a0\u2028"
PIECES = st.sampled_from([*MARKS, "  ", "\r\n", "Dr.", "e.g.", "word", "Word", "..."])
TEXTS = st.lists(PIECES, max_size=40).map("".join) | st.text(max_size=60)


@given(TEXTS)
@example("")
@example(" \n ")
@example("A. B")
@example("これは。テスト！ はい")
def test_sentences_join_to_the_text_they_came_from(text: str) -> None:
    found = split(text)
    assert found.join(found.sentences) == text
    assert len(found.gaps) == len(found.sentences) + 1
    assert all(sentence and sentence == sentence.strip() for sentence in found.sentences)
    assert not any(gap.strip() for gap in found.gaps)


@given(TEXTS, st.integers(1, 12))
def test_shorter_sentences_join_to_the_same_text(text: str, most: int) -> None:
    found = split(text).shortened(lambda sentences: [len(s) > most for s in sentences])
    assert found.join(found.sentences) == text
    for sentence in found.sentences:
        assert sentence == sentence.strip()
        assert len(sentence) <= most or not any(c.isspace() for c in sentence)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Hello there. How are you? Fine!", ["Hello there.", "How are you?", "Fine!"]),
        ("One\ntwo\r\n\r\nThree.", ["One", "two", "Three."]),
        ('He said "Go." Then he left.', ['He said "Go."', "Then he left."]),
        ("She asked (why?) and left.", ["She asked (why?) and left."]),
        ("Wait... What? No.", ["Wait...", "What?", "No."]),
        ("Dr. Smith met Mr. J. Doe.", ["Dr. Smith met Mr. J. Doe."]),
        ("Fruit, e.g. Apples, from the U.S. Army.", ["Fruit, e.g. Apples, from the U.S. Army."]),
        ("Am 3. Mai kam er. Er ging.", ["Am 3. Mai kam er.", "Er ging."]),
        ("In 2019. Later.", ["In 2019.", "Later."]),
        ("See p. 3 and 3.5 of it.", ["See p. 3 and 3.5 of it."]),
        ("Ça va. «Oui.» Élan. ¿Qué? Él.", ["Ça va.", "«Oui.»", "Élan.", "¿Qué?", "Él."]),
        ("これは。「はい。」いいえ！", ["これは。", "「はい。」", "いいえ！"]),
        ("यह है। वह है।", ["यह है।", "वह है।"]),
        ("مرحبا؟ نعم. لا", ["مرحبا؟", "نعم.", "لا"]),
        ("example.com and a.b. are names", ["example.com and a.b. are names"]),
        ("", []),
        (" \n\t ", []),
    ],
)
def test_sentences_end_where_a_reader_would_say(text: str, sentences: list[str]) -> None:
    assert list(split(text).sentences) == sentences


def test_white_space_stays_where_it_was() -> None:
    found = split("  One.  Two.\n\n\tThree. ")
    assert found.join(["1", "2", "3"]) == "  1  2\n\n\t3 "


def test_sentences_of_a_script_without_spaces_may_get_some() -> None:
    found = split("これは。はい。 いいえ。")
    assert found.join(["A.", "B.", "C."]) == "A.B. C."
    assert found.join(["A.", "B.", "C."], between=" ") == "A. B. C."


def test_a_long_sentence_is_cut_at_a_clause_before_it_is_cut_between_words() -> None:
    def cut(text: str, most: int) -> list[str]:
        found = split(text).shortened(lambda sentences: [len(s) > most for s in sentences])
        return list(found.sentences)

    assert cut("when it rains, we stay at home", 20) == ["when it rains,", "we stay at home"]
    assert cut("we stay at home tonight", 15) == ["we stay at home", "tonight"]
    assert cut("雨が降ると、家にいる", 6) == ["雨が降ると、", "家にいる"]
    assert cut("Short. " + "x" * 30, 10) == ["Short.", "x" * 30]


def test_as_many_sentences_as_there_were_are_needed() -> None:
    with pytest.raises(ValueError, match="shorter"):
        split("One. Two.").join(["1"])
    assert SplitText((), (" ",)).join([]) == " "
