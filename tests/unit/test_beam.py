"""Beam search: by hand, in the engine beside others, as a stream."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from model.beam import BeamSearch, Told, common_prefix
from model.config import EngineConfig
from model.engine import Engine, StepTrace
from model.faults import GenerationError
from model.loader import LoadedModel, load_model
from model.sampler import Scores
from model.sequence import (
    Decoding,
    Event,
    FailureEvent,
    FinishReason,
    Forward,
    Hypothesis,
    TokenEvent,
)
from model.sequence import Sequence as Row
from model.step import ALL_BANNED
from model.steppers import CachedStepper
from tests.builders import make_native_model

A, B, EOS = 0, 1, 2


# --- by hand -------------------------------------------------------------------------------------

PROBABILITIES = {
    "": [0.5, 0.4, 0.1],
    "a": [0.1, 0.3, 0.6],
    "b": [0.06, 0.04, 0.9],
    "aa": [0.5, 0.3, 0.2],
    "ab": [0.06, 0.04, 0.9],
    "aaa": [0.2, 0.3, 0.5],
    "aab": [0.04, 0.06, 0.9],
}
"""Of a, b and `</s>`, given what was said: all that a search of width 2 visits."""


def search(width: int, limit: int = 4, **decoding: Any) -> BeamSearch:
    def finish_reason(row: Row) -> FinishReason | None:
        if row.tokens[-1] == EOS:
            return "eos_token"
        return "length" if len(row.tokens) >= limit else None

    asked = Decoding(limit, num_beams=width, **decoding)
    return BeamSearch(Row([4], [3], asked), finish_reason)


def spell(tokens: Sequence[int]) -> str:
    return "".join("ab."[token] for token in tokens)


def advance(found: BeamSearch) -> list[int]:
    rows = [PROBABILITIES.get(spell(row.tokens), [1e-9, 1e-9, 1.0]) for row in found.rows]
    return step(found, torch.tensor(rows).log(), lambda beam, token: Told((float(token),)))


def step(
    found: BeamSearch,
    scores: Tensor,
    tell: Callable[[int, int], Told] = lambda beam, token: Told(),
) -> list[int]:
    """With the hypotheses in the last rows of a step, in reverse order."""
    rows = torch.cat([torch.full((3, scores.shape[-1]), torch.nan), scores.flip(0)])
    return found.advance(Scores(rows), [*range(len(rows) - 1, 2, -1)], tell)


def said(found: BeamSearch) -> list[str]:
    return [spell(row.tokens) for row in found.rows]


def answers(found: BeamSearch) -> list[tuple[str, float]]:
    return [(spell(h.tokens), h.score) for h in found.hypotheses()]


def approx(expected: list[tuple[str, float]]) -> list[tuple[str, Any]]:
    return [(text, pytest.approx(score, abs=1e-6)) for text, score in expected]


class TestByHand:
    def test_an_end_that_is_not_among_the_best_is_dropped(self) -> None:
        found = search(width=2)
        assert not found.over
        assert advance(found) == [0, 0]  # a 0.5, b 0.4, and </s> 0.1 in the third place
        assert said(found) == ["a", "b"]
        assert found.hypotheses() == ()
        assert not found.over

    @pytest.mark.parametrize("early_stopping", [True, False])
    def test_it_ends_when_nothing_better_is_likely(self, early_stopping: bool) -> None:
        found = search(width=2, early_stopping=early_stopping)
        advance(found)
        assert advance(found) == [0, 0]  # b. 0.36, a. 0.30, ab 0.15, aa 0.05
        assert said(found) == ["ab", "aa"]
        assert found.over  # False: log(0.15) / 2 is below log(0.30) / 2
        assert answers(found) == approx([("b.", math.log(0.36) / 2), ("a.", math.log(0.30) / 2)])
        assert found.hypotheses()[0].logprobs == (float(B), float(EOS))

    def test_every_step_is_told_where_asked_for(self) -> None:
        found = search(width=2, beam_steps=True, early_stopping="never")
        while not found.over:
            advance(found)
        steps = [
            [(b.parent, "ab."[b.token], b.score, b.logprob, b.finished) for b in step]
            for step in found.steps
        ]
        one, two, three = (
            [
                (
                    parent,
                    token,
                    pytest.approx(math.log(p) / length),
                    float("ab.".index(token)),
                    done,
                )
                for parent, token, p, done in expected
            ]
            for length, expected in (
                (1, [(0, "a", 0.5, False), (0, "b", 0.4, False)]),
                (
                    2,
                    [
                        (0, "b", 0.15, False),
                        (0, "a", 0.05, False),
                        (1, ".", 0.36, True),
                        (0, ".", 0.3, True),
                    ],
                ),
                (3, [(1, "a", 0.025, False), (1, "b", 0.015, False), (0, ".", 0.135, True)]),
            )
        )
        assert steps == [one, two, three]
        assert not search(width=2).steps

    def test_never_goes_on_while_the_longest_could_still_win(self) -> None:
        found = search(width=2, early_stopping="never")
        advance(found)
        advance(found)
        assert not found.over  # log(0.15) / 4 is above log(0.30) / 2
        assert advance(found) == [1, 1]  # ab. 0.135 ends, aaa 0.025 and aab 0.015 live on
        assert found.over  # log(0.025) / 4 is below
        assert answers(found) == approx([("b.", math.log(0.36) / 2), ("a.", math.log(0.30) / 2)])

    def test_never_without_a_length_penalty_needs_no_patience(self) -> None:
        found = search(width=2, early_stopping="never", length_penalty=0.0)
        advance(found)
        advance(found)
        assert found.over  # sums only fall
        assert answers(found) == approx([("b.", math.log(0.36)), ("a.", math.log(0.30))])

    def test_a_length_penalty_above_one_favours_the_longer(self) -> None:
        found = search(width=2, early_stopping="never", length_penalty=2.0)
        steps = 0
        while not found.over:
            advance(found)
            steps += 1
        assert steps == 4  # up to the length that could have won
        assert answers(found) == approx([("ab.", math.log(0.135) / 9), ("b.", math.log(0.36) / 4)])

    @pytest.mark.parametrize("length_penalty", [-10.0, -30.0])
    @pytest.mark.parametrize("early_stopping", [False, "never"])
    def test_scores_of_any_size_are_scores(
        self, length_penalty: float, early_stopping: bool
    ) -> None:
        found = search(2, limit=9, length_penalty=length_penalty, early_stopping=early_stopping)
        while not found.over:  # a and b alone, so that all end at the limit
            scores = torch.tensor([[-3.0, -4.0, -math.inf]] * 2)
            step(found, scores)
        best, second = answers(found)
        assert (best[0], second[0][:8]) == ("a" * 9, "a" * 8)
        assert best[1] < -1e9
        assert math.isfinite(best[1])

    def test_the_length_limit_ends_all_that_lives(self) -> None:
        found = search(width=2, limit=1)
        advance(found)
        assert found.over
        assert answers(found) == approx([("a", math.log(0.5)), ("b", math.log(0.4))])
        assert {h.finish_reason for h in found.hypotheses()} == {"length"}

    def test_where_fewer_hypotheses_exist_than_beams_none_is_made_up(self) -> None:
        found = search(width=3)
        only_the_end = torch.tensor([[-torch.inf, -torch.inf, math.log(0.7)]] * 3)
        step(found, only_the_end)
        assert found.over
        assert answers(found) == approx([(".", math.log(0.7))])

    def test_where_everything_is_banned_nothing_is_found(self) -> None:
        found = search(width=2)
        step(found, torch.full((2, 3), -torch.inf))
        assert found.over
        assert found.hypotheses() == ()

    def test_agreed_is_what_live_and_finished_share_but_for_a_last_token(self) -> None:
        found = search(width=2, early_stopping="never", length_penalty=4.0)
        step(found, torch.tensor([[0.9, 0.06, 0.04], [0.9, 0.06, 0.04]]).log())
        assert said(found) == ["a", "b"]
        assert found.agreed == 0
        rows = torch.tensor([[0.6, 0.1, 0.3], [1 / 3, 1 / 3, 1 / 3]]).log()
        step(found, rows)  # aa 0.54, a. 0.27, ab 0.09
        assert said(found) == ["aa", "ab"]
        assert answers(found)[0][0] == "a."
        assert found.agreed == 1


@pytest.mark.parametrize(
    ("sequences", "length"),
    [([(1, 2, 3)], 3), ([(1, 2), (1, 2, 4), (1, 2, 3)], 2), ([(1,), (2,)], 0), ([(), (1,)], 0)],
)
def test_common_prefix(sequences: list[tuple[int, ...]], length: int) -> None:
    assert common_prefix(sequences) == length


# --- in the engine -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_native_model(tmp_path_factory.mktemp("native")), device="cpu")


def run(engine: Engine, rows: Sequence[Row]) -> dict[Row, list[Event]]:
    for row in rows:
        engine.submit(row)
    events: dict[Row, list[Event]] = defaultdict(list)
    for event in engine.run():
        events[event.work if isinstance(event, FailureEvent) else event.sequence].append(event)  # type: ignore[index, union-attr]
    return events


def fresh(row: Row) -> Row:
    return Row(list(row.src), list(row.prefix), row.decoding)


def outcome(events: Sequence[Event]) -> Any:
    """All that was answered: tokens, and a beam search's hypotheses without their scores."""
    if isinstance(events[-1], FailureEvent):
        return type(events[-1].error)
    tokens = [event.token for event in events if isinstance(event, TokenEvent)]
    assert isinstance(events[-1], TokenEvent)
    return tokens, events[-1].finish_reason, [h.tokens for h in events[-1].hypotheses]


