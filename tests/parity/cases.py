"""Random requests, and what `transformers` and the engine make of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from model import step
from model.beam import BeamSearch
from model.config import EngineConfig, ModelSpec
from model.engine import Engine
from model.loader import LoadedModel
from model.sampler import Scores
from model.sequence import Decoding, Event, FailureEvent, Hypothesis, TokenEvent
from model.sequence import Sequence as Row
from model.step import ALL_BANNED
from tests.parity.reference import EOS

GARBAGE = -1e5
"""A reference's score below this belongs to a place that nothing real has taken."""


@dataclass(frozen=True)
class Case:
    """One request."""

    src: tuple[int, ...]
    prefix: tuple[int, ...]
    decoding: Decoding

    def row(self) -> Row:
        """What the engine takes."""
        return Row(list(self.src), list(self.prefix), self.decoding)


@dataclass(frozen=True)
class Answer:
    """Generated tokens, best hypothesis first; scores are a beam search's alone.

    Nothing at all where every token was banned.
    """

    tokens: tuple[tuple[int, ...], ...]
    scores: tuple[float, ...] = ()


# --- requests ------------------------------------------------------------------------------------


def random_case(rng: random.Random, spec: ModelSpec, sample: bool = False) -> Case:
    """A request with few or many parameters, greedy or beam search; or sampled."""

    vocab = spec.tgt_vocab_size

    def tokens(below: int, fewest: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, below) for _ in range(rng.randint(fewest, most)))

    prefix = tokens(vocab, 1, 6) if rng.random() < 0.3 else ()
    choices: dict[str, Any] = {
        "repetition_penalty": rng.choice([0.7, 1.3, 2.5]),
        "no_repeat_ngram_size": rng.choice([1, 2, 3]),
        "encoder_no_repeat_ngram_size": rng.choice([1, 2]),
        "bad_words": (*(tokens(vocab, 1, 3) for _ in range(8)), (EOS,)),
        "logit_bias": tuple((t, rng.uniform(-4, 4)) for t in set(tokens(vocab, 4, 9))),
        "min_new_tokens": rng.randint(2, 9),
        "forced_bos_token_id": rng.randrange(3, vocab),
        "forced_eos_token_id": rng.choice([EOS, EOS, rng.randrange(3, vocab)]),
    }
    if rng.random() < 0.3:
        choices["logit_bias"] += ((EOS, rng.uniform(-3, 3)),)
    chance = rng.choice([0.0, 0.15, 0.4])
    settings = {name: value for name, value in choices.items() if rng.random() < chance}
    if rng.random() < 0.08:  # next to nothing is allowed: fewer continuations than beams
        allowed = set(rng.sample(range(3, vocab), rng.randint(0, 4)))
        settings["bad_words"] = tuple((t,) for t in range(vocab) if t not in allowed)
    if sample:
        settings |= {"sample": True, "seed": rng.randrange(2**53)}
        settings |= {"temperature": rng.uniform(0.5, 1.5), "top_k": rng.choice([0, 5])}
        settings |= {"top_p": rng.choice([0.8, 1.0]), "min_p": rng.choice([0.0, 0.05])}
        settings |= {"typical_p": rng.choice([0.9, 1.0])}
        settings |= {"frequency_penalty": rng.choice([0.0, 0.5])}
    elif rng.random() < 0.6:
        settings["num_beams"] = rng.randint(2, 8)
        settings["length_penalty"] = rng.choice([-1.0, 0.0, 0.6, 1.0, 2.0])
        settings["early_stopping"] = rng.choice([True, False, "never"])
    least = settings.get("min_new_tokens", 1)
    settings["max_new_tokens"] = max(least, rng.choice([1, 3, 8, 14, 20]))
    src = (*tokens(spec.src_vocab_size, 0, 11), EOS)
    if "num_beams" in settings:
        settings["renormalize_logits"] = sum(src) % 3 == 0
    return Case(src, (*spec.decoder_start_ids, *prefix), Decoding(**settings))


# --- the reference's answer ----------------------------------------------------------------------


