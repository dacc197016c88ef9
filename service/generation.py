"""/generate without HTTP: a request becomes plans, a plan sequences, their events an answer.

The command line goes the same way, and so does a stream, which hands the same pieces out earlier.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from model.config import ModelSpec
from model.languages import Languages
from model.sequence import Candidate, Decoding, Hypothesis, TokenEvent
from model.sequence import Sequence as Row
from model.tokenizer import UNK
from seqserve.errors import InvalidRequestError
from seqserve.parameters import MAX_SEED, GenerationParameters
from seqserve.schemas import (
    Details,
    FinishReason,
    Generated,
    GenerateRequest,
    GenerateResponse,
    StreamEvent,
    Token,
)
from service.defaults import with_defaults
from service.languages import Opening, Speech, Wish
from service.numbers import shortest
from service.spelling import Spelled, Speller, StopStrings
from service.vocabulary import Source, Vocabulary, read_sources


@dataclass(frozen=True)
class Plan:
    """What is to be done for one input.

    Attributes:
        prefix: target prefix, without the decoder start; a language's token belongs to it.
        seed: of the draws; None without sampling.
        sequences: what the engine runs; empty if there is nothing to generate. A beam search is
            one sequence.
    """

    source: Source
    prefix: list[int]
    parameters: GenerationParameters
    seed: int | None
    sequences: list[Row]

    @property
    def answers(self) -> int:
        """How many continuations are returned at most."""
        return self.parameters.num_return_sequences or 1

    @property
    def most_candidates(self) -> int:
        """How many entries the details' `top_tokens` may come to."""
        if not self.sequences:
            return 0
        decoding = self.sequences[0].decoding
        return self.answers * decoding.max_new_tokens * decoding.top_n_tokens


@dataclass(frozen=True)
class Run:
    """The tokens of one continuation; `score` is a beam search's."""

    events: Sequence[TokenEvent] = ()
    score: float | None = None


@dataclass(frozen=True)
class Generator:
    """Plans and answers /generate for one model. Pure: it runs nothing."""

    spec: ModelSpec
    source: Vocabulary
    target: Vocabulary
    languages: Languages | None = None

    @property
    def speech(self) -> Speech:
        """What it makes of languages."""
        return Speech(self.spec, self.languages)

    def plan(self, request: GenerateRequest) -> list[Plan]:
        """One plan for each input.

        Raises:
            InvalidRequestError: an input cannot be served; the message names it.
        """
        indices = range(request.count)
        parameters = [request.parameters_of(i) for i in indices]
        text = request.texts is not None
        spoken = [_wishes(parameters[i], request.parameters_place(i)) for i in indices]
        sources = read_sources(
            self.source,
            self.spec,
            request.texts,
            request.id_lists,
            [request.place(i) for i in indices],
            [p.truncate for p in parameters],
            [self.speech.frame(src, tgt, text=text) for src, tgt in spoken],
        )
        planner = Planner(
            self.spec, self.target, stream=bool(request.stream), speech=self.speech, text=text
        )
        return [
            planner.plan(sources[i], parameters[i], request.parameters_place(i)) for i in indices
        ]

    def answer(self, plan: Plan, events: Mapping[Row, Sequence[TokenEvent]]) -> GenerateResponse:
        """What became of a plan.

        Args:
            events: of each of the plan's sequences.
        """
        told = [self._tell(plan, run) for run in runs_of(plan, events)]
        best = told[0]
        answer = GenerateResponse(generated_text=best.generated_text)
        if plan.answers > 1:
            answer = answer.model_copy(update={"sequences": told})
        if wants_details(plan.parameters):
            answer = answer.model_copy(update={"details": best.details})
        return answer

    def stream(self, plan: Plan) -> Stream:
        """The events of a plan as they come."""
        return Stream(self, plan)

    def speller(self, plan: Plan) -> Speller:
        """What spells one of a plan's sequences."""
        return Speller(self.target, plan.prefix, plan.parameters.stop or ())

    def text(self, plan: Plan, speller: Speller) -> str | None:
        """The generated text, once all is spelled."""
        if self.target.tokenizer is None:
            return None
        return (speller.before if plan.parameters.return_full_text else "") + speller.text

    def details(self, plan: Plan, run: Run, spelled: Sequence[Spelled], *, tokens: bool) -> Details:
        """How a continuation came about; its tokens where they are wanted."""
        source = plan.source
        details = Details(
            finish_reason=_finish_reason(plan, run.events),
            input_tokens=len(source.ids),
            unknown_tokens=source.unknown,
            truncated=source.truncated,
            generated_tokens=len(run.events),
            seed=plan.seed,
            score=run.score,
            prefill=[],
            tokens=[self.token(s) for s in spelled] if tokens else [],
        )
        if not (plan.parameters.top_n_tokens and tokens):
            return details
        top = [self.top_tokens(event) for event in run.events]
        return details.model_copy(update={"top_tokens": top})

    def token(self, spelled: Spelled) -> Token:
        event = spelled.event
        return Token(
            id=event.token,
            text=spelled.text,
            logprob=shortest(event.logprob),
            special=spelled.special or event.token == self.spec.eos_id,
        )

    def top_tokens(self, event: TokenEvent) -> list[Token]:
        return [self._candidate(candidate) for candidate in event.top_tokens]

    def _candidate(self, candidate: Candidate) -> Token:
        id = candidate.id
        return Token(
            id=id,
            text=self.target.name(id),
            logprob=shortest(candidate.logprob),
            special=id in self.target.special_ids or id == self.spec.eos_id,
        )

    def _tell(self, plan: Plan, run: Run) -> Generated:
        speller = self.speller(plan)
        spelled = [s for event in run.events for s in speller.push(event)]
        told = Generated(generated_text=self.text(plan, speller), score=run.score)
        if not wants_details(plan.parameters):
            return told
        details = self.details(plan, run, spelled, tokens=True)
        return told.model_copy(update={"details": details})


