"""/logits and /next without HTTP: requests become teacher-forced passes, their events answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from model.config import ModelSpec
from model.sequence import Forward, ForwardEvent
from seqserve.errors import InvalidRequestError
from seqserve.schemas import LogitsRequest, NextRequest, NextResponse, NextToken, as_list, as_lists
from service.numbers import shortest
from service.vocabulary import Source, Vocabulary, read_sources


@dataclass(frozen=True)
class Inspector:
    """Plans and answers /logits and /next for one model. Pure: it runs nothing."""

    spec: ModelSpec
    source: Vocabulary
    target: Vocabulary

    # --- /logits ---------------------------------------------------------------------------------

    def plan_logits(self, request: LogitsRequest) -> list[Forward]:
        """One pass for each answer: for each input, or each target of the only input.

        Raises:
            InvalidRequestError: an input or target cannot be served; the message names it.
        """
        sources = self._sources(request)
        targets = self._targets(request)
        top_k = None if request.top_k is None else min(request.top_k, self.spec.tgt_vocab_size)
        if targets is None:
            fed = [self._fed(source, None, source.place) for source in sources]
        else:
            name = "targets" if request.targets is not None else "target_ids"
            sources = sources * len(targets) if len(sources) == 1 else sources
            places = _places(name, request.targets or request.target_ids, len(targets))
            fed = [
                self._fed(source, target, place)
                for source, target, place in zip(sources, targets, places, strict=True)
            ]
        return [
            Forward(source.ids, tgt, request.positions, top_k)
            for source, tgt in zip(sources, fed, strict=True)
        ]

    def size(self, passes: Sequence[Forward], padded: bool) -> int:
        """Numbers in the answer of /logits."""
        lengths = [len(p.tgt) if p.positions == "all" else 1 for p in passes]
        columns = passes[0].top_k or self.spec.tgt_vocab_size
        return columns * (len(passes) * max(lengths) if padded else sum(lengths))

    def _targets(self, request: LogitsRequest) -> list[list[int]] | None:
        if (texts := request.target_texts) is not None:
            return self.target.encode_open(texts, "targets")
        if (ids := request.target_id_lists) is None:
            return None
        places = _places("target_ids", request.target_ids, len(ids))
        for target, place in zip(ids, places, strict=True):
            self.target.check(target, place)
        return ids

    def _fed(self, source: Source, target: list[int] | None, place: str) -> list[int]:
        """What the decoder is fed."""
        if target is None:
            target = source.ids if self.spec.source_is_target else []
        fed = [*self.spec.decoder_start_ids, *target]
        if not fed:
            raise InvalidRequestError(f"{place} must have at least one token", place)
        if len(fed) > self.spec.max_tgt:
            raise InvalidRequestError(
                f"{place} has {len(fed)} tokens with the decoder start, the model takes at most "
                f"{self.spec.max_tgt}",
                place,
            )
        return fed

    # --- /next -----------------------------------------------------------------------------------

    def plan_next(self, request: NextRequest) -> list[Forward]:
        """One pass for each input.

        Raises:
            InvalidRequestError: an input or prefix cannot be served; the message names it.
        """
        sources = self._sources(request)
        prefixes, places = self._prefixes(request)
        if len(prefixes) == 1:
            prefixes, places = prefixes * len(sources), places * len(sources)
        top_k = min(request.top_k, self.spec.tgt_vocab_size)
        return [
            self._next(source, prefix, place, top_k)
            for source, prefix, place in zip(sources, prefixes, places, strict=True)
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

    def _next(self, source: Source, prefix: list[int], place: str, top_k: int) -> Forward:
        if self.spec.source_is_target:  # as when generating: both sides see all of it
            grown = [*source.ids, *prefix]
            return Forward(grown, self._fed(source, grown, source.place), "last", top_k)
        return Forward(source.ids, self._fed(source, prefix, place), "last", top_k)

    def _prefixes(self, request: NextRequest) -> tuple[list[list[int]], list[str]]:
        """Ids of the prefixes, and how error messages call them."""
        if (texts := request.target_prefix) is not None:
            prefixes = self.target.encode_open(as_list(texts), "target_prefix")
            return prefixes, _places("target_prefix", texts, len(prefixes))
        if (ids := request.target_prefix_ids) is None:
            return [[]], ["target_prefix"]
        prefixes = as_lists(ids)
        places = _places("target_prefix_ids", ids, len(prefixes))
        for prefix, place in zip(prefixes, places, strict=True):
            self.target.check(prefix, place)
        return prefixes, places

    # --- both ------------------------------------------------------------------------------------

    def _sources(self, request: LogitsRequest | NextRequest) -> list[Source]:
        indices = range(request.count)
        sources = read_sources(
            self.source,
            self.spec,
            request.texts,
            request.id_lists,
            [request.place(i) for i in indices],
        )
        for source in sources:
            if not source.ids:
                raise InvalidRequestError(
                    f"{source.place} must have at least one token here, got none", source.place
                )
        return sources


def _places(name: str, given: str | Sequence[Any] | None, count: int) -> list[str]:
    """How error messages call the entries of a field: by its name alone where it is not a list."""
    many = isinstance(given, list) and isinstance(given[0], str | list)
    return [f"{name}[{i}]" if many else name for i in range(count)]


def logits_as_json(event: ForwardEvent) -> dict[str, Any]:
    """One answer of /logits; arrays are float32."""
    arrays = {"logits": _numpy(event.logits)}
    if event.ids is not None:
        arrays = {"ids": _numpy(event.ids), "values": _numpy(event.logits)}
    if event.forward.positions == "last":
        arrays = {name: array[0] for name, array in arrays.items()}
    return {"target_ids": event.forward.tgt, **arrays}


def logits_as_safetensors(events: Sequence[ForwardEvent], pad_id: int) -> bytes:
    """All answers of /logits in one file.

    Tensors: `logits` ``[batch, tgt, vocab]`` float32 (with top_k: `values` and `ids`
    ``[batch, tgt, k]``), padded with 0, where tgt is 1 for `positions: last`; `target_lengths`
    ``[batch]``; `target_ids` ``[batch, longest target]``, padded with the model's pad id.
    """
    targets = [np.asarray(event.forward.tgt, dtype=np.int64) for event in events]
    tensors = {
        "target_lengths": np.asarray([len(target) for target in targets], dtype=np.int64),
        "target_ids": _stack(targets, pad_id),
    }
    values = _stack([_numpy(event.logits) for event in events], 0)
    if events[0].ids is None:
        tensors["logits"] = values
    else:
        tensors["values"] = values
        tensors["ids"] = _stack([_numpy(e.ids) for e in events if e.ids is not None], 0)
    return bytes(save(tensors))


def _numpy(tensor: Any) -> NDArray[Any]:
    return np.ascontiguousarray(tensor.numpy())


def _stack(arrays: Sequence[NDArray[Any]], padding: int) -> NDArray[Any]:
    """Arrays of one width and several lengths -> ``[batch, longest, ...]``."""
    longest = max(len(array) for array in arrays)
    stacked = np.full((len(arrays), longest, *arrays[0].shape[1:]), padding, arrays[0].dtype)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return stacked
