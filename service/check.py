"""`seqserve check`: one directory, loaded here and by `transformers`, and what both make of it.

The parity tests measure with the same functions, on random checkpoints.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.attention import padding_mask
from model.config import EngineConfig
from model.engine import Engine
from model.loader import LoadedModel
from model.multilingual import read_settings
from model.sequence import Forward, ForwardEvent, TokenEvent
from model.sequence import Sequence as Row
from model.steppers import pad_rows
from model.transformer import Transformer
from seqserve.errors import InvalidRequestError
from seqserve.schemas import GenerateRequest, TokenizeRequest
from service.planning import Plan
from service.served import generator_of, inspector_of
from service.vocabulary import Side

TOLERANCE = 1e-4
"""Of float32: what two orders of the same additions may differ by, for values of about 1."""

SOURCES = 8
LONGEST = 32
"""Of random sources and targets, in tokens."""

NEW_TOKENS = 64
"""That greedy decoding generates at most, unless the model asks for a longer minimum."""


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "source.spm",
)
"""Without any of them `AutoTokenizer` would make up a tokenizer with an empty vocabulary."""


class CheckError(Exception):
    """There is nothing to compare with; the message says why."""


# --- both sides ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Both:
    """One model in memory twice.

    Attributes:
        reference: a model of `transformers`, in float32, in eval mode.
        ours: the same weights, loaded here.
    """

    reference: Any
    ours: LoadedModel

    @property
    def network(self) -> Transformer:
        assert isinstance(self.ours.network, Transformer)
        return self.ours.network

    @property
    def pad(self) -> int:
        return self.ours.spec.pad_id

    @property
    def start(self) -> list[int]:
        return list(self.ours.spec.decoder_start_ids)

    def sources(self, count: int, seed: int = 0, longest: int = 14) -> list[list[int]]:
        """Ragged random sources."""
        return self._draw(self.ours.spec.src_vocab_size, count, seed, longest)

    def targets(self, count: int, seed: int = 0, longest: int = 14) -> list[list[int]]:
        """Ragged random decoder inputs, decoder start first."""
        drawn = self._draw(self.ours.spec.tgt_vocab_size, count, seed + 1000, longest)
        return [[*self.start, *ids] for ids in drawn]

    def _draw(self, vocab: int, count: int, seed: int, longest: int) -> list[list[int]]:
        rng = random.Random(seed)
        allowed = [id for id in range(vocab) if id != self.pad]
        return [rng.choices(allowed, k=rng.randint(1, longest)) for _ in range(count)]


# --- the reference's answers ---------------------------------------------------------------------


@torch.no_grad()
def reference_memory(both: Both, sources: Sequence[Sequence[int]]) -> Tensor:
    """Encoder output of all sources together, ``[sources, longest, dim]``."""
    ids = pad_rows(sources, both.pad, torch.device("cpu"))
    mask = _real(sources)[:, 0, 0].long()
    encoded: Tensor = both.reference.get_encoder()(ids, attention_mask=mask).last_hidden_state
    return encoded


@torch.no_grad()
def reference_logits(both: Both, source: Sequence[int], target: Sequence[int]) -> Tensor:
    """Of one pair alone, ``[tgt, vocab]``."""
    ids = torch.tensor([list(source)])
    out = both.reference(input_ids=ids, decoder_input_ids=torch.tensor([list(target)]))
    logits: Tensor = out.logits[0]
    return logits


@torch.no_grad()
def reference_tokens(both: Both, source: Sequence[int], **options: Any) -> list[list[int]]:
    """What `generate` says of one source, without decoder start and what follows `</s>`."""
    ids = torch.tensor([list(source)])
    answers = both.reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return [cut(answer[1:].tolist(), both.ours.spec.eos_ids) for answer in answers]


def cut(ids: list[int], ends: Collection[int]) -> list[int]:
    """Up to the first token that ends a target."""
    end = next((i for i, id in enumerate(ids) if id in ends), len(ids))
    return ids[: end + 1]


# --- ours ----------------------------------------------------------------------------------------


@torch.inference_mode()
def our_memory(both: Both, sources: Sequence[Sequence[int]]) -> Tensor:
    """Encoder output of all sources together, ``[sources, longest, dim]``."""
    ids = pad_rows(sources, both.pad, torch.device("cpu"))
    return both.network.encode(ids, _real(sources))


def our_logits(both: Both, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Tensor]:
    """Of all pairs together, ``[tgt, vocab]`` each."""
    engine = Engine(both.ours, EngineConfig())
    work = [Forward(src, tgt, positions="all") for src, tgt in pairs]
    for forward in work:
        engine.submit(forward)
    found = {e.forward: e.logits for e in engine.run() if isinstance(e, ForwardEvent)}
    return [found[forward] for forward in work]


def our_plan(both: Both, source: list[int], **parameters: Any) -> Plan:
    """How a request with this source and these parameters is served."""
    request = GenerateRequest.model_validate({"input_ids": source, "parameters": parameters})
    [plan] = generator_of(both.ours).plan(request)
    return plan


def run_rows(both: Both, rows: Sequence[Row], max_rows: int = EngineConfig.max_rows) -> list[Any]:
    """Of all rows together: greedy tokens, or a beam search's hypotheses."""
    engine = Engine(both.ours, EngineConfig(max_rows=max_rows))
    for row in rows:
        engine.submit(row)
    hypotheses = {}
    for event in engine.run():
        if isinstance(event, TokenEvent) and event.hypotheses:
            hypotheses[event.sequence] = event.hypotheses
    return [hypotheses.get(row, row.tokens) for row in rows]


