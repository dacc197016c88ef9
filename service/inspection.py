"""/logits, /next, /score and /attention without HTTP.

Requests become teacher-forced passes, their events answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from model.config import ModelSpec
from model.languages import Languages
from model.sequence import Forward, ForwardEvent
from model.tokenizer import IncrementalDetokenizer
from model.transformer import Heads
from seqserve.errors import InvalidRequestError
from seqserve.schemas import (
    AttentionRequest,
    LogitsRequest,
    NextRequest,
    NextResponse,
    NextToken,
    ScoreRequest,
    ScoreResponse,
    Token,
    TokenizeRequest,
    as_list,
    as_lists,
)
from service.languages import Opening, Speech, Wish
from service.numbers import shortest, shortest_halves
from service.tensors import Padded, Tensor, TensorFile
from service.vocabulary import Source, Vocabulary, encode_sources, read_sources

Dtype = Literal["float32", "float16"]
TargetsRequest = LogitsRequest | ScoreRequest | AttentionRequest


@dataclass(frozen=True)
class Pair:
    """A source and the target that goes with it.

    Attributes:
        start: the decoder start.
        target: ids as asked for, a language's token included; None where none were.
        place: how an error message calls the target.
    """

    source: Source
    start: list[int]
    target: list[int] | None
    place: str


@dataclass(frozen=True)
class Inspector:
    """Plans and answers /logits, /next, /score and /attention for one model.

    Pure: it runs nothing.
    """

    spec: ModelSpec
    source: Vocabulary
    target: Vocabulary
    heads: Heads
    languages: Languages | None = None

    @property
    def speech(self) -> Speech:
        """What it makes of languages."""
        return Speech(self.spec, self.languages)

    # --- /logits ---------------------------------------------------------------------------------

    def plan_logits(self, request: LogitsRequest) -> list[Forward]:
        """One pass for each answer: for each input, or each target of the only input.

        Raises:
            InvalidRequestError: an input or target cannot be served; the message names it.
        """
        top_k = None if request.top_k is None else min(request.top_k, self.spec.tgt_vocab_size)
        return [
            Forward(pair.source.ids, self._fed(pair), request.positions, top_k)
            for pair in self._pairs(request)
        ]

    def size(self, passes: Sequence[Forward], padded: bool) -> int:
        """Numbers in the answer of /logits."""
        lengths = [len(p.tgt) if p.positions == "all" else 1 for p in passes]
        columns = passes[0].top_k or self.spec.tgt_vocab_size
        return columns * (len(passes) * max(lengths) if padded else sum(lengths))

    # --- /score ----------------------------------------------------------------------------------

    def plan_score(self, request: ScoreRequest) -> list[Forward]:
        """One pass for each answer.

        Raises:
            InvalidRequestError: an input or target cannot be served; the message names it.
        """
        return [self._scored(pair) for pair in self._pairs(request, ended=True)]

    def answer_score(self, event: ForwardEvent) -> ScoreResponse:
        """The log-probabilities of one target."""
        labels = event.forward.labels
        assert labels is not None
        assert event.logprobs is not None
        logprobs: list[float] = event.logprobs[:, 0].tolist()
        total = sum(logprobs)
        mean = total / len(logprobs)
        special = self.target.special_ids | {*self.spec.eos_ids}
        texts = _texts(self.target, labels)
        return ScoreResponse(
            tokens=[
                Token(id=id, text=text, logprob=shortest(logprob), special=id in special)
                for id, text, logprob in zip(labels, texts, logprobs, strict=True)
            ],
            logprob_sum=shortest(total),
            logprob_mean=shortest(mean),
            perplexity=_perplexity(mean),
        )

    def _scored(self, pair: Pair) -> Forward:
        """Each position predicts the label beside it."""
        target = pair.target
        if target is None and self.spec.source_is_target:
            target = pair.source.ids
        if target is None:
            raise InvalidRequestError(
                "targets (text) or target_ids (token ids) must be given", "targets"
            )
        start = pair.start
        labels = target if start else target[1:]  # else the first token is what the decoder starts
        if not labels:
            least = "one token" if start else "two tokens: the first is not predicted"
            raise InvalidRequestError(
                f"{pair.place} must have at least {least}, got {len(target)}", pair.place
            )
        fed = [*start, *target[:-1]]
        if len(fed) > self.spec.max_tgt:
            limit = self.spec.max_tgt - len(fed) + len(target)
            raise InvalidRequestError(
                f"{pair.place} has {len(target)} tokens, the model takes at most {limit} "
                "(max_target_tokens)",
                pair.place,
            )
        return Forward(pair.source.ids, fed, "all", labels=labels)

    # --- /attention ------------------------------------------------------------------------------

    def plan_attention(self, request: AttentionRequest) -> list[Forward]:
        """One pass for each answer.

        Raises:
            InvalidRequestError: an input or target cannot be served; the message names it.
        """
        return [
            Forward(pair.source.ids, self._fed(pair), attention=True)
            for pair in self._pairs(request)
        ]

    def attention_size(self, passes: Sequence[Forward], padded: bool) -> int:
        """Weights in the answer of /attention."""
        sizes = [(len(p.src), len(p.tgt)) for p in passes]
        if padded:
            longest = (max(src for src, _ in sizes), max(tgt for _, tgt in sizes))
            sizes = [longest] * len(sizes)
        return sum(self.heads.weights(src, tgt) for src, tgt in sizes)

    def answer_attention(self, event: ForwardEvent, dtype: Dtype) -> dict[str, Any]:
        """The weights of one pass as JSON; the arrays' digits are the shortest for the dtype."""
        maps = _maps(event, dtype)
        if dtype == "float16":
            maps = {name: shortest_halves(array) for name, array in maps.items()}
        return {
            "source_tokens": _names(self.source, event.forward.src),
            "target_tokens": _names(self.target, event.forward.tgt),
            "source_ids": event.forward.src,
            "target_ids": event.forward.tgt,
            **maps,
        }

    def attention_file(self, events: Sequence[ForwardEvent], dtype: Dtype) -> TensorFile:
        """The weights of all passes as safetensors.

        Tensors, padded with 0: `encoder` ``[batch, layers, heads, src, src]``, `decoder`
        ``[batch, layers, heads, tgt, tgt]``, `cross` ``[batch, layers, heads, tgt, src]``;
        `source_lengths` and `target_lengths` ``[batch]``; `source_ids` and `target_ids`
        ``[batch, longest]``, padded with the model's pad id. The metadata hold `source_tokens` and
        `target_tokens` as JSON, one list (or null) for each row.
        """
        sources = [np.asarray(event.forward.src, dtype=np.int64) for event in events]
        targets = [np.asarray(event.forward.tgt, dtype=np.int64) for event in events]
        maps = [_maps(event, dtype) for event in events]
        tensors: dict[str, Tensor] = {
            **{name: Padded(_same_size([m[name] for m in maps])) for name in maps[0]},
            "source_lengths": _lengths(sources),
            "target_lengths": _lengths(targets),
            "source_ids": Padded(sources, self.spec.pad_id),
            "target_ids": Padded(targets, self.spec.pad_id),
        }
        names = {
            "source_tokens": [_names(self.source, event.forward.src) for event in events],
            "target_tokens": [_names(self.target, event.forward.tgt) for event in events],
        }
        return TensorFile(tensors, {key: json.dumps(value) for key, value in names.items()})

    # --- /next -----------------------------------------------------------------------------------

    def plan_next(self, request: NextRequest) -> list[Forward]:
        """One pass for each input.

        Raises:
            InvalidRequestError: an input or prefix cannot be served; the message names it.
        """
        sources = self._sources(request)
        prefixes = self._prefixes(request)
        openings = self._openings(
            request, request.target_prefix is not None, request.target_prefix_ids is not None
        )
        if len(prefixes) == 1:
            prefixes = prefixes * len(sources)
        if len(sources) == 1:
            sources = sources * len(prefixes)
        top_k = min(request.top_k, self.spec.tgt_vocab_size)
        return [
            self._next(source, opening, prefix, request.prefix_place(i), top_k)
            for i, (source, opening, prefix) in enumerate(
                zip(sources, openings, prefixes, strict=True)
            )
        ]

    def answer_next(self, event: ForwardEvent) -> NextResponse:
        """The candidates of one pass, best first."""
        assert event.ids is not None
        assert event.logprobs is not None
        columns = (event.ids[0].tolist(), event.logits[0].tolist(), event.logprobs[0].tolist())
        tokens = [
            NextToken(
                id=id, text=self.target.name(id), logit=shortest(logit), logprob=shortest(logprob)
            )
            for id, logit, logprob in zip(*columns, strict=True)
        ]
        return NextResponse(tokens=tokens)

    def _next(
        self, source: Source, opening: Opening, prefix: list[int], place: str, top_k: int
    ) -> Forward:
        if self.spec.source_is_target:  # as when generating: both sides see all of it
            grown = [*source.ids, *prefix]
            fed = self._fed(Pair(source, opening.start, grown, source.place))
            return Forward(grown, fed, "last", top_k)
        fed = self._fed(Pair(source, opening.start, [*opening.first, *prefix], place))
        return Forward(source.ids, fed, "last", top_k)

    def _prefixes(self, request: NextRequest) -> list[list[int]]:
        if request.target_prefix is not None:
            return self.target.encode_open(as_list(request.target_prefix), "target_prefix")
        if request.target_prefix_ids is None:
            return [[]]
        prefixes = as_lists(request.target_prefix_ids)
        for i, prefix in enumerate(prefixes):
            self.target.check(prefix, request.prefix_place(i))
        return prefixes

    # --- /tokenize -------------------------------------------------------------------------------

    def tokenize(self, request: TokenizeRequest) -> list[list[int]]:
        """The ids of texts, with all that the model is given of them but the decoder start.

        Raises:
            InvalidRequestError: there is no tokenizer, or a language is not known or not one of
                this side.
        """
        texts = as_list(request.inputs)
        src, tgt = Wish(request.src_lang, "src_lang"), Wish(request.tgt_lang, "tgt_lang")
        if request.side == "target":
            if src.code is not None:
                raise InvalidRequestError('src_lang needs "side": "source"', "src_lang")
            first = self.speech.opening(tgt, needed=True).first
            return [[*first, *ids] for ids in self.target.encode_ended(texts, "inputs")]
        of_target = self.languages is not None and self.languages.source_names == "tgt_lang"
        if tgt.code is not None and self.languages is not None and not of_target:
            raise InvalidRequestError('tgt_lang needs "side": "target"', "tgt_lang")
        frames = [self.speech.frame(src, tgt, text=text) for text in texts]
        self.speech.opening(tgt)
        return encode_sources(self.source, texts, frames)

    # --- all of them -----------------------------------------------------------------------------

    def _pairs(self, request: TargetsRequest, ended: bool = False) -> list[Pair]:
        """The inputs with their targets: one for each, or several for the only input.

        Args:
            ended: whether text targets get the `</s>` of the tokenizer.
        """
        sources = self._sources(request)
        targets = self._targets(request, ended)
        openings = self._openings(
            request, request.target_texts is not None, request.target_id_lists is not None
        )
        if targets is None:
            return [
                Pair(source, opening.start, opening.first or None, source.place)
                for source, opening in zip(sources, openings, strict=True)
            ]
        if len(sources) == 1:
            sources = sources * len(targets)
        return [
            Pair(source, opening.start, [*opening.first, *target], request.target_place(i))
            for i, (source, opening, target) in enumerate(
                zip(sources, openings, targets, strict=True)
            )
        ]

    def _openings(
        self, request: TargetsRequest | NextRequest, texts: bool, ids: bool
    ) -> list[Opening]:
        """What each answer's target begins with."""
        return [
            self.speech.opening(_wish(request, "tgt_lang", i), ids=ids, needed=texts)
            for i in range(request.answers)
        ]

    def _targets(self, request: TargetsRequest, ended: bool) -> list[list[int]] | None:
        if (texts := request.target_texts) is not None:
            if ended:
                return self.target.encode_ended(texts, "targets")
            return self.target.encode_open(texts, "targets")
        if (ids := request.target_id_lists) is None:
            return None
        for i, target in enumerate(ids):
            self.target.check(target, request.target_place(i))
        return ids

    def _fed(self, pair: Pair) -> list[int]:
        """What the decoder is fed."""
        target = pair.target
        if target is None:
            target = pair.source.ids if self.spec.source_is_target else []
        fed = [*pair.start, *target]
        if not fed:
            raise InvalidRequestError(f"{pair.place} must have at least one token", pair.place)
        if len(fed) > self.spec.max_tgt:
            raise InvalidRequestError(
                f"{pair.place} has {len(fed)} tokens with the decoder start, the model takes at "
                f"most {self.spec.max_tgt} (max_target_tokens)",
                pair.place,
            )
        return fed

    def _check_one_language_each(self, request: TargetsRequest | NextRequest) -> None:
        """Several targets of one source share what the source says of their language."""
        if isinstance(request.tgt_lang, list) and len(request.tgt_lang) != request.count:
            raise InvalidRequestError(
                "tgt_lang must be one language for one input: this model's sources name it",
                "tgt_lang",
            )

    def _sources(self, request: TargetsRequest | NextRequest) -> list[Source]:
        indices = range(request.count)
        texts = request.texts
        if self.languages and self.languages.source_names == "tgt_lang" and texts is not None:
            self._check_one_language_each(request)
        sources = read_sources(
            self.source,
            self.spec,
            texts,
            request.id_lists,
            [request.place(i) for i in indices],
            frames=[
                self.speech.frame(
                    _wish(request, "src_lang", i),
                    _wish(request, "tgt_lang", i),
                    text=texts[i] if texts is not None else None,
                )
                for i in indices
            ],
        )
        for source in sources:
            if not source.ids:
                raise InvalidRequestError(
                    f"{source.place} must have at least one token here, got none", source.place
                )
        return sources