# --- planning ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planner:
    """Decides everything that one request left open.

    Attributes:
        stream: whether tokens are shown with their log-probabilities in any case.
        speech: what the model makes of languages.
        text: whether the sources are texts.
    """

    spec: ModelSpec
    target: Vocabulary
    stream: bool
    speech: Speech
    text: bool
    _constraints: dict[str, dict[str, Any]] = field(default_factory=dict)

    def plan(self, source: Source, parameters: GenerationParameters, place: str) -> Plan:
        """The plan of one input.

        Args:
            place: how an error message calls the parameters.

        Raises:
            InvalidRequestError: they do not fit this model.
        """
        opening = self._opening(parameters, place)
        if opening.first and parameters.forced_bos_token_id is None:
            [first] = opening.first
            parameters = parameters.model_copy(update={"forced_bos_token_id": first})
        parameters = with_defaults(parameters, self.spec.defaults, place)
        prefix = self._prefix(parameters, opening, place)
        room = self._room(source, opening, prefix, f"{place}.{_prefix_field(parameters)}")
        length = _new_tokens(parameters, room, self.spec, place)
        seed = _seed(parameters)
        decoding = self._decoding(parameters, prefix, length, seed, place)
        sequences = []
        if length and not source.blank:
            start = [*opening.start, *prefix]
            draws = (parameters.num_return_sequences or 1) if parameters.samples else 1
            sequences = [
                Row(source.ids, start, decoding(sequence_number=number)) for number in range(draws)
            ]
        return Plan(source, prefix, parameters, seed, sequences)

    def _opening(self, parameters: GenerationParameters, place: str) -> Opening:
        """What the target begins with, before any prefix."""
        _, tgt = _wishes(parameters, place)
        return self.speech.opening(
            tgt,
            ids=bool(parameters.target_prefix_ids),
            needed=parameters.target_prefix is not None
            or (self.text and parameters.forced_bos_token_id is None),
        )

    def _prefix(self, parameters: GenerationParameters, opening: Opening, place: str) -> list[int]:
        field = f"{place}.{_prefix_field(parameters)}"
        if parameters.target_prefix is not None:
            [ids] = self.target.encode_open([parameters.target_prefix], field)
            return [*opening.first, *ids] if ids else []  # without any, the language is forced
        ids = parameters.target_prefix_ids or []
        self.target.check(ids, field)
        return ids

    def _room(self, source: Source, opening: Opening, prefix: list[int], field: str) -> int:
        """Tokens that can be generated before the decoder is full."""
        spec = self.spec
        start = len(opening.start) + len(prefix)
        fed = start + (len(source.ids) if spec.source_is_target else 0)
        if fed > spec.max_tgt:
            what = "source" if spec.source_is_target else "decoder start"
            raise InvalidRequestError(
                f"{field}: {what} and target prefix have {fed} tokens, "
                f"the model takes at most {spec.max_tgt}",
                field,
            )
        return spec.room(len(source.ids), start)

    def _decoding(
        self,
        parameters: GenerationParameters,
        prefix: list[int],
        max_new_tokens: int,
        seed: int | None,
        place: str,
    ) -> Callable[..., Decoding]:
        """What decoding is to do, but for the `sequence_number`."""
        if place not in self._constraints:  # inputs that share parameters have them read once
            self._constraints[place] = self._read_constraints(parameters, place)
        stops = parameters.stop or []
        if stops:
            self.target.need_tokenizer(f"{place}.stop")
        return partial(
            Decoding,
            max_new_tokens=max_new_tokens,
            sample=parameters.samples,
            seed=seed or 0,
            stop=StopStrings(self.target, prefix, stops) if stops else None,
            renormalize_logits=self.spec.defaults.renormalize_logits or False,
            logprobs=self.stream or wants_details(parameters),
            top_n_tokens=min(parameters.top_n_tokens, self.spec.tgt_vocab_size),
            **self._constraints[place],
            **_given(parameters),
        )

    def _read_constraints(self, parameters: GenerationParameters, place: str) -> dict[str, Any]:
        self._check_forced(parameters, place)
        return {
            "bad_words": (
                *(self.spec.defaults.bad_words or ()),
                *self._bad_words(parameters, place),
            ),
            "logit_bias": self._logit_bias(parameters, place),
        }

    def _check_forced(self, parameters: GenerationParameters, place: str) -> None:
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            id = getattr(parameters, name)
            if id is not None and id >= self.target.size:
                raise InvalidRequestError(
                    f"{place}.{name} must be an id in [0, {self.target.size}), got {id}",
                    f"{place}.{name}",
                )

    def _bad_words(
        self, parameters: GenerationParameters, place: str
    ) -> tuple[tuple[int, ...], ...]:
        given, field = parameters.bad_words or [], f"{place}.bad_words"
        texts = [word for word in given if isinstance(word, str)]
        encoded = iter(self.target.encode_bare(texts, field) if texts else [])
        words = []
        for i, word in enumerate(given):
            param = f"{field}[{i}]"
            if isinstance(word, str):
                ids = next(encoded)
                unknown = any(self.target.name(id) == UNK for id in ids)
            else:
                ids, unknown = word, False
                self.target.check(ids, param)
            if not ids or unknown:
                raise InvalidRequestError(
                    f"{param} must be made of the vocabulary's tokens, got {word!r}", param
                )
            words.append(tuple(ids))
        return tuple(words)

    def _logit_bias(
        self, parameters: GenerationParameters, place: str
    ) -> tuple[tuple[int, float], ...]:
        entries = {}
        for key, bias in (parameters.logit_bias or {}).items():
            digits = key.isascii() and key.isdigit() and len(key) <= LONGEST_ID
            if not (digits and int(key) < self.target.size):
                raise InvalidRequestError(
                    f"{place}.logit_bias must have ids in [0, {self.target.size}) as keys, "
                    f"got {key[:40]!r}",
                    f"{place}.logit_bias",
                )
            entries[int(key)] = bias
        return tuple(entries.items())