def reference_answer(network: Any, case: Case) -> Answer:
    """What `transformers` generates for this one example."""
    import transformers

    decoding, asked = case.decoding, {}
    for name in ("repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"):
        asked[name] = getattr(decoding, name)
    asked["renormalize_logits"] = decoding.renormalize_logits
    if decoding.bad_words:
        asked["bad_words_ids"] = [list(word) for word in decoding.bad_words]
    if decoding.logit_bias:
        asked["sequence_bias"] = [[[token], bias] for token, bias in decoding.logit_bias]
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        asked[name] = getattr(decoding, name) if getattr(decoding, name) >= 0 else None
    if decoding.num_beams > 1:
        for name in ("num_beams", "length_penalty", "early_stopping"):
            asked[name] = getattr(decoding, name)
        asked["num_return_sequences"] = decoding.num_beams
    config = transformers.GenerationConfig(
        **asked,
        do_sample=False,
        max_new_tokens=decoding.max_new_tokens,
        min_new_tokens=decoding.min_new_tokens,
        pad_token_id=network.config.pad_token_id,
        eos_token_id=EOS,
        decoder_start_token_id=case.prefix[0],
        return_dict_in_generate=True,
        output_scores=True,
    )
    src = torch.tensor([case.src])
    with torch.inference_mode():
        output = network.generate(
            input_ids=src,
            attention_mask=torch.ones_like(src),
            decoder_input_ids=torch.tensor([case.prefix]),
            generation_config=config,
        )
    said = [until_end(row[len(case.prefix) :]) for row in output.sequences.tolist()]
    if decoding.num_beams == 1:
        banned = any(step.max() == -torch.inf for step in output.scores)
        return Answer(() if banned else tuple(said))  # the reference says token 0 then
    scores = output.sequences_scores.tolist()
    real = [(t, s) for t, s in zip(said, scores, strict=True) if s > GARBAGE]
    return Answer(tuple(t for t, _ in real), tuple(s for _, s in real))


def until_end(tokens: Sequence[int]) -> tuple[int, ...]:
    """Up to the first `</s>`: the reference fills short rows up."""
    return tuple(tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens)


# --- the engine's answers ------------------------------------------------------------------------


def answer_alone(model: LoadedModel, case: Case) -> Answer:
    """The engine's, with nobody else in it."""
    row = case.row()
    engine = Engine(model, EngineConfig())
    engine.submit(row)
    return answers_of([row], engine.run())[0]


def answers_of(rows: Sequence[Row], events: Iterable[Event]) -> list[Answer]:
    """What each row was answered, collected from an engine's events; checks them on the way."""
    said: dict[Row, list[int]] = {row: [] for row in rows}
    ended: dict[Row, Answer] = {}
    for event in events:
        if isinstance(event, FailureEvent):
            assert isinstance(event.work, Row)
            assert str(event.error) == ALL_BANNED
            ended[event.work] = Answer(())
        elif isinstance(event, TokenEvent) and event.sequence in said:
            row, tokens = event.sequence, said[event.sequence]
            assert row not in ended
            assert event.index == len(tokens)
            tokens.append(event.token)
            if event.finish_reason:
                ended[row] = _answer(tokens, event.hypotheses)
    return [ended[row] for row in rows]


def _answer(tokens: Sequence[int], hypotheses: Sequence[Hypothesis]) -> Answer:
    if not hypotheses:
        return Answer((tuple(tokens),))
    assert hypotheses[0].tokens == tuple(tokens), "the events' tokens are the best hypothesis'"
    return Answer(tuple(h.tokens for h in hypotheses), tuple(h.score for h in hypotheses))


def events_in_company(
    model: LoadedModel, rows: Sequence[Row], company: Sequence[Row], rng: random.Random
) -> list[Event]:
    """Decode rows that join at random steps, in random order, beside others; some are cancelled."""
    engine = Engine(model, EngineConfig(max_rows=rng.choice([17, 40, 64])))
    waiting = [*rows, *company]
    rng.shuffle(waiting)
    events: list[Event] = []
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.75:
            engine.submit(waiting.pop())
        if company and rng.random() < 0.1:
            engine.cancel(rng.choice(company))
        events.extend(engine.step())
    return events


# --- where answers differ ------------------------------------------------------------------------


def margin(model: LoadedModel, case: Case) -> float:
    """The closest decision of a case's run alone: the least gap between neighbours in rank."""
    gaps: list[float] = []
    advance, pick = BeamSearch.advance, step.pick

    def watch(scores: Tensor, ranks: int) -> None:
        ranked = scores.flatten().sort(descending=True).values[: ranks + 1]
        gaps.extend((ranked[:-1] - ranked[1:])[ranked[1:] > GARBAGE].tolist())

    def watched_advance(self: BeamSearch, scores: Scores, at: list[int], tell: Any) -> list[int]:
        watch(scores.values[at] + self._scores[:, None], 2 * self.width)
        return advance(self, scores, at, tell)

    def watched_pick(scores: Scores, rows: Sequence[Row]) -> Tensor:
        if rows[0].decoding.num_beams == 1:
            watch(scores.values, 1)
        return pick(scores, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BeamSearch, "advance", watched_advance)
        patch.setattr(step, "pick", watched_pick)
        answer_alone(model, case)
    return min(gaps, default=torch.inf)
