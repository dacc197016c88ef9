"""The engine's promises: the batch never shows, batching is continuous, faults stay put."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model import cache, steppers
from model.config import EngineConfig
from model.engine import Engine, StepTrace, fill_holes
from model.faults import GenerationError
from model.loader import LoadedModel, load_model
from model.sequence import (
    Decoding,
    Event,
    FailureEvent,
    Forward,
    ForwardEvent,
    TokenEvent,
)
from model.sequence import Sequence as Row
from model.steppers import CachedStepper
from tests.builders import make_native_model

ROUNDING = 1e-4
"""A decision with a smaller margin in the run alone may fall either way: it is rounding."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_native_model(tmp_path_factory.mktemp("native")), device="cpu")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model that only ends by length, with room for long targets."""
    directory = make_native_model(tmp_path_factory.mktemp("endless"), max_tgt=256)
    loaded = load_model(directory, device="cpu")
    return replace(loaded, spec=replace(loaded.spec, eos_ids=()))


def random_row(rng: random.Random, model: LoadedModel, **decoding: object) -> Row:
    spec = model.spec
    src = [rng.randrange(4, spec.src_vocab_size) for _ in range(rng.randint(1, 24))] + [2]
    prefix = [rng.randrange(4, spec.tgt_vocab_size) for _ in range(rng.choice([0, 0, 1, 5]))]
    drawn = {"temperature": rng.uniform(0.5, 1.5), "top_k": rng.choice([0, 5, 1000])}
    drawn |= {"top_p": rng.choice([0.8, 1.0]), "seed": rng.randrange(2**53)}
    settings: dict[str, object] = {"max_new_tokens": rng.randint(1, 30)}
    if rng.random() < 0.5:
        settings |= {"sample": True, **drawn}
    return Row(src, [1, *prefix], Decoding(**(settings | decoding)))  # type: ignore[arg-type]


def fresh(row: Row) -> Row:
    return Row(list(row.src), list(row.prefix), row.decoding)


def tokens_alone(model: LoadedModel, row: Row) -> list[int]:
    engine = Engine(model, EngineConfig())
    alone = fresh(row)
    engine.submit(alone)
    for event in engine.run():
        assert isinstance(event, TokenEvent)
    return alone.tokens


def tokens_in_company(model: LoadedModel, rows: Sequence[Row], seed: int) -> None:
    """Decode rows that join at random steps, beside others some of which are cancelled half-way."""
    rng = random.Random(seed)
    engine = Engine(model, EngineConfig(max_rows=rng.choice([3, 8, 40])))
    waiting = list(rows)
    company = [random_row(rng, model) for _ in range(32)]
    passing = list(company)
    while waiting or passing or engine.has_work:
        for queue in (waiting, passing):
            while queue and rng.random() < 0.4:
                engine.submit(queue.pop())
        if rng.random() < 0.2:
            engine.submit(Forward(src=[5, 6, 2], tgt=[1, 7]))
        if rng.random() < 0.3:
            engine.cancel(rng.choice(company))
        engine.step()


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), -1)


def margin(model: LoadedModel, row: Row, alone: Sequence[int], at: int) -> float:
    """By how much the run alone preferred its greedy token over the next best."""
    target = [*row.prefix, *alone[:at]]
    [event] = model.stepper(EngineConfig()).forward([Forward(src=row.src, tgt=target)])
    best, second = event.logits[-1].topk(2).values.tolist()
    return float(best - second)


def differences(model: LoadedModel, seed: int) -> int:
    """Rows of a random mix whose tokens depended on the mix, rounding aside."""
    rng = random.Random(seed)
    rows = [random_row(rng, model) for _ in range(8)]
    expected = [tokens_alone(model, row) for row in rows]
    assert len({tuple(tokens) for tokens in expected}) > len(rows) // 2, "outputs must vary"
    tokens_in_company(model, rows, seed)
    different = 0
    for row, alone in zip(rows, expected, strict=True):
        at = first_difference(row.tokens, alone)
        if at < 0 and len(row.tokens) == len(alone):
            continue
        if not row.decoding.sample and at >= 0 and margin(model, row, alone, at) < ROUNDING:
            print(f"rounding: seed {seed}, token {at}")
            continue
        different += 1
    return different


