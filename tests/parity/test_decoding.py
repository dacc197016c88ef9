"""Decoding against `transformers`: the same weights, the same request, the same tokens.

The reference always generates for one example. The engine does so too, and once more for all
examples of a model together, in random order and company. Networks are random; one is published.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model import sampler
from model.beam import BeamSearch
from model.config import EngineConfig, ModelSpec
from model.decoding import PROCESSORS, History, ProcessorBatch
from model.engine import Engine
from model.loader import LoadedModel, load_model
from model.sequence import Decoding, Forward
from model.sequence import Sequence as Row
from model.steppers import CachedStepper
from tests.parity.cases import (
    Answer,
    Case,
    answer_alone,
    answers_of,
    events_in_company,
    margin,
    random_case,
    reference_answer,
)
from tests.parity.reference import EOS, NAMES, decoded_model

transformers = pytest.importorskip("transformers", reason="the reference is not installed")

CASES = 200
"""Per model."""

ROUNDING = 1e-4
"""A decision with a smaller margin in the run alone may fall either way: it is rounding."""

ROUNDING_ALLOWED = 0.001
"""Of all cases."""

REAL_MODEL = Path(__file__).parents[2].parent / "shared" / "data" / "bart-g2p-us"


@dataclass(frozen=True)
class Proof:
    """One model's cases and their answers."""

    reference: Any
    model: LoadedModel
    cases: list[Case]
    expected: list[Answer]
    alone: list[Answer]


@cache
def proof(name: str) -> Proof:
    torch.set_num_threads(1)
    both = decoded_model(name)
    reference, model = both.reference, both.ours
    rng = random.Random(f"cases of {name}")
    cases = [random_case(rng, model.spec) for _ in range(CASES)]
    expected = [reference_answer(reference, case) for case in cases]
    alone = [answer_alone(model, case) for case in cases]
    return Proof(reference, model, cases, expected, alone)


def differing(proof: Proof, answers: Sequence[Answer], what: str) -> list[Case]:
    """Cases answered otherwise than by the reference, rounding aside; prints and counts both."""
    wrong, rounding = [], 0
    for case, expected, answer in zip(proof.cases, proof.expected, answers, strict=True):
        if answer.tokens == expected.tokens:
            continue
        closest = margin(proof.model, case)
        print(f"{what}: margin {closest:.2e}\n  {case}\n  {expected}\n  {answer}")
        if closest < ROUNDING:
            rounding += 1
        else:
            wrong.append(case)
    print(f"{what}: {len(answers)} cases, {len(wrong)} differ, {rounding} by rounding")
    assert rounding <= ROUNDING_ALLOWED * len(NAMES) * CASES
    return wrong


def test_a_margin_is_the_least_lead_of_a_decision() -> None:
    p = proof(NAMES[0])
    greedy = next(
        case for case in p.cases if case.decoding == Decoding(case.decoding.max_new_tokens)
    )
    tokens = list(p.alone[p.cases.index(greedy)].tokens[0])
    tgt = [*greedy.prefix, *tokens[:-1]]
    [event] = p.model.stepper(EngineConfig()).forward([Forward(greedy.src, tgt, "all")])
    best, second = event.logits[len(greedy.prefix) - 1 :].topk(2).values.unbind(1)
    assert margin(p.model, greedy) == pytest.approx(float((best - second).min()), abs=1e-4)
    beams = next(case for case in p.cases if case.decoding.num_beams > 1)
    assert 0.0 < margin(p.model, beams) < 10.0


