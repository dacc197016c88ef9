"""/generate without HTTP: a request becomes plans, a plan sequences, their events an answer.

The command line goes the same way, and so does a stream, which hands the same pieces out earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from model.config import ModelSpec
from model.languages import Languages
from model.sequence import Beam, Hypothesis, TokenEvent
from model.sequence import Sequence as Row
from seqserve.schemas import (
    BeamToken,
    Details,
    FinishReason,
    Generated,
    GenerateRequest,
    GenerateResponse,
    StreamEvent,
    Token,
)
from service.languages import Speech
from service.numbers import shortest
from service.planning import Plan, Planner, wants_details, wishes
from service.spelling import Spelled, Speller
from service.tasks import prefixed, task_of
from service.vocabulary import Vocabulary, read_sources

LANGUAGE_FRAME = 2
"""Tokens that a language puts around a source text, at most."""


@dataclass(frozen=True)
class Run:
    """The tokens of one continuation; `score` and, with the best, `steps` are a beam search's."""

    events: Sequence[TokenEvent] = ()
    score: float | None = None
    steps: Sequence[Sequence[Beam]] = ()


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
        tasks = [
            task_of(self.spec, parameters[i].task, f"{request.parameters_place(i)}.task")
            for i in indices
        ]
        texts = request.texts
        if texts is not None:
            texts = [prefixed(task, text) for task, text in zip(tasks, texts, strict=True)]
        spoken = [wishes(parameters[i], request.parameters_place(i)) for i in indices]
        sources = read_sources(
            self.source,
            self.spec,
            texts,
            request.id_lists,
            [request.place(i) for i in indices],
            [p.truncate for p in parameters],
            [
                self.speech.frame(src, tgt, text=texts[i] if texts is not None else None)
                for i, (src, tgt) in enumerate(spoken)
            ],
        )
        planner = Planner(
            self.spec,
            self.target,
            stream=bool(request.stream),
            speech=self.speech,
            text=texts is not None,
        )
        return [
            planner.under(tasks[i]).plan(sources[i], parameters[i], request.parameters_place(i))
            for i in indices
        ]

    def source_lengths(self, texts: Sequence[str], task: str | None) -> list[int]:
        """How many tokens each of some source texts has, with what is put around it.

        Args:
            task: as requests name it.

        Raises:
            InvalidRequestError: there is no such task, or no tokenizer.
        """
        asked = task_of(self.spec, task, "task")
        encoded = self.source.encode_bare([prefixed(asked, text) for text in texts], "inputs")
        frame = LANGUAGE_FRAME if self.languages else len(self.source.frame)
        return [len(ids) + frame for ids in encoded]

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
        more: dict[str, Any] = {}
        if plan.parameters.top_n_tokens and tokens:
            more["top_tokens"] = [self.top_tokens(event) for event in run.events]
        if run.steps:
            more["beam_steps"] = [[self._beam(beam) for beam in step] for step in run.steps]
        return details.model_copy(update=more)

    def token(self, spelled: Spelled) -> Token:
        event = spelled.event
        return Token(
            id=event.token,
            text=spelled.text,
            logprob=shortest(event.logprob),
            special=spelled.special or event.token in self.spec.eos_ids,
        )

    def top_tokens(self, event: TokenEvent) -> list[Token]:
        return [self._candidate(other.id, other.logprob) for other in event.top_tokens]

    def _beam(self, beam: Beam) -> BeamToken:
        return BeamToken(
            parent=beam.parent,
            token=self._candidate(beam.token, beam.logprob),
            score=shortest(beam.score),
            finished=beam.finished,
        )

    def _candidate(self, id: int, logprob: float | None) -> Token:
        return Token(
            id=id,
            text=self.target.name(id),
            logprob=shortest(logprob),
            special=id in self.target.special_ids or id in self.spec.eos_ids,
        )

    def _tell(self, plan: Plan, run: Run) -> Generated:
        speller = self.speller(plan)
        spelled = [s for event in run.events for s in speller.push(event)]
        told = Generated(generated_text=self.text(plan, speller), score=run.score)
        if not wants_details(plan.parameters):
            return told
        details = self.details(plan, run, spelled, tokens=True)
        return told.model_copy(update={"details": details})


def runs_of(plan: Plan, events: Mapping[Row, Sequence[TokenEvent]]) -> list[Run]:
    """The continuations of a plan, best first."""
    if not plan.sequences:
        return [Run()] * plan.answers
    if plan.sequences[0].decoding.num_beams == 1:
        return [Run(events[row]) for row in plan.sequences]
    [row] = plan.sequences
    last = events[row][-1]
    best, *others = [
        Run(_events_of(row, h), shortest(h.score)) for h in last.hypotheses[: plan.answers]
    ]
    return [replace(best, steps=last.beam_steps), *others]


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
        steps = self._events[-1].beam_steps if self._events else ()
        run = Run(self._events, score, steps)
        details = self.generator.details(
            self.plan, run, self._spelled, tokens=wants_details(self.plan.parameters)
        )
        text = self.generator.text(self.plan, self._speller)
        return {"generated_text": text, "details": details}