class TestTheBatchNeverShows:
    @pytest.mark.parametrize("seed", range(12))
    def test_tokens_are_the_same_alone_and_among_others_that_come_and_go(
        self, model: LoadedModel, seed: int
    ) -> None:
        assert differences(model, seed) == 0

    @pytest.mark.parametrize("seed", range(4))
    def test_tokens_are_the_same_where_rows_change_places_at_every_step(
        self, model: LoadedModel, monkeypatch: pytest.MonkeyPatch, seed: int
    ) -> None:
        moved = []

        def shuffled(stepper: CachedStepper) -> list[int] | None:
            order = list(range(len(stepper.sources.slots)))
            random.Random(len(moved)).shuffle(order)
            moved.append(len(order))
            return order

        monkeypatch.setattr(CachedStepper, "better_order", shuffled)
        assert differences(model, seed) == 0
        assert max(moved) > 2

    @pytest.mark.parametrize(
        ("module", "name"),
        [(steppers, "padding_mask"), (cache, "padding_mask"), (steppers, "causal_mask")],
        ids=["encoder", "cached keys", "prefix"],
    )
    def test_the_test_above_fails_when_a_mask_is_removed(
        self, model: LoadedModel, monkeypatch: pytest.MonkeyPatch, module: object, name: str
    ) -> None:
        original = getattr(module, name)

        def everything(*args: object, **kwargs: object) -> Tensor:
            mask: Tensor = original(*args, **kwargs)
            return torch.ones_like(mask)

        rng = random.Random(0)
        rows = [random_row(rng, model) for _ in range(16)]
        expected = [tokens_alone(model, row) for row in rows]
        monkeypatch.setattr(module, name, everything)
        tokens_in_company(model, rows, 0)
        assert [row.tokens for row in rows] != expected

    def test_rows_of_one_source_share_its_encoding(self, model: LoadedModel) -> None:
        rows = [
            Row([7, 8, 9, 2], [1], Decoding(20, sample=True, seed=s, sequence_number=n))
            for s, n in ((1, 0), (1, 1), (2, 0))
        ]
        expected = [tokens_alone(model, row) for row in rows]
        engine = Engine(model, EngineConfig())
        for row in rows:
            engine.submit(row)
        engine.step()
        assert engine.stepper.sources.pool.rows == 1  # type: ignore[attr-defined]
        list(engine.run())
        assert [row.tokens for row in rows] == expected
        assert expected[0] != expected[1]

    def test_a_seed_draws_the_same_tokens_after_others_were_cancelled(
        self, model: LoadedModel
    ) -> None:
        row = Row([7, 8, 9, 2], [1], Decoding(30, sample=True, seed=11))
        expected = tokens_alone(model, row)
        engine = Engine(model, EngineConfig())
        others = [Row([5, 2], [1], Decoding(30, sample=True, seed=s)) for s in range(5)]
        for work in [*others[:3], row, *others[3:]]:
            engine.submit(work)
        engine.step()
        for other in others:
            engine.cancel(other)
        list(engine.run())
        assert row.tokens == expected