# --- the networks --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_both_sides_run_the_same_network(name: str) -> None:
    p = proof(name)
    spec = p.model.spec
    draw = torch.Generator().manual_seed(1)
    src = torch.randint(3, spec.src_vocab_size, (5, 11), generator=draw)
    tgt = torch.randint(3, spec.tgt_vocab_size, (5, 30), generator=draw)
    lengths = torch.tensor([11, 1, 4, 9, 11])
    mask = (torch.arange(11) < lengths[:, None]).long()
    with torch.inference_mode():
        theirs = p.reference(
            input_ids=src.where(mask.bool(), 0), attention_mask=mask, decoder_input_ids=tgt
        )
        ours, _ = p.model.network(src, tgt, src_lengths=lengths)
        memory = p.model.network.encode(src, mask.bool()[:, None, None])  # type: ignore[operator]
    assert theirs.logits[..., 1:].std() > 1.0, "logits must vary"
    torch.testing.assert_close(ours, theirs.logits, atol=1e-4, rtol=1e-5)
    for row, length in enumerate(lengths):
        encoded = theirs.encoder_last_hidden_state[row, :length]
        torch.testing.assert_close(memory[row, :length], encoded, atol=1e-4, rtol=1e-5)


# --- greedy and beam search ----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
class TestTheReferenceIsMatched:
    def test_alone(self, name: str) -> None:
        assert differing(proof(name), proof(name).alone, f"{name}, alone") == []

    def test_in_mixed_company_that_comes_and_goes(self, name: str) -> None:
        p, rng = proof(name), random.Random(f"company of {name}")
        rows = [case.row() for case in p.cases]
        company = [random_case(rng, proof(name).model.spec, sample=True) for _ in range(CASES // 3)]
        events = events_in_company(p.model, rows, [case.row() for case in company], rng)
        assert differing(p, answers_of(rows, events), f"{name}, in company") == []

    def test_with_the_best_continuations_sought_by_blocks(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sampler, "BLOCK", 3)  # as in vocabularies that are wide for its size
        p = proof(name)
        answers = [
            answer_alone(p.model, case) if case.decoding.num_beams > 1 else alone
            for case, alone in zip(p.cases, p.alone, strict=True)
        ]
        assert differing(p, answers, f"{name}, by blocks") == []

    def test_scores_of_beam_searches(self, name: str) -> None:
        p, compared = proof(name), 0
        for case, expected, alone in zip(p.cases, p.expected, p.alone, strict=True):
            if expected.tokens != alone.tokens:
                continue
            scored = zip(expected.tokens, expected.scores, alone.scores, strict=bool(alone.scores))
            for tokens, theirs, mine in scored:
                # A length penalty below 0 multiplies the sum, and the sum's rounding with it.
                factor = max(1.0, len(tokens) ** -case.decoding.length_penalty)
                assert mine == pytest.approx(theirs, abs=1e-4 * factor)
                compared += 1
        assert compared > CASES

    def test_the_cases_prove_something(self, name: str) -> None:
        """Outputs vary, ends are reached, beams matter."""
        cases, expected = proof(name).cases, proof(name).expected
        said = [answer.tokens[0] for answer in expected if answer.tokens]
        assert len(set(said)) > 0.6 * CASES
        vocab = proof(name).model.spec.tgt_vocab_size
        assert len({token for tokens in said for token in tokens}) > 0.8 * vocab
        assert len({len(tokens) for tokens in said}) > 8
        ended = sum(tokens[-1] == EOS for tokens in said)
        assert 0.2 * CASES < ended < 0.8 * CASES
        searches = [
            (case, answer)
            for case, answer in zip(cases, expected, strict=True)
            if case.decoding.num_beams > 1 and answer.tokens
        ]
        assert {case.decoding.num_beams for case, _ in searches} == set(range(2, 9))
        unlike_greedy = 0
        for case, answer in searches:
            greedy = replace(case, decoding=replace(case.decoding, num_beams=1))
            unlike_greedy += answer_alone(proof(name).model, greedy).tokens[:1] != answer.tokens[:1]
        assert unlike_greedy > 0.3 * len(searches)


def test_edges_are_among_the_cases() -> None:
    every = [
        pair for name in NAMES for pair in zip(proof(name).cases, proof(name).expected, strict=True)
    ]
    assert any(not answer.tokens for _, answer in every), "all tokens are banned"
    assert any(0 < len(a.tokens) < c.decoding.num_beams for c, a in every), "too few hypotheses"
    assert any(len(case.src) == 1 for case, _ in every), "a source of one token"
    assert any(case.decoding.max_new_tokens == 1 for case, _ in every)


NO_OPS = {processor.field: processor.no_op for processor in PROCESSORS}
NO_OPS |= {"length_penalty": 1.0, "early_stopping": False}
ON_DRAWS_ALONE = {"temperature", "top_k", "top_p", "min_p", "typical_p"}
OPENAI = {"frequency_penalty", "presence_penalty"}
"""Not the reference's: tests/unit/test_decoding.py has them by hand."""


@pytest.mark.parametrize("field", sorted(set(NO_OPS) - ON_DRAWS_ALONE - OPENAI))
def test_each_parameter_decides_some_of_the_cases(field: str) -> None:
    decided = 0
    for name in NAMES:
        p = proof(name)
        asking = [
            (case, alone)
            for case, alone in zip(p.cases, p.alone, strict=True)
            if getattr(case.decoding, field) != NO_OPS[field]
        ]
        for case, alone in asking[:40]:
            without: Any = {field: NO_OPS[field]}
            other = replace(case, decoding=replace(case.decoding, **without))
            decided += answer_alone(p.model, other).tokens != alone.tokens
    assert decided >= 3


def keep_in_place(self: CachedStepper, rows: Sequence[int]) -> None:
    """A fault: beams do not take their parents' cache along."""
    if len(rows) == len(self.sources.slots):
        return
    self.targets.keep(rows)
    self.sources.keep(rows)


def take_in_order(self: BeamSearch) -> None:
    """A fault: a search never ends early."""


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [(CachedStepper, "keep", keep_in_place), (BeamSearch, "_judge", take_in_order)],
    ids=["cache not reordered", "no early end"],
)
def test_a_fault_in_the_search_shows(
    owner: type, name: str, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = proof("bart")
    monkeypatch.setattr(owner, name, fault)
    searches = [i for i in range(CASES) if p.cases[i].decoding.num_beams > 1][:40]
    answers = [answer_alone(p.model, p.cases[i]) for i in searches]
    assert [a.tokens for a in answers] != [p.expected[i].tokens for i in searches]


# --- sampling ------------------------------------------------------------------------------------

WARPERS: list[tuple[str, float, Callable[[float], Any]]] = [
    *[("temperature", t, lambda v: transformers.TemperatureLogitsWarper(v)) for t in (0.3, 1.7)],
    *[("top_k", k, lambda v: transformers.TopKLogitsWarper(int(v))) for k in (1, 7, 50, 9999)],
    *[("top_p", p, lambda v: transformers.TopPLogitsWarper(v)) for p in (1e-9, 0.3, 0.9, 0.999)],
    *[("min_p", p, lambda v: transformers.MinPLogitsWarper(v)) for p in (0.01, 0.2, 1.0)],
    *[("typical_p", p, lambda v: transformers.TypicalLogitsWarper(v)) for p in (0.05, 0.5, 0.95)],
]


def warped(scores: Tensor, asked: dict[str, float]) -> Tensor:
    """By the reference, in its order."""
    ids = torch.zeros(len(scores), 1, dtype=torch.long)
    for field in ("temperature", "top_k", "top_p", "min_p", "typical_p"):
        if field in asked:
            make = next(make for name, _, make in WARPERS if name == field)
            scores = make(asked[field])(ids, scores)
    return scores


def ours(scores: Tensor, decodings: Sequence[Decoding]) -> Tensor:
    spec = ModelSpec("test", 9, scores.shape[1], 0, (1,), (2,), None, 9, 9, 9)
    rows = [Row([4], [1], decoding) for decoding in decodings]
    history = History(rows, spec, torch.device("cpu"))
    return ProcessorBatch(decodings, spec, torch.device("cpu"))(scores, history)


def random_scores(rows: int, vocab: int, seed: int) -> Tensor:
    """From flat to peaked, some tokens banned before."""
    draw = torch.Generator().manual_seed(seed)
    widths = torch.logspace(-1, 1, rows)[:, None]
    scores = torch.randn(rows, vocab, generator=draw) * widths
    return scores.masked_fill(torch.rand(rows, vocab, generator=draw) < 0.1, -torch.inf)


def assert_same_distribution(mine: Tensor, theirs: Tensor) -> None:
    assert (mine.isneginf() == theirs.isneginf()).all(), "the same tokens are banned"
    torch.testing.assert_close(mine.softmax(-1), theirs.softmax(-1), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("place", range(len(WARPERS)), ids=[f"{f} {v}" for f, v, _ in WARPERS])
def test_each_warper_leaves_the_references_distribution(place: int) -> None:
    field, value, _ = WARPERS[place]
    scores = random_scores(300, 120, seed=place)
    theirs = warped(scores, {field: value})
    asked: Any = {field: int(value) if field == "top_k" else value}
    mine = ours(scores, [Decoding(5, sample=True, **asked)] * len(scores))
    assert_same_distribution(mine, theirs)


def test_warpers_in_any_combination_each_row_its_own() -> None:
    rng = random.Random(4)
    scores = random_scores(400, 90, seed=9)
    asked: list[dict[str, Any]] = [
        {
            field: int(value) if field == "top_k" else value
            for field, value, _ in rng.sample(WARPERS, rng.randint(0, 4))
        }
        for _ in scores
    ]
    mine = ours(scores, [Decoding(5, sample=True, **a) for a in asked])
    theirs = torch.cat([warped(row[None], a) for row, a in zip(scores, asked, strict=True)])
    assert_same_distribution(mine, theirs)


# --- a published model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published() -> LoadedModel:
    return load_model(REAL_MODEL, "cpu")


@pytest.fixture(scope="module")
def expected_words() -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = json.loads((REAL_MODEL / "expected.json").read_text("utf-8"))
    return read


@pytest.mark.skipif(not REAL_MODEL.is_dir(), reason=f"{REAL_MODEL} is not here")
class TestAPublishedModel:
    def until_end(self, ids: list[int]) -> tuple[int, ...]:
        """Without the decoder start and what fills short rows up."""
        return tuple(ids[1 : ids.index(EOS) + 1])

    def test_first_step(self, published: LoadedModel, expected_words: list[dict[str, Any]]) -> None:
        for word in expected_words:
            with torch.inference_mode():
                logits, _ = published.network(
                    torch.tensor([word["input_ids"]]), torch.tensor([[1]])
                )
            values, ids = logits[0, 0].topk(3)
            assert ids.tolist() == [id for id, _ in word["first_step_top3"]]
            assert values.tolist() == pytest.approx(
                [v for _, v in word["first_step_top3"]], abs=1e-4
            )

    def test_greedy(self, published: LoadedModel, expected_words: list[dict[str, Any]]) -> None:
        rows = [Row(word["input_ids"], [1], Decoding(40)) for word in expected_words]
        answers = self.run(published, rows)
        for word, answer in zip(expected_words, answers, strict=True):
            assert answer.tokens == (self.until_end(word["greedy_ids"]),)

    def test_beam_search(
        self, published: LoadedModel, expected_words: list[dict[str, Any]]
    ) -> None:
        rows = [Row(word["input_ids"], [1], Decoding(40, num_beams=4)) for word in expected_words]
        answers = self.run(published, rows)
        for word, answer in zip(expected_words, answers, strict=True):
            assert answer.tokens == tuple(map(self.until_end, word["beam4_ids"]))
            assert answer.scores == pytest.approx(word["beam4_scores"], abs=1e-4)

    def run(self, model: LoadedModel, rows: list[Row]) -> list[Answer]:
        engine = Engine(model, EngineConfig())
        for row in rows:
            engine.submit(row)
        return answers_of(rows, engine.run())
