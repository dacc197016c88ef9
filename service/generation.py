"""/generate without HTTP: a request becomes plans, a plan a sequence, its events an answer.

The command line goes the same way.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from model.config import ModelSpec
from model.sequence import Candidate, Decoding, TokenEvent
from model.sequence import Sequence as Row
from seqserve.errors import InvalidRequestError
from seqserve.parameters import MAX_SEED, GenerationParameters
from seqserve.schemas import Details, FinishReason, GenerateRequest, GenerateResponse, Token
from service.numbers import shortest
from service.vocabulary import Source, Vocabulary, read_sources, spell

LOWEST_TEMPERATURE = 1e-6
"""Lower ones draw the same tokens, and would carry float32 logits over its range."""


@dataclass(frozen=True)
class Plan:
    """What is to be done for one input.

    Attributes:
        prefix: target prefix, without the decoder start.
        seed: of the draws; None without sampling.
        sequence: what the engine runs; None if there is nothing to generate.
    """

    source: Source
    prefix: list[int]
    parameters: GenerationParameters
    seed: int | None
    sequence: Row | None

    @property
    def most_candidates(self) -> int:
        """How many entries the details' `top_tokens` may come to."""
        if self.sequence is None:
            return 0
        return self.sequence.decoding.max_new_tokens * self.sequence.decoding.top_n_tokens


@dataclass(frozen=True)
class Generator:
    """Plans and answers /generate for one model. Pure: it runs nothing."""

    spec: ModelSpec
    source: Vocabulary
    target: Vocabulary

    def plan(self, request: GenerateRequest) -> list[Plan]:
        """One plan for each input.

        Raises:
            InvalidRequestError: an input cannot be served; the message names it.
        """
        indices = range(request.count)
        parameters = [request.parameters_of(i) for i in indices]
        sources = read_sources(
            self.source,
            self.spec,
            request.texts,
            request.id_lists,
            [request.place(i) for i in indices],
            [p.truncate for p in parameters],
        )
        return [self._plan(sources[i], parameters[i], request.parameters_place(i)) for i in indices]

    def answer(self, plan: Plan, events: Sequence[TokenEvent]) -> GenerateResponse:
        """What became of a plan."""
        ids = [event.token for event in events]
        text, pieces = self._spell(plan, ids)
        if not wants_details(plan.parameters):
            return GenerateResponse(generated_text=text)
        return GenerateResponse(generated_text=text, details=self._details(plan, events, pieces))

    # --- planning --------------------------------------------------------------------------------

    def _plan(self, source: Source, parameters: GenerationParameters, place: str) -> Plan:
        prefix = self._prefix(parameters, place)
        room = self._room(source, prefix, f"{place}.{_prefix_field(parameters)}")
        length = _new_tokens(parameters.max_new_tokens, room, self.spec, place)
        seed = _seed(parameters)
        sequence = None
        if length and not source.blank:
            start = [*self.spec.decoder_start_ids, *prefix]
            sequence = Row(source.ids, start, self._decoding(parameters, length, seed))
        return Plan(source, prefix, parameters, seed, sequence)

    def _prefix(self, parameters: GenerationParameters, place: str) -> list[int]:
        field = f"{place}.{_prefix_field(parameters)}"
        if parameters.target_prefix is not None:
            return self.target.encode_open([parameters.target_prefix], field)[0]
        ids = parameters.target_prefix_ids or []
        self.target.check(ids, field)
        return ids

    def _room(self, source: Source, prefix: list[int], field: str) -> int:
        """Tokens that can be generated before the decoder is full."""
        spec = self.spec
        start = len(spec.decoder_start_ids) + len(prefix)
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
        self, parameters: GenerationParameters, max_new_tokens: int, seed: int | None
    ) -> Decoding:
        vocabulary = self.spec.tgt_vocab_size
        return Decoding(
            max_new_tokens=max_new_tokens,
            sample=parameters.samples,
            temperature=max(parameters.temperature or 1.0, LOWEST_TEMPERATURE),
            top_k=min(parameters.top_k or 0, vocabulary),
            top_p=parameters.top_p or 1.0,
            seed=seed or 0,
            top_n_tokens=min(parameters.top_n_tokens, vocabulary),
            logprobs=wants_details(parameters),
        )

    # --- answering -------------------------------------------------------------------------------

    def _spell(self, plan: Plan, ids: list[int]) -> tuple[str | None, list[str | None]]:
        """The generated text, and each token's share in it."""
        if self.target.tokenizer is None:
            return None, [None for _ in ids]
        before, pieces = spell(self.target, plan.prefix, ids)
        special = self.target.special_ids
        text = "".join(p for id, p in zip(ids, pieces, strict=True) if id not in special)
        return (before if plan.parameters.return_full_text else "") + text, [*pieces]

    def _details(
        self, plan: Plan, events: Sequence[TokenEvent], pieces: Sequence[str | None]
    ) -> Details:
        source = plan.source
        details = Details(
            finish_reason=_finish_reason(plan, events),
            input_tokens=len(source.ids),
            unknown_tokens=source.unknown,
            truncated=source.truncated,
            generated_tokens=len(events),
            seed=plan.seed,
            score=None,
            prefill=[],
            tokens=[
                self._token(event.token, text, event.logprob)
                for event, text in zip(events, pieces, strict=True)
            ],
        )
        if not plan.parameters.top_n_tokens:
            return details
        top = [[self._candidate(c) for c in event.top_tokens] for event in events]
        return details.model_copy(update={"top_tokens": top})

    def _token(self, id: int, text: str | None, logprob: float | None) -> Token:
        special = id in self.target.special_ids or id == self.spec.eos_id
        return Token(id=id, text=text, logprob=shortest(logprob), special=special)

    def _candidate(self, candidate: Candidate) -> Token:
        return self._token(candidate.id, self.target.name(candidate.id), candidate.logprob)


def wants_details(parameters: GenerationParameters) -> bool:
    """`top_n_tokens` are part of the details, so they imply them."""
    return parameters.details or parameters.top_n_tokens > 0


def _prefix_field(parameters: GenerationParameters) -> str:
    return "target_prefix_ids" if parameters.target_prefix_ids else "target_prefix"


def _new_tokens(wanted: int | None, room: int, spec: ModelSpec, place: str) -> int:
    if wanted is None:
        return min(spec.default_max_new_tokens, room)
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


def _finish_reason(plan: Plan, events: Sequence[TokenEvent]) -> FinishReason:
    if events:
        reason = events[-1].finish_reason
        assert reason
        return reason
    return "eos_token" if plan.source.blank else "length"