def outcome_alone(model: LoadedModel, row: Row) -> Any:
    alone = fresh(row)
    return outcome(run(Engine(model, EngineConfig()), [alone])[alone])


def hypotheses_of(events: Sequence[Event]) -> tuple[Hypothesis, ...]:
    last = events[-1]
    assert isinstance(last, TokenEvent)
    return last.hypotheses


def some_row(rng: random.Random, model: LoadedModel, **asked: Any) -> Row:
    """A request with parameters of all kinds; sampled, greedy or searched for."""
    vocab = model.spec.tgt_vocab_size

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(4, vocab) for _ in range(rng.randint(1, most)))

    choices: dict[str, Any] = {
        "repetition_penalty": rng.uniform(0.8, 2.0),
        "frequency_penalty": rng.uniform(-1.0, 2.0),
        "presence_penalty": rng.uniform(-1.0, 2.0),
        "no_repeat_ngram_size": rng.randint(1, 3),
        "encoder_no_repeat_ngram_size": rng.randint(1, 3),
        "bad_words": tuple(tokens(2) for _ in range(5)),
        "logit_bias": tuple((token, rng.uniform(-3, 3)) for token in set(tokens(6))),
        "min_new_tokens": rng.randint(1, 6),
        "forced_bos_token_id": rng.randrange(4, vocab),
        "forced_eos_token_id": 2,
        "top_n_tokens": rng.randint(1, 3),
    }
    settings = {name: value for name, value in choices.items() if rng.random() < 0.2}
    kind = rng.choice(["greedy", "sample", "beams"])
    if kind == "sample":
        settings |= {"sample": True, "seed": rng.randrange(2**53), "top_k": rng.choice([0, 8])}
        settings |= {"temperature": rng.uniform(0.5, 2.0), "top_p": rng.choice([0.9, 1.0])}
        settings |= {"min_p": rng.choice([0.0, 0.1]), "typical_p": rng.choice([0.8, 1.0])}
    if kind == "beams":
        settings |= {"num_beams": rng.randint(2, 6), "length_penalty": rng.uniform(-1, 2)}
        settings |= {"early_stopping": rng.choice([True, False, "never"])}
    settings |= {"max_new_tokens": rng.randint(6, 20), "logprobs": rng.random() < 0.3}
    src = [rng.randrange(4, model.spec.src_vocab_size) for _ in range(rng.randint(0, 14))] + [2]
    prefix = [rng.randrange(4, vocab) for _ in range(rng.choice([0, 0, 1, 4]))]
    return Row(src, [1, *prefix], Decoding(**(settings | asked)))


