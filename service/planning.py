"""What a request left open, decided: the plan of each input, and the sequences that it takes."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from model.config import ModelSpec, Task
from model.sequence import Decoding
from model.sequence import Sequence as Row
from model.tokenizer import UNK
from seqserve.errors import InvalidRequestError
from seqserve.parameters import MAX_SEED, GenerationParameters
from service.defaults import with_defaults
from service.languages import Opening, Speech, Wish
from service.spelling import StopStrings
from service.vocabulary import Source, Vocabulary

BEAMS_PER_STEP = 2
"""For each beam: one that lives on and one that ends, at most."""


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
        """How many entries the details' `top_tokens` and `beam_steps` may come to."""
        if not self.sequences:
            return 0
        decoding = self.sequences[0].decoding
        beams = BEAMS_PER_STEP * decoding.num_beams if decoding.beam_steps else 0
        return decoding.max_new_tokens * (self.answers * decoding.top_n_tokens + beams)


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

    def under(self, task: Task) -> Planner:
        """The same for a task. What inputs share is still read once, as they share the task."""
        return replace(self, spec=self.spec.under(task))

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
        _, tgt = wishes(parameters, place)
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
                f"the model takes at most {spec.max_tgt} (max_target_tokens)",
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
    """`top_n_tokens` and `beam_steps` are part of the details, so they imply them."""
    return parameters.details or parameters.top_n_tokens > 0 or parameters.beam_steps


def wishes(parameters: GenerationParameters, place: str) -> tuple[Wish, Wish]:
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
            f"{spec.max_tgt} tokens, max_target_tokens), got {wanted}",
            f"{place}.max_new_tokens",
        )
    return wanted


def _seed(parameters: GenerationParameters) -> int | None:
    if not parameters.samples:
        return None
    return parameters.seed if parameters.seed is not None else secrets.randbelow(MAX_SEED + 1)