class TestContinuousBatching:
    def test_a_short_request_overtakes_a_long_one_in_steps_that_both_share(
        self, endless: LoadedModel
    ) -> None:
        traces: list[StepTrace] = []
        engine = Engine(endless, EngineConfig(), traces.append)
        long = Row([5, 6, 7, 2], [1], Decoding(200))
        short = Row([9, 2], [1], Decoding(5))
        engine.submit(long)
        for _ in range(50):
            engine.step()
        engine.submit(short)
        list(engine.run())
        assert (len(long.tokens), len(short.tokens)) == (200, 5)
        shared = [trace.step for trace in traces if {long, short} <= set(trace.rows)]
        assert shared == [50, 51, 52, 53, 54]
        assert traces[50].joined == (short,)
        assert traces[54].left == (short,)
        assert traces[199].left == (long,)
        assert len(traces) == 200

    def test_a_waiting_row_takes_the_place_of_one_that_left_at_the_next_step(
        self, endless: LoadedModel
    ) -> None:
        traces: list[StepTrace] = []
        engine = Engine(endless, EngineConfig(max_rows=2), traces.append)
        rows = [Row([5, 2], [1], Decoding(n)) for n in (2, 4, 3)]
        for row in rows:
            engine.submit(row)
        list(engine.run())
        assert [len(trace.rows) for trace in traces] == [2, 2, 2, 2, 1]

    def test_passes_do_not_stop_decoding(self, endless: LoadedModel) -> None:
        traces: list[StepTrace] = []
        engine = Engine(endless, EngineConfig(max_forward_tokens=8), traces.append)
        row = Row([5, 2], [1], Decoding(6))
        engine.submit(row)
        for _ in range(4):
            engine.submit(Forward(src=[5, 6, 2], tgt=[1, 7]))
        list(engine.run())
        assert [trace.forwards for trace in traces] == [1, 1, 1, 1, 0, 0]
        assert all(row in trace.rows for trace in traces)


class TestEnds:
    def test_eos_ends_a_row_and_counts_as_a_token(self, model: LoadedModel) -> None:
        row = Row([7, 8, 9, 2], [1], Decoding(30))
        unended = tokens_alone(model, row)
        eos = unended[6]
        ending = replace(model, spec=replace(model.spec, eos_ids=(eos,)))
        engine = Engine(ending, EngineConfig())
        engine.submit(row)
        *_, last = engine.run()
        assert row.tokens == unended[: unended.index(eos) + 1]
        assert isinstance(last, TokenEvent)
        assert (last.token, last.finish_reason) == (eos, "eos_token")

    def test_positions_end_a_row(self, endless: LoadedModel) -> None:
        row = Row([5, 2], [1] * 250, Decoding(10_000))
        engine = Engine(endless, EngineConfig(max_cache_tokens=20_000))
        engine.submit(row)
        list(engine.run())
        assert len(row.tokens) == 256 - 250 + 1
        assert row.finish_reason == "length"

    def test_work_that_can_never_fit_is_refused(self, model: LoadedModel) -> None:
        engine = Engine(model, EngineConfig(max_cache_tokens=20))
        with pytest.raises(ValueError, match="need 33 cache positions, at most 20 "):
            engine.submit(Row([5, 2], [1], Decoding(30)))
        assert not engine.has_work

    def test_an_idle_engine_holds_nothing_in_its_cache(self, model: LoadedModel) -> None:
        engine = Engine(model, EngineConfig())
        engine.submit(Row([5, 2], [1], Decoding(3)))
        list(engine.run())
        stepper = engine.stepper
        assert isinstance(stepper, steppers.CachedStepper)
        assert not stepper.targets.pool.tensor.any()
        assert not stepper.sources.pool.tensor.any()


