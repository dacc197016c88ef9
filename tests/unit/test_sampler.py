"""Random numbers keyed by counters, and draws against the exact distribution."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import EngineConfig, ModelSpec
from model.decoding import History, ProcessorBatch
from model.engine import Engine
from model.loader import LoadedModel, load_model
from model.sampler import BLOCK, Scores, draw, log_probabilities, mix, pick, uniform
from model.sequence import Decoding, Forward, Sequence
from tests.builders import make_native_model


def chi_square_bound(degrees: int) -> float:
    """The 0.9999 quantile, by Wilson and Hilferty's cube approximation."""
    z = 3.719
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (40, 257), (5, 32_000), (130, 4_001)])
def test_log_probabilities_may_be_written_over_their_logits(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    logits = 10 * torch.randn(shape)
    logits[0, 0] = -torch.inf if shape[1] > 1 else 3.0
    logits[-1, -1] = torch.nan if shape[0] > 1 else 3.0
    expected = (logits.double() - logits.double().logsumexp(dim=-1, keepdim=True)).float()
    aside = logits.log_softmax(dim=-1)
    found = log_probabilities(logits)
    assert found.data_ptr() == logits.data_ptr()
    assert torch.equal(found.nan_to_num(), aside.nan_to_num())
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-6, equal_nan=True)


def test_the_mixer_is_splitmix64() -> None:
    # First outputs of the published generator from state 0: the finaliser of 1, 2, 3 golden gammas.
    gamma = 0x9E3779B97F4A7C15
    outputs = [mix(n * gamma % 2**64) for n in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_uniforms_depend_on_each_counter_and_on_nothing_else() -> None:
    base = uniform(1, 2, 3)
    assert base == uniform(1, 2, 3)
    assert len({base, uniform(2, 2, 3), uniform(1, 3, 3), uniform(1, 2, 4)}) == 4
    assert uniform(1, 0, 1) != uniform(0, 1, 1) != uniform(1, 1, 0)


@pytest.mark.parametrize("varied", range(3))
def test_uniforms_are_uniform_along_each_counter(varied: int) -> None:
    draws = []
    for n in range(20_000):
        counters = [7, 0, 5]
        counters[varied] = n
        draws.append(uniform(*counters))
    assert all(0.0 <= u < 1.0 for u in draws)
    counts = Counter(int(u * 100) for u in draws)
    statistic = sum((counts[b] - 200) ** 2 / 200 for b in range(100))
    assert statistic < chi_square_bound(99)


def test_draws_follow_the_softmax() -> None:
    torch.manual_seed(0)
    scores = torch.randn(40) * 2
    scores[[3, 17]] = -torch.inf
    n = 40_000
    uniforms = torch.tensor([uniform(9, 0, step) for step in range(n)], dtype=torch.float64)
    drawn = draw(scores.expand(n, -1), uniforms)
    counts = torch.bincount(drawn, minlength=40).double()
    assert counts[[3, 17]].sum() == 0
    expected = scores.double().softmax(0) * n
    allowed = expected > 0
    statistic = ((counts - expected) ** 2 / expected)[allowed].sum().item()
    assert statistic < chi_square_bound(int(allowed.sum()) - 1)


@pytest.mark.parametrize("u", [0.0, 0.5, 1.0 - 2**-53])
def test_a_banned_token_is_never_drawn_not_even_at_the_ends(u: float) -> None:
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]])
    assert draw(scores, torch.tensor([u], dtype=torch.float64)).item() in (1, 3)


@pytest.mark.parametrize("vocab", [3, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 7])
def test_the_likeliest_is_the_first_of_the_highest(vocab: int) -> None:
    torch.manual_seed(vocab)
    scores = torch.randn(40, vocab)
    scores[10:20] = scores[10:20].round()  # many ties
    scores[20] = -1.0  # nothing but ties
    scores[21:30] = -torch.inf
    scores[torch.arange(21, 30), torch.arange(21, 30) % vocab] = -1e30  # one token allowed
    scores[30:35, -1] = 9.0  # the last one
    scores[35] = -torch.inf
    expected = [row.index(max(row)) for row in scores.tolist()]
    assert Scores(scores).likeliest().tolist() == expected
    assert Scores(scores.bfloat16()[20:30]).likeliest().tolist() == expected[20:30]


@pytest.mark.parametrize("vocab", [3, BLOCK, 9 * BLOCK + 7, 40 * BLOCK, 40 * BLOCK + 1])
def test_the_best_continuations_are_those_of_a_full_sort(vocab: int) -> None:
    torch.manual_seed(vocab)
    values = torch.randn(6, vocab)
    values[2] = -torch.inf
    values[3, : vocab // 2] = -torch.inf
    values[4, -1] = 9.0
    rows, sums = torch.tensor([4, 2, 3, 0]), torch.tensor([-3.0, 0.5, -1.0, -1e9])
    best, places = (values[rows] + sums[:, None]).flatten().sort(descending=True)
    count = min(8, int((best > -1e8).sum()))
    found = Scores(values).best(rows, sums, count)
    assert found[0].tolist() == best[:count].tolist()
    assert found[1].tolist() == (places // vocab)[:count].tolist()
    assert found[2].tolist() == (places % vocab)[:count].tolist()


def test_rows_that_do_not_sample_take_the_likeliest() -> None:
    scores = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0], [2.0, 2.0, 1.0]])
    greedy = Decoding(max_new_tokens=5)
    rows = [
        Sequence([5], [1], greedy),
        Sequence([5], [1], Decoding(max_new_tokens=5, sample=True, seed=3)),
        Sequence([5], [1], greedy),
    ]
    assert pick(Scores(scores[[0, 2]]), [rows[0], rows[2]]).tolist() == [1, 0]
    picked = pick(Scores(scores), rows).tolist()
    assert (picked[0], picked[2]) == (1, 0)  # the lowest id wins a tie


