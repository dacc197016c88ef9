"""Guessing tokens ahead changes how many steps an answer takes, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import EngineConfig
from model.engine import Engine, StepTrace
from model.families.seqserve import TransformerConfig, spec
from model.loader import LoadedModel, load_model
from model.lookahead import UNSHARED, Guide, Lookahead, imagined, lengths, shared_ids
from model.sequence import Decoding, Event, FailureEvent, TokenEvent
from model.sequence import Sequence as Row
from model.steppers import CachedStepper
from tests.builders import (
    TINY,
    lively_network,
    make_marian_model,
    make_native_model,
    make_tutorial_model,
)
from tests.guesses import Guesses

SHIPPED = Path(__file__).parents[2] / "weights" / "g2p-en"

# --- following a source --------------------------------------------------------------------------


def guided(src: Sequence[int], tokens: Sequence[int]) -> Guide:
    guide = Guide(src)
    guide.follow(tokens)
    return guide


def test_a_target_is_guessed_to_begin_like_its_source() -> None:
    assert list(Guide([7, 8, 9]).guesses(2)) == [7, 8]


def test_what_follows_in_the_source_is_guessed_up_to_its_end() -> None:
    guide = guided([7, 8, 9, 2], [7, 8])
    assert list(guide.guesses(1)) == [9]
    assert list(guide.guesses(9)) == [9, 2]
    assert not guide.guesses(0)
    assert not guided([7, 8], [7, 8]).guesses(9)


def test_a_token_that_the_source_lacks_is_taken_for_a_replaced_one() -> None:
    assert list(guided([7, 8, 9], [7, 5]).guesses(3)) == [9]
    assert not Guide([]).guesses(3)


def test_a_target_is_found_again_behind_a_token_that_was_replaced_left_out_or_added() -> None:
    src = [10, 11, 12, 13, 14, 15]
    for tokens in ([10, 99, 12, 13], [10, 12, 13], [10, 11, 99, 98, 12, 13]):
        assert list(guided(src, tokens).guesses(9)) == [14, 15]


def test_the_longest_match_is_followed_and_of_equal_ones_the_nearest() -> None:
    src = [1, 5, 20, 3, 5, 30, 4, 5, 40]
    assert list(guided(src, [9, 9, 9, 9, 4, 5]).guesses(1)) == [40]
    assert list(guided(src, [9, 9, 9, 9, 5]).guesses(1)) == [30]
    assert list(guided(src, [9, 5]).guesses(1)) == [20]


def test_a_prefix_leads_into_the_source_too() -> None:
    assert list(Guide([7, 8, 9], prefix=[8]).guesses(9)) == [9]


def test_tokens_that_targets_do_not_have_are_never_guessed() -> None:
    src = [7, 8, UNSHARED, 9]
    assert list(guided(src, [7]).guesses(9)) == [8]
    assert not guided(src, [7, 8]).guesses(9)


def test_trust_is_earned_and_lost_by_guesses_that_were_not_even_run() -> None:
    src = list(range(10, 30))
    guide = Guide(src)
    assert guide.trust == 0.0
    guide.follow(src[:18])
    earned = guide.trust
    assert 0.9 < earned < 1.0
    guide.follow([*src[:18], 5])
    assert guide.trust == pytest.approx(earned * 3 / 4)
    guide.follow([*src[:18], 5, src[19]])
    regained = guide.trust
    assert regained > earned * 3 / 4
    guide.follow([*src[:18], 5, src[19], 6, 7])  # where nothing could be guessed nothing was wrong
    assert guide.trust == regained


def test_right_guesses_are_expected_one_behind_the_other() -> None:
    guide = Guide([])
    for trust in (0.0, 0.3, 0.9, 1.0):
        guide.trust = trust
        for count in range(5):
            expected = sum(trust ** (i + 1) for i in range(count))
            assert guide.expected(count) == pytest.approx(expected)


def test_a_source_of_one_token_for_ever_is_followed_in_bounded_time() -> None:
    guide = guided([7] * 100_000, [7] * 50)
    assert len(guide._matches) <= 32
    assert list(guide.guesses(2)) == [7, 7]


# --- how far to look ahead -----------------------------------------------------------------------

VOCAB = 23
CONFIG = TransformerConfig(VOCAB, VOCAB, **TINY)
SPEC = spec(CONFIG)
SRC = [*range(4, 20), 2]


def copying(**decoding: Any) -> Row:
    """A row that has copied half of its source."""
    return Row(SRC, [1], Decoding(**({"max_new_tokens": 40} | decoding)), tokens=SRC[:8])


def straying() -> Row:
    """A row in which every guess was wrong."""
    return Row(SRC, [1], Decoding(40), tokens=[4, 6, 8, 10, 12, 14, 16, 18, 5])


def ahead(**config: int) -> Lookahead:
    return Lookahead(range(VOCAB), SPEC, EngineConfig(**config))


def test_a_row_that_copies_is_guessed_and_one_that_strays_is_not() -> None:
    assert list(ahead().drafts([copying()])[0]) == SRC[8:15]
    assert not any(ahead().drafts([straying()]))


def test_a_row_that_has_said_nothing_yet_is_not_guessed() -> None:
    assert not any(ahead().drafts([Row(SRC, [1], Decoding(40))]))


def test_no_more_is_guessed_than_the_setting_says() -> None:
    for most in (1, 2, 3, 5):
        assert len(ahead(lookahead=most).drafts([copying()])[0]) == most


def test_the_last_token_allowed_is_never_guessed() -> None:
    for limit in (9, 10, 12):
        [draft] = ahead().drafts([copying(max_new_tokens=limit)])
        assert len(draft) == limit - 8 - 1


def test_beam_searches_are_not_guessed() -> None:
    searching, greedy = copying(num_beams=2), copying()
    drafts = ahead().drafts([searching, greedy])
    assert not drafts[0]
    assert drafts[1]


def test_one_row_that_copies_does_not_slow_many_others_down() -> None:
    others = [straying() for _ in range(20)]
    assert any(ahead().drafts([copying(), straying()]))
    assert not any(ahead().drafts([copying(), *others]))
    assert all(ahead().drafts([copying() for _ in range(21)]))


def test_a_step_never_has_more_positions_than_the_engine_may_have_rows() -> None:
    rows = [copying() for _ in range(5)]
    for most in (5, 9, 10, 20, 64):
        drafts = ahead(max_rows=most).drafts(rows)
        widest = max(len(draft) for draft in drafts) + 1
        assert len(rows) * widest <= most


def test_lengths_that_are_tried() -> None:
    assert [lengths(n) for n in (-1, 0, 1, 2, 7, 15)] == [
        [], [], [1], [1, 2], [1, 3, 7], [1, 3, 7, 15],
    ]  # fmt: skip


def test_a_row_and_what_it_would_be_after_each_guess() -> None:
    rows = [Row([5], [1], Decoding(9), tokens=[4]), Row([6], [1], Decoding(9))]
    found = imagined(rows, [[7, 8], []])
    assert found[0] is rows[0]
    assert found[3] is rows[1]
    assert [row.tokens for row in found] == [[4], [4, 7], [4, 7, 8], []]
    assert all(row.src == [5] and row.decoding is rows[0].decoding for row in found[:3])


# --- what is shared ------------------------------------------------------------------------------


def test_one_table_for_both_sides_is_one_vocabulary(tmp_path: Path) -> None:
    loaded = load_model(make_marian_model(tmp_path), "cpu")
    assert shared_ids(loaded) == range(loaded.spec.src_vocab_size)


def test_tokens_of_two_vocabularies_are_shared_by_name(tmp_path: Path) -> None:
    loaded = load_model(make_native_model(tmp_path), "cpu")
    target = loaded.source_tokenizer
    assert not shared_ids(loaded)  # letters and sounds
    sides = replace(loaded, target_tokenizer=target)
    sides = replace(sides, spec=replace(sides.spec, tgt_vocab_size=10))
    assert list(shared_ids(sides)[:12]) == [*range(10), UNSHARED, UNSHARED]


def test_nothing_is_shared_without_names_or_where_the_source_grows(tmp_path: Path) -> None:
    loaded = load_model(make_native_model(tmp_path / "native"), "cpu")
    assert not shared_ids(replace(loaded, source_tokenizer=None))
    assert not shared_ids(load_model(make_tutorial_model(tmp_path / "tutorial"), "cpu"))


def test_the_shipped_model_has_nothing_to_guess_and_0_turns_it_off(tmp_path: Path) -> None:
    assert Engine(load_model(SHIPPED, "cpu"), EngineConfig()).lookahead is None
    shared = load_model(make_marian_model(tmp_path), "cpu")
    assert Engine(shared, EngineConfig()).lookahead is not None
    assert Engine(shared, EngineConfig(lookahead=0)).lookahead is None


# --- answers -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_native_model(tmp_path_factory.mktemp("native")), device="cpu")


def random_row(draw: random.Random, model: LoadedModel) -> Row:
    """Greedy, drawn or searched for, with up to two other parameters."""
    src = [draw.randrange(4, model.spec.src_vocab_size) for _ in range(draw.randint(1, 20))]
    vocab = model.spec.tgt_vocab_size
    prefix = [draw.randrange(4, vocab) for _ in range(draw.choice([0, 0, 1, 4]))]
    asked: dict[str, Any] = {"max_new_tokens": draw.randint(1, 40), "logprobs": True}
    asked |= {"top_n_tokens": draw.choice([0, 3])}
    asked |= draw.choice(
        [{}, {}, {"num_beams": 3}, {"sample": True, "seed": draw.randrange(99), "top_k": 9}]
    )
    changes: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 1},
        {"min_new_tokens": 8},
        {"bad_words": ((5,), (6, 7))},
        {"logit_bias": ((8, 2.0),)},
        {"forced_bos_token_id": 9},
        {"forced_eos_token_id": 2},
        {"stop": lambda tokens: tokens[-1] == 12},
    ]
    for change in draw.sample(changes, draw.randint(0, 2)):
        asked |= change
    return Row(src, [1, *prefix], Decoding(**asked))


Told = list[tuple[int, float | None, object, object]]


def told(events: list[Event], row: Row) -> Told:
    """What was said of a row, in order."""
    own = [event for event in events if isinstance(event, TokenEvent) and event.sequence is row]
    assert [event.index for event in own] == list(range(len(own)))
    return [
        (
            event.token,
            event.logprob,
            event.finish_reason,
            [candidate.id for candidate in event.top_tokens],
        )
        for event in own
    ]


def fresh(row: Row) -> Row:
    return Row(row.src, row.prefix, row.decoding)


def alone(model: LoadedModel, row: Row) -> Told:
    """A row's answer by single steps, by itself."""
    engine = Engine(model, EngineConfig(lookahead=0))
    engine.submit(again := fresh(row))
    return told(list(engine.run()), again)