def _real(rows: Sequence[Sequence[int]]) -> Tensor:
    """Where rows are not padding, ``[rows, 1, 1, longest]``."""
    return padding_mask(torch.tensor([len(row) for row in rows]), max(map(len, rows)))


# --- differences ---------------------------------------------------------------------------------


def memory_differences(both: Both, sources: Sequence[Sequence[int]]) -> list[Difference]:
    """Of the encoder's outputs, each source's without its padding."""
    return [
        Difference.between(ours[: len(source)], theirs[: len(source)])
        for source, ours, theirs in zip(
            sources, our_memory(both, sources), reference_memory(both, sources), strict=True
        )
    ]


def logits_differences(
    both: Both, pairs: Sequence[tuple[list[int], list[int]]]
) -> list[Difference]:
    """Of all logits of whole targets: here in one batch, in the reference alone."""
    return [
        Difference.between(ours, reference_logits(both, *pair))
        for pair, ours in zip(pairs, our_logits(both, pairs), strict=True)
    ]


@dataclass(frozen=True)
class Difference:
    """How far two tensors are apart.

    Attributes:
        largest: absolute difference of two values in one place; not finite where only one of them
            is.
        bound: what rounding explains: `TOLERANCE` for values up to 1, and in proportion to the
            reference's largest where that is more.
    """

    largest: float
    bound: float

    @classmethod
    def between(cls, ours: Tensor, theirs: Tensor) -> Difference:
        apart = (ours - theirs).abs().masked_fill(ours == theirs, 0.0)  # infinities may be equal
        size = theirs[theirs.isfinite()].abs().max().item() if theirs.isfinite().any() else 0.0
        return cls(float(apart.max()), TOLERANCE * max(1.0, size))

    def within(self, bound: float) -> bool:
        """Whether it is at most `bound`; what is no number never is."""
        return self.largest <= bound


# --- the check -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One kind of answer, compared.

    Attributes:
        what: was compared.
        compared: how many; 0 where there was nothing to compare, for the reason in `note`.
        different: how many of them.
        largest, bound: difference of numbers and what rounding explains of it; None of tokens,
            which are equal or not, and of what is not finite.
        note: the first that differs.
    """

    what: str
    compared: int
    different: int = 0
    largest: float | None = None
    bound: float | None = None
    note: str = ""

    @classmethod
    def of_numbers(cls, what: str, differences: Sequence[Difference]) -> Finding:
        bound = max(each.bound for each in differences)  # one batch, one size of its values
        wrong = [i for i, each in enumerate(differences) if not each.within(bound)]
        finite = all(math.isfinite(each.largest) for each in differences)
        return cls(
            what,
            compared=len(differences),
            different=len(wrong),
            largest=max(each.largest for each in differences) if finite else None,
            bound=bound,
            note=f"input {wrong[0]}" + ("" if finite else ": not finite") if wrong else "",
        )

    @classmethod
    def of_tokens(
        cls, what: str, ours: Sequence[list[int]], theirs: Sequence[list[int]]
    ) -> Finding:
        pairs = list(zip(ours, theirs, strict=True))
        wrong = [i for i, (a, b) in enumerate(pairs) if a != b]
        note = f"input {wrong[0]}: {_parting(*pairs[wrong[0]])}" if wrong else ""
        return cls(what, compared=len(pairs), different=len(wrong), note=note)


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        reference: name and version of what the directory was compared with.
    """

    directory: str
    family: str
    reference: str
    findings: list[Finding]

    @property
    def equal(self) -> bool:
        return not any(finding.different for finding in self.findings)

    @property
    def facts(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"equal": self.equal, **asdict(self)}


def check(model: LoadedModel, texts: Sequence[str]) -> Report:
    """Compare a model with what `transformers` makes of its directory.

    Args:
        model: float32, on the CPU.
        texts: inputs; without any, inputs are random ids and tokenizers are not compared.

    Raises:
        CheckError: there is no reference of this model.
        InvalidRequestError: a text cannot be served.
    """
    transformers = _transformers()
    name = f"transformers {transformers.__version__}"
    with _quiet(transformers):
        both = Both(_reference(transformers, model), model)
        sources = _sources(both, texts)
        targets = both.targets(len(sources), longest=min(LONGEST, model.spec.max_tgt - 1))
        findings = [
            *_compare_tokenizers(transformers, model, texts),
            Finding.of_numbers("encoder output", memory_differences(both, sources)),
            Finding.of_numbers(
                "logits", logits_differences(both, list(zip(sources, targets, strict=True)))
            ),
            _compare_greedy(both, sources),
        ]
    return Report(str(model.directory), model.spec.family, name, findings)