LONGEST_ID = 20
"""Digits of an id that is a key; int() takes long to read many, and refuses thousands."""

DECIDED = {"max_new_tokens", "seed", "bad_words", "logit_bias", "stop", "top_n_tokens"}
"""Parameters that `Planner` turns into what the engine takes; the others it takes as they are."""

PASSED_ON = [
    field.name
    for field in fields(Decoding)
    if field.name in GenerationParameters.model_fields and field.name not in DECIDED
]


def _given(parameters: GenerationParameters) -> dict[str, Any]:
    """The parameters that the engine takes as they are, where they are set."""
    values = {name: getattr(parameters, name) for name in PASSED_ON}
    return {name: value for name, value in values.items() if value is not None}


def wants_details(parameters: GenerationParameters) -> bool:
    """`top_n_tokens` are part of the details, so they imply them."""
    return parameters.details or parameters.top_n_tokens > 0


def _wishes(parameters: GenerationParameters, place: str) -> tuple[Wish, Wish]:
    """The languages of source and target."""
    return (
        Wish(parameters.src_lang, f"{place}.src_lang"),
        Wish(parameters.tgt_lang, f"{place}.tgt_lang"),
    )


def _prefix_field(parameters: GenerationParameters) -> str:
    return "target_prefix_ids" if parameters.target_prefix_ids else "target_prefix"


def _new_tokens(parameters: GenerationParameters, room: int, spec: ModelSpec, place: str) -> int:
    wanted = parameters.max_new_tokens
    if wanted is None:
        length, least = min(spec.default_max_new_tokens, room), parameters.min_new_tokens or 0
        if least > length:
            raise InvalidRequestError(
                f"{place}.min_new_tokens must be at most max_new_tokens, {length} here, "
                f"got {least}",
                f"{place}.min_new_tokens",
            )
        return length
    if wanted > room:
        raise InvalidRequestError(
            f"{place}.max_new_tokens must be at most {room} here (the model's target takes "
            f"{spec.max_tgt} tokens), got {wanted}",
            f"{place}.max_new_tokens",
        )
    return wanted