def in_company(
    model: LoadedModel, rows: list[Row], answers: list[Told], seed: int
) -> tuple[list[Event], list[StepTrace]]:
    """Decode rows that join at random steps, with guesses, beside some that are cancelled."""
    draw = random.Random(seed)
    traces: list[StepTrace] = []
    engine = Engine(model, EngineConfig(max_rows=draw.choice([4, 9, 30])), traces.append)
    said = {
        id(row): [token for token, *_ in answer] for row, answer in zip(rows, answers, strict=True)
    }
    engine.lookahead = Guesses(said, model.spec, seed)
    passing = [random_row(draw, model) for _ in range(8)]
    waiting, events = [*rows, *passing], []
    draw.shuffle(waiting)
    while waiting or engine.has_work:
        while waiting and draw.random() < 0.5:
            engine.submit(waiting.pop())
        if draw.random() < 0.2:
            engine.cancel(draw.choice(passing))
        events += engine.step()
    return events, traces


def differences(model: LoadedModel, seed: int) -> int:
    """Rows of a random mix that guesses changed."""
    draw = random.Random(seed)
    rows = [random_row(draw, model) for _ in range(12)]
    answers = [alone(model, row) for row in rows]
    events, traces = in_company(model, rows, answers, seed)
    assert sum(trace.foretold for trace in traces) > 10
    assert sum(trace.guessed - trace.foretold for trace in traces) > 10
    different = 0
    for row, expected in zip(rows, answers, strict=True):
        found = told(events, row)
        exactly = [(token, reason, top) for token, _, reason, top in found]
        if exactly != [(token, reason, top) for token, _, reason, top in expected]:
            different += 1
            continue
        logprobs = [[logprob for _, logprob, *_ in answer] for answer in (found, expected)]
        torch.testing.assert_close(*map(torch.tensor, logprobs), atol=1e-4, rtol=1e-5)
    return different


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_the_same_with_guesses_right_and_wrong(model: LoadedModel, seed: int) -> None:
    assert differences(model, seed) == 0