def _sources(both: Both, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        return both.sources(SOURCES, longest=min(LONGEST, both.ours.spec.max_src))
    sources = _our_ids(both.ours, "source", texts)
    for i, source in enumerate(sources):
        if not 0 < len(source) <= both.ours.spec.max_src:
            raise InvalidRequestError(
                f"text {i} must have 1 to {both.ours.spec.max_src} tokens, got {len(source)}"
            )
    return sources


def _compare_greedy(both: Both, sources: Sequence[list[int]]) -> Finding:
    """Greedy decoding with all else that the model asks for by default."""
    spec = both.ours.spec
    length = max(NEW_TOKENS, spec.defaults.min_new_tokens or 0)
    length = min(length, spec.default_max_new_tokens)
    rows = []
    for source in sources:
        plan = our_plan(both, source, num_beams=1, max_new_tokens=length)
        rows += plan.sequences
    greedy = {"num_beams": 1, "do_sample": False, "length_penalty": 1.0, "early_stopping": False}
    try:
        theirs = [
            reference_tokens(both, source, max_new_tokens=length, **greedy)[0] for source in sources
        ]
    except ValueError as error:  # configurations that it needs more of than we do
        return Finding("greedy tokens", 0, note=f"the reference does not generate: {error}")
    return Finding.of_tokens("greedy tokens", run_rows(both, rows), theirs)


def _compare_tokenizers(
    transformers: Any, model: LoadedModel, texts: Sequence[str]
) -> Iterator[Finding]:
    if not texts:
        yield Finding("tokens", 0, note="no texts were given")
        return
    try:
        reference = _reference_tokenizer(transformers, model.directory)
    except CheckError as error:
        yield Finding("tokens", 0, note=str(error))
        return
    theirs = reference(list(texts))["input_ids"]
    yield Finding.of_tokens("source tokens", _our_ids(model, "source", texts), theirs)
    if model.languages and model.languages.default_tgt is None:
        yield Finding("target tokens", 0, note="the model has no default target language")
        return
    theirs = reference(text_target=list(texts))["input_ids"]
    if model.languages and model.languages.target == "start":
        # mBART's labels end with the language; its network moves it to where the decoder starts.
        theirs = [ids[:-1] for ids in theirs]
    yield Finding.of_tokens("target tokens", _our_ids(model, "target", texts), theirs)


def _our_ids(model: LoadedModel, side: Side, texts: Sequence[str]) -> list[list[int]]:
    inspector = inspector_of(model, generator_of(model))
    languages, tgt_lang = model.languages, None
    if languages and languages.source_names == "tgt_lang" and not languages.written:
        # SMaLL-100's sources cannot be without the target's language: any will do here.
        tgt_lang = languages.default_tgt or next(iter(languages.ids))
    return inspector.tokenize(TokenizeRequest(inputs=list(texts), side=side, tgt_lang=tgt_lang))


def _parting(ours: Sequence[int], theirs: Sequence[int]) -> str:
    """Where two lists of tokens part, for a person."""
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if place is None:
        return f"{len(ours)} tokens here, {len(theirs)} in the reference"
    return f"token {place} is {ours[place]} here, {theirs[place]} in the reference"


# --- the reference -------------------------------------------------------------------------------

_LOCALLY = {"local_files_only": True, "trust_remote_code": False}
"""Nothing is fetched, and no code that lies in the directory is run."""


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise CheckError(
            f"check compares with the package transformers, but {error.name} is not installed; "
            'it comes with the extra "check"'
        ) from error
    return transformers


def _reference(transformers: Any, model: LoadedModel) -> Any:
    """The directory as `transformers` loads it.

    Raises:
        CheckError: it does not know the family, or cannot load the directory.
    """
    known = {config.model_type for config in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING}
    if model.spec.family not in known:
        raise CheckError(
            f"{model.directory}: transformers does not know the family {model.spec.family}, so "
            "that there is nothing to compare it with"
        )
    try:
        network = transformers.AutoModelForSeq2SeqLM.from_pretrained(
            model.directory, dtype=torch.float32, **_LOCALLY
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckError(f"{model.directory}: transformers cannot load it: {error}") from error
    return network.eval()


def _reference_tokenizer(transformers: Any, directory: Path) -> Any:
    """Raises CheckError: there is none, or none without code that is not the library's."""
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        raise CheckError("the directory has no tokenizer that transformers reads")
    stated = str(read_settings(directory).get("tokenizer_class") or "AutoTokenizer")
    if not hasattr(transformers, stated.removesuffix("Fast")):  # it would take another one
        raise CheckError(f"transformers has no {stated}")
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, **_LOCALLY)
    except (OSError, ValueError, ImportError) as error:
        raise CheckError(f"transformers cannot load the tokenizer: {error}") from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without the reference's advice and progress bars."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