def test_a_mixed_load_gives_the_same_tokens_as_one_request_at_a_time(model: LoadedModel) -> None:
    rng = random.Random(0)
    rows = [some_row(rng, model) for _ in range(200)]
    expected = [outcome_alone(model, row) for row in rows]
    assert len({str(said) for said in expected}) > 150, "outputs must vary"
    engine = Engine(model, EngineConfig(max_rows=24))
    waiting, events = list(rows), defaultdict(list)
    while waiting or engine.has_work:
        for _ in range(rng.randint(0, 6)):
            if waiting:
                engine.submit(waiting.pop(rng.randrange(len(waiting))))
        for event in engine.step():
            owner = event.work if isinstance(event, FailureEvent) else event.sequence  # type: ignore[union-attr]
            events[owner].append(event)
    assert [outcome(events[row]) for row in rows] == expected


class TestRows:
    def test_a_search_takes_num_beams_rows_and_frees_them_at_once(self, model: LoadedModel) -> None:
        traces: list[StepTrace] = []
        engine = Engine(model, EngineConfig(), traces.append)
        searches = [Row([n, 8, 2], [1], Decoding(12, num_beams=n)) for n in (2, 5, 8)]
        greedy = Row([9, 2], [1], Decoding(12))
        for row in (*searches, greedy):
            engine.submit(row)
        live = {row: max(1, row.decoding.num_beams) for row in (*searches, greedy)}
        while engine.has_work:
            before = engine.running
            events = engine.step()
            assert len(traces[-1].rows) == sum(live.values())
            for event in events:
                assert isinstance(event, TokenEvent)
                if event.finish_reason:
                    assert event.sequence in traces[-1].left
                    del live[event.sequence]
            assert engine.running == sum(live.values())
            assert before in (0, len(traces[-1].rows))
        assert traces[0].joined == (*searches, greedy)

    def test_the_beams_of_a_search_share_one_encoded_source(self, model: LoadedModel) -> None:
        engine = Engine(model, EngineConfig())
        stepper = engine.stepper
        assert isinstance(stepper, CachedStepper)
        engine.submit(Row([7, 8, 9, 2], [1], Decoding(10, num_beams=6)))
        for _ in range(3):
            engine.step()
            assert stepper.sources.pool.rows == 1
            assert stepper.targets.pool.rows == 6

    def test_a_search_that_is_cancelled_frees_its_rows_at_once(self, model: LoadedModel) -> None:
        others = [Row([n, 2], [1], Decoding(10, num_beams=b)) for n, b in ((5, 1), (6, 3))]
        expected = [outcome_alone(model, row) for row in others]
        engine = Engine(model, EngineConfig())
        gone = Row([7, 2], [1], Decoding(10, num_beams=4))
        events: dict[Row, list[Event]] = defaultdict(list)
        for row in (others[0], gone, others[1]):
            engine.submit(row)
        for _ in range(3):
            for event in engine.step():
                events[event.sequence].append(event)  # type: ignore[union-attr]
        assert engine.running == 8
        engine.cancel(gone)
        assert engine.running == 4
        for event in engine.run():
            assert isinstance(event, TokenEvent)
            assert event.sequence is not gone
            events[event.sequence].append(event)
        assert [outcome(events[row]) for row in others] == expected

    def test_a_search_wider_than_the_engine_is_refused(self, model: LoadedModel) -> None:
        engine = Engine(model, EngineConfig(max_rows=4))
        with pytest.raises(ValueError, match="num_beams must be at most 4 \\(max_rows\\), got 5"):
            engine.submit(Row([5, 2], [1], Decoding(3, num_beams=5)))

    def test_a_search_waits_until_all_its_rows_are_free(self, model: LoadedModel) -> None:
        traces: list[StepTrace] = []
        engine = Engine(model, EngineConfig(max_rows=5), traces.append)
        rows = [Row([n, 2], [1], Decoding(6, num_beams=b)) for n, b in ((5, 3), (6, 3), (7, 1))]
        expected = [outcome_alone(model, row) for row in rows]
        events = run(engine, rows)
        assert [outcome(events[row]) for row in rows] == expected
        assert max(len(trace.rows) for trace in traces) <= 5