def test_the_test_above_fails_when_a_wrong_guess_stays_in_the_cache(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def everything(stepper: CachedStepper, kept: Sequence[int]) -> None:
        stepper.targets.accept([stepper.targets.pool.begun if count else 0 for count in kept])

    monkeypatch.setattr(CachedStepper, "accept", everything)
    assert differences(model, 0) > 0


def test_right_guesses_save_steps(model: LoadedModel) -> None:
    row = Row([7, 8, 9, 2], [1], Decoding(30, min_new_tokens=30))
    answer = alone(model, row)
    traces: list[StepTrace] = []
    engine = Engine(model, EngineConfig(), traces.append)
    engine.lookahead = Guesses({id(row): [t for t, *_ in answer]}, model.spec, wrong=0.0)
    engine.submit(row)
    events = list(engine.run())
    assert len(told(events, row)) == 30
    saved = sum(trace.foretold for trace in traces)
    assert len(traces) == 30 - saved
    assert saved > 15
    assert sum(trace.guessed for trace in traces) == saved  # all were right


class Copier:
    """A stepper of a model that says its source, but for what `edit` makes of every fifth token."""

    encoder_cache = None

    def __init__(self, config: EngineConfig) -> None:
        self.positions = 0

    def expect(self, joining: Sequence[Row], soon: Sequence[Row]) -> None:
        pass

    def join(self, rows: Sequence[Row]) -> None:
        pass

    def keep(self, rows: Sequence[int]) -> None:
        pass

    def better_order(self) -> list[int] | None:
        return None

    def release(self) -> None:
        pass

    def accept(self, kept: Sequence[int]) -> None:
        pass

    def step(self, rows: Sequence[Row], first: int = 0) -> Tensor:
        self.positions += len(rows)
        return torch.stack([self._logits(row) for row in rows])

    def verify(self, rows: Sequence[Row], drafts: Sequence[Sequence[int]]) -> Tensor:
        return self.step(imagined(rows, drafts))

    def _logits(self, row: Row) -> Tensor:
        token = row.src[len(row.tokens)]
        edited = len(row.tokens) % 5 == 4 and token != 2
        return torch.eye(VOCAB)[(token + row.src[0]) % 18 + 4 if edited else token]


def test_a_source_that_is_copied_with_edits_is_copied_in_few_steps(model: LoadedModel) -> None:
    draw = random.Random(1)
    sources = [[*draw.choices(range(4, VOCAB), k=30), 2] for _ in range(3)]
    answers = {}
    for lookahead in (0, 15):
        config, traces = EngineConfig(lookahead=lookahead), list[StepTrace]()
        copier = replace(model, spec=SPEC, stepper=Copier)  # type: ignore[arg-type]
        engine = Engine(copier, config, traces.append)
        engine.lookahead = Lookahead(range(VOCAB), SPEC, config) if lookahead else None
        rows = [Row(src, [1], Decoding(40)) for src in sources]
        for row in rows:
            engine.submit(row)
        list(engine.run())
        answers[lookahead] = [row.tokens for row in rows]
        if lookahead:
            assert len(traces) < 25
            assert sum(trace.foretold for trace in traces) > 20
        else:
            assert len(traces) == 31
    assert answers[0] == answers[15]
    assert all(answer != src for answer, src in zip(answers[15], sources, strict=True))


# --- passes over several positions ---------------------------------------------------------------


@torch.inference_mode()
def test_a_pass_over_guesses_equals_the_full_pass_and_what_is_kept_goes_on() -> None:
    network = lively_network(CONFIG, seed=5)
    cached = CachedStepper(network, SPEC, EngineConfig())
    draw = random.Random(3)
    rows = [random_source(draw) for _ in range(5)]
    rows.append(Row(rows[0].src, [1, 9], rows[0].decoding))  # shares a source
    cached.join(rows)
    for _ in range(6):
        drafts = [[draw.randrange(4, VOCAB) for _ in range(draw.randint(0, 4))] for _ in rows]
        logits = cached.verify(rows, drafts)
        expected = []
        for row in imagined(rows, drafts):
            full, _ = network(torch.tensor([row.src]), torch.tensor([row.target]))
            expected.append(full[0, -1])
        torch.testing.assert_close(logits, torch.stack(expected), atol=2e-4, rtol=1e-5)
        kept = [draw.randint(1, len(draft) + 1) for draft in drafts]
        cached.accept(kept)
        for row, draft, count in zip(rows, drafts, kept, strict=True):
            row.tokens += [*draft[: count - 1], draw.randrange(4, VOCAB)]


def random_source(draw: random.Random) -> Row:
    src = [draw.randrange(4, VOCAB) for _ in range(draw.randint(1, 9))]
    return Row([*src, 2], [1, *src[: draw.randint(0, 3)]], Decoding(1000))


def test_guesses_do_not_reach_beyond_the_last_position(model: LoadedModel) -> None:
    # A long row without guesses beside a short one with some: padding has no positions left.
    endless = replace(model, spec=replace(model.spec, eos_ids=()))
    long = Row([5, 2], [1] * 45, Decoding(4))
    short = Row([7, 8, 2], [1], Decoding(40))
    answers = [alone(endless, row) for row in (long, short)]
    traces: list[StepTrace] = []
    engine = Engine(endless, EngineConfig(), traces.append)
    said = [token for token, *_ in answers[1]]
    engine.lookahead = Guesses({id(short): said}, endless.spec, wrong=0.0)
    engine.lookahead.drafts = (
        lambda rows: [  # type: ignore[method-assign]
            () if row is long else said[len(row.tokens) :][:6] for row in rows
        ]
    )
    for row in (long, short):
        engine.submit(row)
    events = list(engine.run())
    for row, expected in zip((long, short), answers, strict=True):
        assert told(events, row) == expected
    assert traces[2].rows == (long, short)
    assert traces[2].foretold == 6


# --- faults --------------------------------------------------------------------------------------


def with_guesses(model: LoadedModel, rows: list[Row]) -> tuple[Engine, list[list[int]]]:
    answers = [[token for token, *_ in alone(model, row)] for row in rows]
    engine = Engine(model, EngineConfig())
    said = {id(row): answer for row, answer in zip(rows, answers, strict=True)}
    engine.lookahead = Guesses(said, model.spec, wrong=0.3)
    for row in rows:
        engine.submit(row)
    return engine, answers


def test_a_pass_that_fails_is_done_again_by_single_steps(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Row([n, 8, 2], [1], Decoding(20)) for n in (5, 6, 7)]
    engine, answers = with_guesses(model, rows)
    stepper = engine.stepper
    assert isinstance(stepper, CachedStepper)
    original, calls = stepper.verify, []

    def failing(live: Sequence[Row], drafts: Sequence[Sequence[int]]) -> Tensor:
        logits = original(live, drafts)
        calls.append(len(live))
        if len(calls) % 2:
            for row, length in enumerate(stepper.targets.pool.lengths):  # half written
                stepper.targets.pool.tensor[:, :, row, :, length + 1 : length + 3] = torch.nan
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logits

    monkeypatch.setattr(stepper, "verify", failing)
    events = list(engine.run())
    assert len(calls) > 4
    assert not [event for event in events if isinstance(event, FailureEvent)]
    assert [row.tokens for row in rows] == answers


def test_a_wrong_guess_that_breaks_the_model_harms_nobody(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Row([n, 8, 2], [1], Decoding(20)) for n in (5, 6, 7)]
    engine, answers = with_guesses(model, rows)
    stepper = engine.stepper
    assert isinstance(stepper, CachedStepper)
    original, broken = stepper.verify, []

    def poisoned(live: Sequence[Row], drafts: Sequence[Sequence[int]]) -> Tensor:
        logits = original(live, drafts)
        positions = iter(range(len(logits)))
        for place, (row, draft) in enumerate(zip(live, drafts, strict=True)):
            next(positions)  # the row's own
            answer, length = answers[rows.index(row)], stepper.targets.pool.lengths[place]
            for i, position in zip(range(1, len(draft) + 1), positions, strict=False):
                said = [*row.tokens, *draft[:i]]
                if said != answer[: len(said)]:
                    stepper.targets.pool.tensor[:, :, place, :, length + i] = torch.nan
                    logits[position] = torch.nan
                    broken.append(position)
        return logits

    monkeypatch.setattr(stepper, "verify", poisoned)
    events = list(engine.run())
    assert len(broken) > 5
    assert not [event for event in events if isinstance(event, FailureEvent)]
    assert [row.tokens for row in rows] == answers


def test_logits_that_are_not_finite_behind_a_right_guess_end_the_row_there(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row([7, 8, 2], [1], Decoding(20, min_new_tokens=20))
    answer = [token for token, *_ in alone(model, row)]
    engine = Engine(model, EngineConfig())
    monkeypatch.setattr(engine, "lookahead", Fixed([answer[:3]]))
    stepper = engine.stepper
    assert isinstance(stepper, CachedStepper)
    original = stepper.verify

    def poisoned(live: Sequence[Row], drafts: Sequence[Sequence[int]]) -> Tensor:
        logits = original(live, drafts)
        logits[2] = torch.nan
        return logits

    monkeypatch.setattr(stepper, "verify", poisoned)
    engine.submit(row)
    *tokens, failure = engine.step()
    assert [event.token for event in tokens if isinstance(event, TokenEvent)] == answer[:2]
    assert isinstance(failure, FailureEvent)
    assert "not finite" in str(failure.error)
    assert not engine.has_work


class Fixed(Lookahead):
    """The same drafts at every step."""

    def __init__(self, drafts: list[list[int]]) -> None:
        super().__init__((), SPEC, EngineConfig())
        self._drafts = drafts

    def drafts(self, rows: Sequence[Row]) -> list[Sequence[int]]:
        return [*self._drafts]