def test_the_step_of_a_draw_is_the_number_of_tokens_before_it() -> None:
    scores = torch.zeros(1, 1000)
    row = Sequence([5], [1], Decoding(max_new_tokens=5, sample=True, seed=3))
    first = pick(Scores(scores), [row]).item()
    row.tokens.append(7)
    second = pick(Scores(scores), [row]).item()
    row.tokens.pop()
    assert pick(Scores(scores), [row]).item() == first != second
    assert first == int(uniform(3, 0, 0) * 1000)


# --- whole requests ------------------------------------------------------------------------------

DRAWS = 20_000


def assert_drawn_from(ids: Tensor, expected: Tensor) -> None:
    """Chi-square of drawn ids against probabilities; what has none is never drawn."""
    counts = torch.bincount(ids, minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0
    wanted = expected.double() * len(ids)
    likely = wanted >= 5  # the test's own condition; the rest counts as one
    counts = torch.cat([counts[likely], counts[~likely].sum()[None]])
    wanted = torch.cat([wanted[likely], wanted[~likely].sum()[None]])
    used = wanted > 0
    statistic = ((counts - wanted) ** 2 / wanted.clamp(min=1e-12))[used].sum().item()
    assert statistic < chi_square_bound(max(1, int(used.sum()) - 1))


def exact(logits: Tensor, asked: dict[str, Any]) -> Tensor:
    """The distribution to draw from, token by token, in float64."""
    p = (logits.double() / asked.get("temperature", 1.0)).softmax(0)
    order = p.argsort(descending=True).tolist()
    kept = set(order[: asked.get("top_k") or len(order)])
    p = torch.tensor([float(x) if i in kept else 0.0 for i, x in enumerate(p)]).double()
    p = p / p.sum()
    held, nucleus = 0.0, set()
    for i in order:
        if held < asked.get("top_p", 1.0):
            nucleus.add(i)
        held += float(p[i])
    p = torch.tensor([float(x) if i in nucleus else 0.0 for i, x in enumerate(p)]).double()
    p = p / p.sum()
    p = torch.where(p < asked.get("min_p", 0.0) * p.max(), 0.0, p)
    return p / p.sum()


ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.8, "top_k": 9},
    {"top_p": 0.75},
    {"min_p": 0.08},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_draws_follow_the_distribution_that_the_parameters_leave(asked: dict[str, Any]) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(5)) * 2
    spec = ModelSpec("test", 9, 40, 0, (1,), (2,), None, 9, 9, 9)
    # One seed after the other, as for independent requests; others decode beside them.
    decodings = [Decoding(5, sample=True, seed=seed, **asked) for seed in range(DRAWS)]
    decodings += [Decoding(5), Decoding(5, sample=True, top_k=1)]
    rows = [Sequence([4], [1], decoding) for decoding in decodings]
    processors = ProcessorBatch(decodings, spec, torch.device("cpu"))
    scores = processors(logits.expand(len(rows), -1), History(rows, spec, torch.device("cpu")))
    picked = pick(Scores(scores), rows)
    assert picked[-2:].tolist() == [int(logits.argmax())] * 2
    assert_drawn_from(picked[:DRAWS], exact(logits, asked))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory: Path = tmp_path_factory.mktemp("native")
    return load_model(make_native_model(directory), device="cpu")


@pytest.mark.parametrize("varied", ["seed", "sequence_number"])
def test_the_engine_draws_from_the_models_distribution(model: LoadedModel, varied: str) -> None:
    asked = {"temperature": 1.5, "top_k": 12}
    prefix = [1, 5]
    [event] = model.stepper(EngineConfig()).forward([Forward([7, 8, 2], prefix)])
    engine = Engine(model, EngineConfig(max_rows=512, max_encoder_tokens=10_000))
    rows = []
    for number in range(DRAWS):
        keys: dict[str, Any] = {varied: number}
        decoding = Decoding(1, sample=True, **asked, **keys)  # type: ignore[arg-type]
        rows.append(Sequence([7, 8, 2], prefix, decoding))
        engine.submit(rows[-1])
    for _ in engine.run():
        pass
    drawn = torch.tensor([row.tokens[0] for row in rows])
    assert_drawn_from(drawn, exact(event.logits[-1], asked))


def test_a_seed_draws_the_same_tokens_in_any_company(model: LoadedModel) -> None:
    def asking(seed: int, number: int = 0) -> Sequence:
        decoding = Decoding(20, sample=True, seed=seed, sequence_number=number, min_new_tokens=9)
        return Sequence([7, 8, 9, 2], [1], decoding)

    alone = [asking(11), asking(11, 1), asking(12)]
    for row in alone:
        engine = Engine(model, EngineConfig())
        engine.submit(row)
        list(engine.run())
    assert len({tuple(row.tokens) for row in alone}) == 3, "each counter matters"

    again = [asking(11), asking(11, 1), asking(12)]
    company = [Sequence([5, n, 2], [1], Decoding(20, num_beams=b)) for n, b in ((5, 1), (6, 4))]
    company += [asking(seed) for seed in range(5)]
    engine = Engine(model, EngineConfig())
    for row in (*company[:3], again[0], *company[3:]):
        engine.submit(row)
    engine.step()
    engine.step()
    for row in company[1:5]:
        engine.cancel(row)
    for row in again[1:]:
        engine.submit(row)
    list(engine.run())
    assert [row.tokens for row in again] == [row.tokens for row in alone]