def _wish(request: TargetsRequest | NextRequest, name: str, index: int) -> Wish:
    """The language of an input, or of an answer."""
    given = getattr(request, name)
    if isinstance(given, list):
        return Wish(given[index], f"{name}[{index}]")
    return Wish(given, name)


def logits_as_json(event: ForwardEvent) -> dict[str, Any]:
    """One answer of /logits; arrays are float32."""
    arrays = {"logits": _numpy(event.logits)}
    if event.ids is not None:
        arrays = {"ids": _numpy(event.ids), "values": _numpy(event.logits)}
    if event.forward.positions == "last":
        arrays = {name: array[0] for name, array in arrays.items()}
    return {"target_ids": event.forward.tgt, **arrays}


def logits_as_safetensors(events: Sequence[ForwardEvent], pad_id: int) -> TensorFile:
    """All answers of /logits in one file.

    Tensors: `logits` ``[batch, tgt, vocab]`` float32 (with top_k: `values` and `ids`
    ``[batch, tgt, k]``), padded with 0, where tgt is 1 for `positions: last`; `target_lengths`
    ``[batch]``; `target_ids` ``[batch, longest target]``, padded with the model's pad id.
    """
    targets = [np.asarray(event.forward.tgt, dtype=np.int64) for event in events]
    tensors: dict[str, Tensor] = {
        "target_lengths": _lengths(targets),
        "target_ids": Padded(targets, pad_id),
    }
    values = Padded([_numpy(event.logits) for event in events])
    if events[0].ids is None:
        tensors["logits"] = values
    else:
        tensors["values"] = values
        tensors["ids"] = Padded([_numpy(e.ids) for e in events if e.ids is not None])
    return TensorFile(tensors)


