"""Who translates what: the languages of each model as directions that callers may ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from model.checkpoint import ModelError
from model.languages import Languages
from model.loader import LoadedModel
from seqserve.errors import InvalidRequestError
from service.generation import Generator
from service.language_codes import codes_of, known_code, language_code, language_name
from service.sentences import SplitText, split
from service.settings import ANY_LANGUAGE, Pair
from service.validation import shown

Codes = Mapping[str, str | None]
"""Code of a language -> what the model is to be told of it; None: nothing."""


@dataclass(frozen=True)
class Directions:
    """From each of some languages to each of some others, with one model.

    Attributes:
        model: its name.
        task: what the model calls this, where it knows it by a task's name.
    """

    model: str
    sources: Codes
    targets: Codes
    task: str | None = None


@dataclass(frozen=True)
class Direction:
    """One language to another, and what a request for it names.

    Attributes:
        source, target: codes.
        model, task, src_lang, tgt_lang: of the request.
    """

    source: str
    target: str
    model: str
    task: str | None
    src_lang: str | None
    tgt_lang: str | None


@dataclass(frozen=True)
class Translator:
    """The directions of all models; where two offer one, the first has it."""

    directions: Sequence[Directions]

    @property
    def languages(self) -> dict[str, list[str]]:
        """Code -> codes that it can be translated to, English first, the others by their names."""
        targets: dict[str, set[str]] = {}
        for each in self.directions:
            for source in each.sources:
                targets.setdefault(source, set()).update(each.targets.keys() - {source})
        sources = (source for source, reached in targets.items() if reached)
        in_order = sorted(sources, key=lambda code: (code != "en", language_name(code)))
        return {source: sorted(targets[source]) for source in in_order}

    def find(self, source: str, target: str) -> Direction:
        """The direction that a caller asks for.

        Raises:
            InvalidRequestError: there is none; the message says which language is at fault.
        """
        for each in self.directions:
            src, tgt = known_code(source, each.sources), known_code(target, each.targets)
            if src and tgt and src != tgt:
                told = each.sources[src], each.targets[tgt]
                return Direction(src, tgt, each.model, each.task, *told)
        raise self._refusal(source, target)

    def _refusal(self, source: str, target: str) -> InvalidRequestError:
        sources = {code for each in self.directions for code in each.sources}
        targets = {code for each in self.directions for code in each.targets}
        if not sources:
            return InvalidRequestError(
                "no model of this server translates: none names its languages, nor does a pair "
                f"(--pair), got source {shown(source)}",
                "source",
            )
        for name, value, codes in (("source", source, sources), ("target", target, targets)):
            if known_code(value, codes) is None:
                return InvalidRequestError(
                    f"{name} must be a language of this server (/languages lists them), got "
                    f"{shown(value)}",
                    name,
                )
        return InvalidRequestError(
            f"target must be a language that {shown(source)} is translated to (/languages lists "
            f"them), got {shown(target)}",
            "target",
        )


def directions_of(name: str, loaded: LoadedModel, pairs: Iterable[Pair]) -> list[Directions]:
    """What a model translates: its pairs, if any are set, or else from each of its languages to
    each other, if it is told both.

    Args:
        name: of the model.
        pairs: those that are set for it.

    Raises:
        ModelError: it cannot translate a pair.
    """
    pairs = list(pairs)
    if pairs and not (loaded.source_tokenizer and loaded.target_tokenizer):
        raise ModelError(f"pair {pairs[0]}: the model has no tokenizer, so it takes no texts")
    if pairs:
        return [_pair(name, loaded, pair) for pair in pairs]
    languages = loaded.languages
    if languages is None or languages.target == "start" or _knows_targets_only(languages):
        return []  # made for one direction, or for one source, which nothing tells
    codes = codes_of(languages.ids)
    return [Directions(name, _sources(languages, codes), codes)]


def _pair(name: str, loaded: LoadedModel, pair: Pair) -> Directions:
    languages = loaded.languages
    if languages is None:
        source, target = _code(pair, pair.source), _code(pair, pair.target)
        task = f"translation_{source}_to_{target}"
        known = task in loaded.spec.tasks and not loaded.spec.tasks[task].fault
        return Directions(name, {source: None}, {target: None}, task if known else None)
    codes = codes_of(languages.ids)
    targets = _chosen(pair, pair.target, codes)
    if _knows_targets_only(languages):
        return Directions(name, {_code(pair, pair.source): None}, targets)
    return Directions(name, _sources(languages, _chosen(pair, pair.source, codes)), targets)


def _knows_targets_only(languages: Languages) -> bool:
    """Marian's: its tokens are of targets; what it was trained to read they do not say."""
    return languages.written is not None


def _sources(languages: Languages, codes: Mapping[str, str]) -> Codes:
    """Languages of sources, which not every model is told."""
    told = languages.source_names == "src_lang"
    return {code: name if told else None for code, name in codes.items()}


def _chosen(pair: Pair, wanted: str, codes: Mapping[str, str]) -> dict[str, str]:
    """The language that one side of a pair names, or all of the model's."""
    if wanted == ANY_LANGUAGE:
        return dict(codes)
    code = known_code(wanted, codes)
    if code is None:
        raise ModelError(f"pair {pair}: {wanted} is no language of this model")
    return {code: codes[code]}


def _code(pair: Pair, name: str) -> str:
    if name == ANY_LANGUAGE:
        raise ModelError(
            f"pair {pair}: {ANY_LANGUAGE} needs a model that names its languages there; name one "
            "language, and repeat --pair for others"
        )
    code = language_code(name)
    if code is None:
        raise ModelError(f"pair {pair}: {name} is no language of ISO 639")
    return code


def sentences_of(text: str, generator: Generator, direction: Direction, place: str) -> SplitText:
    """The sentences of a text, none of them longer than the model takes.

    Args:
        place: how an error message calls the text.

    Raises:
        InvalidRequestError: one is longer and cannot be cut.
    """
    limit = generator.spec.max_src

    def lengths(sentences: Sequence[str]) -> list[int]:
        return generator.source_lengths(sentences, direction.task)

    found = split(text)
    if max(lengths(found.sentences), default=0) <= limit:
        return found
    found = found.shortened(lambda sentences: [n > limit for n in lengths(sentences)])
    longest = max(lengths(found.sentences))
    if longest > limit:
        raise InvalidRequestError(
            f"{place} has a sentence of {longest} tokens without a place to cut it, the model "
            f"takes at most {limit} (max_source_tokens)",
            place,
        )
    return found