class TestFaults:
    def test_not_a_number_in_one_beam_ends_only_its_search(
        self, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = [Row([n, 9, 2], [1], Decoding(8, num_beams=b)) for n, b in ((5, 3), (6, 4), (7, 1))]
        expected = [outcome_alone(model, row) for row in rows]
        engine = Engine(model, EngineConfig())
        original = engine.stepper.step

        def poisoned(live: Sequence[Row], first: int = 0) -> Tensor:
            logits = original(live, first)
            sick = [i for i, row in enumerate(live) if row.src[0] == 6 and len(row.tokens) == 2]
            if sick:
                logits[sick[-1], 3] = torch.nan
            return logits

        monkeypatch.setattr(engine.stepper, "step", poisoned)
        events = run(engine, rows)
        assert outcome(events[rows[1]]) is GenerationError
        assert [outcome(events[row]) for row in (rows[0], rows[2])] == [expected[0], expected[2]]

    def test_a_vocabulary_that_is_banned_whole_is_an_error_of_its_own(
        self, model: LoadedModel
    ) -> None:
        everything = tuple((token,) for token in range(model.spec.tgt_vocab_size))
        early: dict[str, Any] = {"bad_words": everything, "min_new_tokens": 3}
        rows = [
            Row([5, 9, 2], [1], Decoding(8, num_beams=3)),
            Row([6, 9, 2], [1], Decoding(8, num_beams=3, **early)),
            Row([7, 9, 2], [1], Decoding(8, **early)),
            Row([8, 9, 2], [1], Decoding(8, sample=True, **early)),
            Row([5, 9, 2], [1], Decoding(8, sample=True, seed=3)),
        ]
        events = run(Engine(model, EngineConfig()), rows)
        for row in rows[1:4]:
            [failure] = events[row]
            assert isinstance(failure, FailureEvent)
            assert str(failure.error) == ALL_BANNED
        for row in (rows[0], rows[4]):
            assert outcome(events[row]) == outcome_alone(model, row)

    def test_a_search_that_cannot_join_leaves_the_others_alone(self, model: LoadedModel) -> None:
        live = Row([5, 6, 2], [1], Decoding(10, num_beams=3))
        expected = outcome_alone(model, live)
        engine = Engine(model, EngineConfig())
        engine.submit(live)
        events = list(engine.step())
        sick = Row([10_000, 2], [1], Decoding(5, num_beams=4))
        engine.submit(sick)
        failures = [e for e in engine.step() if isinstance(e, FailureEvent) or events.append(e)]
        assert [failure.work for failure in failures] == [sick]  # type: ignore[union-attr]
        assert engine.running == 3
        events.extend(engine.run())
        assert outcome(events) == expected

    def test_a_step_that_fails_fails_the_search_once(
        self, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(live: Sequence[Row], first: int = 0) -> Tensor:
            raise RuntimeError("broken")

        engine = Engine(model, EngineConfig())
        row = Row([5, 2], [1], Decoding(6, num_beams=4))
        engine.submit(row)
        with monkeypatch.context() as patch:
            patch.setattr(engine.stepper, "step", broken)
            [failure] = engine.step()
        assert isinstance(failure, FailureEvent)
        assert failure.work is row
        assert not engine.has_work
        after = fresh(row)
        assert outcome(run(engine, [after])[after]) == outcome_alone(model, row)


class TestEvents:
    @pytest.mark.parametrize("seed", range(8))
    def test_what_is_streamed_is_shared_by_all_that_can_still_be_returned(
        self, model: LoadedModel, seed: int
    ) -> None:
        rng = random.Random(seed)
        rows = [some_row(rng, model, num_beams=4, sample=False, top_k=0) for _ in range(4)]
        engine = Engine(model, EngineConfig())
        for row in rows:
            engine.submit(row)
        early: dict[Row, list[int]] = defaultdict(list)  # before a search's last step
        ended: dict[Row, TokenEvent] = {}
        while engine.has_work:
            step = [event for event in engine.step() if isinstance(event, TokenEvent)]
            last = {e.sequence: e for e in step if e.finish_reason}
            for event in step:
                if event.sequence not in last:
                    early[event.sequence].append(event.token)
                    assert event.finish_reason is None
                    assert event.hypotheses == ()
            ended |= last
            for row, found in engine._searches.items():
                shared = early[row]
                for live in found.rows:
                    assert live.tokens[: len(shared)] == shared
                assert row.tokens == shared
        for row, event in ended.items():
            assert list(event.hypotheses[0].tokens) == row.tokens
            assert event.index == len(row.tokens) - 1
            assert event.finish_reason == event.hypotheses[0].finish_reason == row.finish_reason
            for hypothesis in event.hypotheses:
                assert list(hypothesis.tokens[: len(early[row])]) == early[row]
        assert any(early.values()), "something comes before the end"

    def test_hypotheses_are_different_and_the_best_comes_first(self, model: LoadedModel) -> None:
        rows = [Row([n, 8, 9, 2], [1], Decoding(14, num_beams=5)) for n in range(4, 16)]
        for events in run(Engine(model, EngineConfig()), rows).values():
            found = hypotheses_of(events)
            assert len({h.tokens for h in found}) == 5
            scores = [h.score for h in found]
            assert scores == sorted(scores, reverse=True)

    @pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 1.0, 1.5])
    def test_logprobs_and_scores_are_those_of_a_teacher_forced_pass(
        self, model: LoadedModel, length_penalty: float
    ) -> None:
        asked = Decoding(
            12, num_beams=4, length_penalty=length_penalty, logprobs=True, top_n_tokens=2
        )
        row = Row([7, 8, 9, 2], [1, 5], asked)
        events = run(Engine(model, EngineConfig()), [row])[row]
        found = hypotheses_of(events)
        for hypothesis in found:
            said = list(hypothesis.tokens)
            forced = Forward(row.src, [*row.prefix, *said[:-1]], "all")
            [event] = model.stepper(EngineConfig()).forward([forced])
            expected = event.logits.log_softmax(-1)[len(row.prefix) - 1 :]
            picked = expected[range(len(said)), said]
            logprobs = torch.tensor(hypothesis.logprobs)
            torch.testing.assert_close(logprobs, picked, atol=1e-4, rtol=1e-5)
            assert hypothesis.score == pytest.approx(
                float(picked.sum()) / len(said) ** length_penalty, abs=1e-3
            )
            for top, place in zip(hypothesis.top_tokens, expected, strict=True):
                values, ids = place.topk(2)
                assert [candidate.id for candidate in top] == ids.tolist()
                assert [c.logprob for c in top] == pytest.approx(values.tolist(), abs=1e-4)
        streamed = [event for event in events if isinstance(event, TokenEvent)]
        assert tuple(event.logprob for event in streamed) == pytest.approx(found[0].logprobs)
        assert tuple(event.top_tokens for event in streamed) == found[0].top_tokens

    def test_a_stop_ends_hypotheses_not_the_search(self, model: LoadedModel) -> None:
        unstopped = Row([7, 8, 9, 2], [1], Decoding(14, num_beams=4))
        free = hypotheses_of(run(Engine(model, EngineConfig()), [unstopped])[unstopped])
        word = free[0].tokens[2]
        asked = Decoding(14, num_beams=4, stop=lambda tokens: tokens[-1] == word)
        row = Row([7, 8, 9, 2], [1], asked)
        found = hypotheses_of(run(Engine(model, EngineConfig()), [row])[row])
        stopped = [h for h in found if h.finish_reason == "stop_sequence"]
        assert stopped
        assert all(h.tokens.index(word) == len(h.tokens) - 1 for h in stopped)
        assert all(word not in h.tokens for h in found if h not in stopped)