class TestReports:
    def test_logprobs_are_the_log_softmax_of_the_raw_logits(self, model: LoadedModel) -> None:
        row = Row([7, 8, 2], [1], Decoding(8, sample=True, temperature=3.0, top_k=5, logprobs=True))
        engine = Engine(model, EngineConfig())
        engine.submit(row)
        events = [event for event in engine.run() if isinstance(event, TokenEvent)]
        target = [*row.prefix, *row.tokens[:-1]]
        [event] = model.stepper(EngineConfig()).forward([Forward(row.src, target, "all")])
        expected = event.logits.log_softmax(-1)[range(len(row.tokens)), row.tokens]
        torch.testing.assert_close(
            torch.tensor([event.logprob for event in events]), expected, atol=1e-4, rtol=1e-5
        )

    def test_only_rows_that_ask_get_reports(self, model: LoadedModel) -> None:
        asking = Row([7, 8, 2], [1], Decoding(4, logprobs=True, top_n_tokens=3))
        silent = Row([9, 8, 2], [1], Decoding(4))
        engine = Engine(model, EngineConfig())
        engine.submit(silent)
        engine.submit(asking)
        for event in engine.run():
            assert isinstance(event, TokenEvent)
            if event.sequence is silent:
                assert event.logprob is None
                assert event.top_tokens == ()
            else:
                assert len(event.top_tokens) == 3
                assert event.top_tokens[0].id == event.token  # greedy takes the likeliest
                assert event.top_tokens[0].logprob == pytest.approx(event.logprob)


class TestForwards:
    def test_a_pass_equals_the_full_forward_pass_in_any_company(self, model: LoadedModel) -> None:
        rng = random.Random(3)
        passes = []
        for _ in range(20):
            row = random_row(rng, model)
            positions = rng.choice(["last", "all"])
            passes.append(Forward(row.src, row.prefix, positions))  # type: ignore[arg-type]
        engine = Engine(model, EngineConfig(max_forward_tokens=200))
        for work in passes:
            engine.submit(work)
        answers = {
            event.forward: event for event in engine.run() if isinstance(event, ForwardEvent)
        }
        assert len(answers) == len(passes)
        for work in passes:
            src, tgt = torch.tensor([work.src]), torch.tensor([work.tgt])
            with torch.inference_mode():
                full = model.network(src, tgt)[0][0]
            expected = full if work.positions == "all" else full[-1:]
            torch.testing.assert_close(answers[work].logits, expected, atol=1e-4, rtol=1e-5)

    def test_top_k_reports_values_ids_and_logprobs(self, model: LoadedModel) -> None:
        engine = Engine(model, EngineConfig())
        engine.submit(Forward([7, 8, 2], [1, 9], "all", top_k=4))
        engine.submit(Forward([7, 8, 2], [1, 9], "all"))
        top, whole = (event for event in engine.run() if isinstance(event, ForwardEvent))
        assert top.ids is not None
        assert top.logprobs is not None
        torch.testing.assert_close(top.logits, whole.logits.topk(4).values)
        torch.testing.assert_close(whole.logits.gather(1, top.ids), top.logits)
        torch.testing.assert_close(whole.logits.log_softmax(-1).gather(1, top.ids), top.logprobs)

    def test_labels_report_their_own_logits_and_logprobs(self, model: LoadedModel) -> None:
        engine = Engine(model, EngineConfig())
        labels = [9, 4, 2]
        engine.submit(Forward([7, 8, 2], [1, 9, 4], "all", labels=labels))
        engine.submit(Forward([7, 8, 2], [1, 9, 4], "all"))
        own, whole = (event for event in engine.run() if isinstance(event, ForwardEvent))
        assert own.ids is not None
        assert own.ids[:, 0].tolist() == labels
        torch.testing.assert_close(own.logits[:, 0], whole.logits[range(3), labels])
        expected = whole.logits.log_softmax(-1)[range(3), labels]
        assert own.logprobs is not None
        torch.testing.assert_close(own.logprobs[:, 0], expected)

    def test_attention_comes_beside_other_passes_and_without_logits(
        self, model: LoadedModel
    ) -> None:
        engine = Engine(model, EngineConfig())
        passes = [
            Forward([7, 8, 2], [1, 9], attention=True),
            Forward([7, 8, 2], [1], "all"),
            Forward([7, 2], [1], attention=True),
        ]
        for work in passes:
            engine.submit(work)
        answers = {
            event.forward: event for event in engine.run() if isinstance(event, ForwardEvent)
        }
        assert answers[passes[1]].attention is None
        assert answers[passes[1]].logits.numel()
        for work in (passes[0], passes[2]):
            maps = answers[work].attention
            assert maps is not None
            assert maps.cross.shape[2:] == (len(work.tgt), len(work.src))
            assert not answers[work].logits.numel()