def _seed(parameters: GenerationParameters) -> int | None:
    if not parameters.samples:
        return None
    return parameters.seed if parameters.seed is not None else secrets.randbelow(MAX_SEED + 1)


# --- answering -----------------------------------------------------------------------------------


def runs_of(plan: Plan, events: Mapping[Row, Sequence[TokenEvent]]) -> list[Run]:
    """The continuations of a plan, best first."""
    if not plan.sequences:
        return [Run()] * plan.answers
    if plan.sequences[0].decoding.num_beams == 1:
        return [Run(events[row]) for row in plan.sequences]
    [row] = plan.sequences
    hypotheses = events[row][-1].hypotheses[: plan.answers]
    return [Run(_events_of(row, h), shortest(h.score)) for h in hypotheses]


def _events_of(row: Row, hypothesis: Hypothesis) -> list[TokenEvent]:
    """A finished beam, told like a sequence that was decoded alone."""
    last = len(hypothesis.tokens) - 1
    return [
        TokenEvent(
            sequence=row,
            index=index,
            token=token,
            logprob=hypothesis.logprobs[index] if hypothesis.logprobs else None,
            top_tokens=hypothesis.top_tokens[index] if hypothesis.top_tokens else (),
            finish_reason=hypothesis.finish_reason if index == last else None,
        )
        for index, token in enumerate(hypothesis.tokens)
    ]


def _finish_reason(plan: Plan, events: Sequence[TokenEvent]) -> FinishReason:
    if events:
        reason = events[-1].finish_reason
        assert reason
        return reason
    return "eos_token" if plan.source.blank else "length"


class Stream:
    """Turns the engine's events of one plan into the events of a stream, in order.

    Of a beam search, tokens come as soon as all its hypotheses agree on them; the further
    sequences come when it has ended.
    """

    def __init__(self, generator: Generator, plan: Plan) -> None:
        self._generator = generator
        self._plan = plan
        self._numbers = {row: number for number, row in enumerate(plan.sequences)}
        self._tellers = [self._teller(number) for number in range(len(plan.sequences))]

    def nothing(self) -> list[StreamEvent]:
        """All events of a plan without anything to generate: one, without a token."""
        return [
            event
            for number in range(self._plan.answers)
            for event in [self._teller(number).empty()]
        ]

    def push(self, event: TokenEvent) -> list[StreamEvent]:
        """What an event of the engine lets be told."""
        number = self._numbers[event.sequence]
        best = shortest(event.hypotheses[0].score) if event.hypotheses else None
        told = self._tellers[number].push(event, best)
        for place, hypothesis in enumerate(event.hypotheses[1 : self._plan.answers], start=1):
            teller = self._teller(place)
            for further in _events_of(event.sequence, hypothesis):
                told.extend(teller.push(further, shortest(hypothesis.score)))
        return told

    def _teller(self, number: int) -> _Teller:
        return _Teller(self._generator, self._plan, number)


@dataclass
class _Teller:
    """The stream of one sequence."""

    generator: Generator
    plan: Plan
    number: int
    _events: list[TokenEvent] = field(default_factory=list)
    _spelled: list[Spelled] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._speller = self.generator.speller(self.plan)

    def push(self, event: TokenEvent, score: float | None) -> list[StreamEvent]:
        self._events.append(event)
        certain = self._speller.push(event)
        self._spelled.extend(certain)
        told = [self._told(spelled) for spelled in certain]
        if event.finish_reason:
            told[-1] = told[-1].model_copy(update=self._end(score))
        return told

    def empty(self) -> StreamEvent:
        return StreamEvent(index=0, sequence=self.number, token=None, **self._end(None))

    def _told(self, spelled: Spelled) -> StreamEvent:
        event = StreamEvent(
            index=spelled.event.index,
            sequence=self.number,
            token=self.generator.token(spelled),
            generated_text=None,
            details=None,
        )
        if not self.plan.parameters.top_n_tokens:
            return event
        return event.model_copy(update={"top_tokens": self.generator.top_tokens(spelled.event)})

    def _end(self, score: float | None) -> dict[str, Any]:
        run = Run(self._events, score)
        details = self.generator.details(
            self.plan, run, self._spelled, tokens=wants_details(self.plan.parameters)
        )
        text = self.generator.text(self.plan, self._speller)
        return {"generated_text": text, "details": details}