def _texts(vocabulary: Vocabulary, ids: Sequence[int]) -> list[str | None]:
    """What each token adds to the text, or a special token's name; None without a tokenizer."""
    tokenizer = vocabulary.tokenizer
    if tokenizer is None:
        return [None] * len(ids)
    detokenizer = IncrementalDetokenizer(tokenizer)
    texts: list[str | None] = []
    last = None
    for i, id in enumerate(ids):
        spelled = id not in vocabulary.special_ids
        texts.append(detokenizer.push(id) if spelled else vocabulary.name(id))
        last = i if spelled else last
    if last is not None:
        texts[last] = (texts[last] or "") + detokenizer.finish()
    return texts


def _names(vocabulary: Vocabulary, ids: Sequence[int]) -> list[str | None] | None:
    """The vocabulary's names of ids; None without a tokenizer."""
    return None if vocabulary.tokenizer is None else [vocabulary.name(id) for id in ids]


def _perplexity(mean: float) -> float | None:
    """``exp(-mean)``; None where that is no finite float32."""
    with np.errstate(over="ignore"):
        return shortest(float(np.exp(np.float32(-mean))))


def _maps(event: ForwardEvent, dtype: Dtype) -> dict[str, NDArray[Any]]:
    assert event.attention
    found = event.attention
    maps = {"encoder": found.encoder, "decoder": found.decoder, "cross": found.cross}
    return {name: _numpy(tensor).astype(dtype) for name, tensor in maps.items()}


def _same_size(maps: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """``[layers, heads, query, key]`` of several sizes, all padded with 0 to the largest."""
    queries, keys = (max(m.shape[axis] for m in maps) for axis in (2, 3))
    return [
        np.pad(m, ((0, 0), (0, 0), (0, queries - m.shape[2]), (0, keys - m.shape[3]))) for m in maps
    ]


def _lengths(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """``[batch]``."""
    return np.asarray([len(array) for array in arrays], dtype=np.int64)


def _numpy(tensor: Any) -> NDArray[Any]:
    return np.ascontiguousarray(tensor.numpy())