class TestFaults:
    @pytest.fixture
    def engine(self, model: LoadedModel) -> Engine:
        return Engine(model, EngineConfig())

    def events_of(self, engine: Engine, row: Row) -> Iterator[Event]:
        return (event for event in engine.run() if getattr(event, "sequence", None) is row)

    def test_logits_that_are_not_finite_end_only_their_own_row(
        self, model: LoadedModel, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = [Row([n, 2], [1], Decoding(6)) for n in (5, 6, 7, 8)]
        expected = [tokens_alone(model, row) for row in rows]
        original = engine.stepper.step

        def poisoned(live: Sequence[Row], first: int = 0) -> Tensor:
            logits = original(live, first)
            for i, row in enumerate(live):
                if row is rows[1] and len(row.tokens) == 2:
                    logits[i, 3] = torch.nan
                if row is rows[2]:
                    logits[i, 3] = torch.inf
            return logits

        monkeypatch.setattr(engine.stepper, "step", poisoned)
        for row in rows:
            engine.submit(row)
        failures = [event for event in engine.run() if isinstance(event, FailureEvent)]
        assert {id(failure.work) for failure in failures} == {id(rows[1]), id(rows[2])}
        assert all(isinstance(failure.error, GenerationError) for failure in failures)
        assert rows[0].tokens == expected[0]
        assert rows[1].tokens == expected[1][:2]
        assert rows[3].tokens == expected[3]

    def test_a_step_that_fails_fails_its_rows_and_the_next_request_works(
        self, model: LoadedModel, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(live: Sequence[Row], first: int = 0) -> Tensor:
            raise RuntimeError("broken")

        rows = [Row([5, 2], [1], Decoding(6)), Row([6, 2], [1], Decoding(6))]
        for row in rows:
            engine.submit(row)
        with monkeypatch.context() as patch:
            patch.setattr(engine.stepper, "step", broken)
            events = engine.step()
        assert [getattr(event, "work", None) for event in events] == rows
        assert not engine.has_work
        after = fresh(rows[0])
        engine.submit(after)
        list(engine.run())
        assert after.tokens == tokens_alone(model, after)

    def test_parameters_that_fail_fail_the_rows_in_the_step_not_the_engine(
        self, model: LoadedModel, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: object) -> Tensor:
            raise RuntimeError("broken")

        row = Row([5, 2], [1], Decoding(6))
        engine.submit(row)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_scores", broken)
            [failure] = engine.step()
        assert isinstance(failure, FailureEvent)
        assert (failure.work, engine.has_work) == (row, False)
        engine.submit(after := fresh(row))
        list(engine.run())
        assert after.tokens == tokens_alone(model, after)

    @pytest.mark.parametrize("num_beams", [1, 3])
    def test_a_stop_check_that_fails_ends_only_its_own_sequence(
        self, model: LoadedModel, engine: Engine, num_beams: int
    ) -> None:
        def broken(tokens: Sequence[int]) -> bool:
            raise RuntimeError("broken")

        sick = Row([6, 2], [1], Decoding(6, stop=broken, num_beams=num_beams))
        live = Row([5, 6, 2], [1], Decoding(10))
        for row in (sick, live):
            engine.submit(row)
        failures = [event for event in engine.run() if isinstance(event, FailureEvent)]
        assert [failure.work for failure in failures] == [sick]
        assert live.tokens == tokens_alone(model, live)

    @pytest.mark.parametrize("size", [2**31, 2**63, 2**64 - 1])
    @pytest.mark.parametrize(
        "name", ["top_k", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"]
    )
    def test_counts_of_any_size_are_as_good_as_none(
        self, model: LoadedModel, name: str, size: int
    ) -> None:
        plain = Row([5, 6, 2], [1], Decoding(10, sample=True, seed=3))
        asked = Row([5, 6, 2], [1], replace(plain.decoding, **{name: size}))  # type: ignore[arg-type]
        assert tokens_alone(model, asked) == tokens_alone(model, plain)

    def test_a_join_that_fails_leaves_the_live_rows_alone(
        self, model: LoadedModel, engine: Engine
    ) -> None:
        live = Row([5, 6, 2], [1], Decoding(10))
        expected = tokens_alone(model, live)
        engine.submit(live)
        engine.step()
        # An id that is in no table: the service refuses it, and the engine survives it.
        sick = [Row([10_000, 2], [1], Decoding(5)), Row([5, 2], [1, 10_000, 1], Decoding(5))]
        for row in sick:
            engine.submit(row)
            events = engine.step()
            assert [event.work for event in events if isinstance(event, FailureEvent)] == [row]
        list(engine.run())
        assert live.tokens == expected

    def test_a_pass_that_fails_leaves_decoding_alone(
        self, model: LoadedModel, engine: Engine
    ) -> None:
        live = Row([5, 6, 2], [1], Decoding(10))
        expected = tokens_alone(model, live)
        engine.submit(live)
        sick = Forward([10_000, 2], [1])
        engine.submit(sick)
        failures = [event for event in engine.run() if isinstance(event, FailureEvent)]
        assert [failure.work for failure in failures] == [sick]
        assert live.tokens == expected

    def test_attention_that_fails_leaves_other_passes_alone(self, engine: Engine) -> None:
        sick, well = Forward([10_000, 2], [1], attention=True), Forward([5, 2], [1])
        engine.submit(sick)
        engine.submit(well)
        answers = {type(event): event for event in engine.run()}
        failure, answer = answers[FailureEvent], answers[ForwardEvent]
        assert isinstance(failure, FailureEvent)
        assert isinstance(answer, ForwardEvent)
        assert (failure.work, answer.forward) == (sick, well)

    def test_cancelling_frees_the_row_at_once_and_is_never_an_error(
        self, model: LoadedModel, engine: Engine
    ) -> None:
        rows = [Row([n, 2], [1], Decoding(8)) for n in (5, 6, 7)]
        expected = [tokens_alone(model, row) for row in rows]
        waiting = Row([8, 2], [1], Decoding(8))
        for row in rows:
            engine.submit(row)
        engine.step()
        engine.submit(waiting)
        engine.cancel(rows[0])
        engine.cancel(waiting)
        engine.cancel(Row([9, 2], [1], Decoding(8)))
        assert (engine.running, engine.waiting) == (2, 0)
        list(engine.run())
        engine.cancel(rows[1])
        assert [row.tokens for row in rows[1:]] == expected[1:]
        assert len(rows[0].tokens) == 1
        assert waiting.tokens == []


@pytest.mark.parametrize(
    ("rows", "gone", "kept"),
    [
        (5, {1}, [0, 4, 2, 3]),
        (5, {4}, [0, 1, 2, 3]),
        (5, {0, 1}, [4, 3, 2]),
        (5, {3, 1}, [0, 4, 2]),
        (3, {0, 1, 2}, []),
        (3, set(), [0, 1, 2]),
    ],
)
def test_the_last_rows_fill_the_holes(rows: int, gone: set[int], kept: list[int]) -> None:
    assert fill_holes(rows, gone) == kept


def test_an_empty_source_is_a_source(model: LoadedModel) -> None:
    row = Row([], [1], Decoding(5))
    alone = tokens_alone(model, row)
    tokens_in_company(model, [row], seed=1)
    assert row.tokens == alone


def test_models_are_loaded_from_a_path(tmp_path: Path) -> None:
    assert load_model(make_native_model(tmp_path / "m")).directory == tmp_path / "m"
