"""The models of a server: loading them, finding them, draining them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import torch

from model.cache import EncoderCache, RequestMemory
from model.checkpoint import ModelError
from model.config import EngineConfig, ModelSpec
from model.engine import Engine
from model.faults import GenerationError
from model.loader import LoadedModel, load_model
from model.sequence import Decoding, FailureEvent
from model.sequence import Sequence as Row
from model.transformer import Transformer
from seqserve.schemas import Batches, EncoderCacheInfo, ModelInfo
from service.admission import Admission
from service.catalogue import Catalogue, State
from service.defaults import default_decoding
from service.figures import StepFigures
from service.generation import Generator
from service.hub import Location, directory_of
from service.inspection import Inspector
from service.limits import within
from service.rates import RestartBudget
from service.runner import Runner
from service.settings import Pair, Settings, engine_config
from service.translation import Directions, directions_of
from service.vocabulary import Side, Vocabulary

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

EXPECTED_FAILURES = (
    ModelError,
    OSError,
    MemoryError,
    torch.OutOfMemoryError,
    GenerationError,
)
"""What loading raises for reasons that its message explains."""


@dataclass(frozen=True)
class ServedModel:
    """A model that answers requests.

    Attributes:
        loaded_at: seconds since the epoch.
    """

    name: str
    loaded: LoadedModel
    runner: Runner
    figures: StepFigures
    directions: Sequence[Directions] = ()
    loaded_at: float = field(default_factory=time.time)

    @classmethod
    async def start(
        cls,
        name: str,
        loaded: LoadedModel,
        settings: Settings,
        on_end: Callable[[str], None],
        pairs: Sequence[Pair] = (),
    ) -> ServedModel:
        """Give a model a thread and an engine that has shown that it works.

        Args:
            on_end: told why, when its engine has broken down for good.
            pairs: of languages that it is to translate.

        Raises:
            ModelError: what it asks for by default could never run, or it has no such languages.
            Exception: the model cannot generate.
        """
        check_default_beams(loaded.spec, settings)
        directions = directions_of(name, loaded, pairs)
        loaded = within(loaded, settings)
        figures = StepFigures(settings.max_rows)
        config = engine_config(settings)

        def make_engine() -> Engine:
            warm_up(loaded, config)
            return Engine(loaded, config, figures.record)

        restarts = settings.max_restarts if settings.on_engine_failure == "restart" else 0
        runner = Runner(
            make_engine,
            Admission(settings.max_queue, settings.max_queue_tokens),
            name,
            RestartBudget(restarts),
            on_end,
        )
        await runner.start()
        return cls(name, loaded, runner, figures, directions)

    @cached_property
    def generator(self) -> Generator:
        return generator_of(self.loaded)

    @cached_property
    def inspector(self) -> Inspector:
        return inspector_of(self.loaded, self.generator)

    def vocabulary(self, side: Side) -> Vocabulary:
        """The encoder's or the decoder's."""
        return self.generator.source if side == "source" else self.generator.target

    @property
    def state(self) -> State:
        if self.runner.broken:
            return "failed"
        if self.runner.draining:
            return "draining"
        return "ready" if self.runner.ready else "loading"

    @property
    def family(self) -> str:
        return self.loaded.spec.family

    @property
    def device(self) -> str:
        return str(self.loaded.device)

    @property
    def dtype(self) -> str:
        return self.loaded.dtype

    def info(self) -> ModelInfo:
        """What /info says of it."""
        return ModelInfo(
            name=self.name,
            state=self.state,
            device=self.device,
            **facts_of(self.loaded),
            waiting=self.runner.waiting,
            running=self.runner.running,
            restarts=self.runner.restarts,
            batches=batches(self.figures),
            encoder_cache=cache_info(self.runner.encoder_cache),
        )


class Models(Catalogue[ServedModel]):
    """The models of this process.

    Args:
        locations: name -> where each model is.
        on_failure: called with the message when a model cannot be loaded (where the settings do
            not say to serve the others), or its engine has broken down for good.
        loaded: models that are in memory already, by name.

    Raises:
        ValueError: a pair is for a model that there is not.
    """

    def __init__(
        self,
        settings: Settings,
        locations: Mapping[str, Location],
        on_failure: Callable[[str], None],
        loaded: Mapping[str, LoadedModel] | None = None,
    ) -> None:
        self._locations = dict(locations)
        self._on_failure = on_failure
        self._loaded = dict(loaded or {})
        self._settled = asyncio.Event()
        super().__init__(settings, {**self._loaded, **self._locations})

    @property
    def here(self) -> list[ServedModel]:
        """Those in memory."""
        return self.served

    def get(self, name: str | None) -> ServedModel:
        """See `Catalogue.get`."""
        return self.find(name)

    async def load(self) -> None:
        """Load all side by side, off the event loop; each answers as soon as it is there."""
        await asyncio.gather(*map(self._load, self.names))
        self._settled.set()

    async def settled(self) -> None:
        """Wait until each is in memory, or cannot be."""
        await self._settled.wait()

    async def _load(self, name: str) -> None:
        try:
            loaded = self._loaded.get(name) or await self._read(name)
            model = await ServedModel.start(
                name, loaded, self.settings, self._on_failure, self._pairs[name]
            )
        except Exception as error:  # noqa: BLE001 - a server without its model must say so
            self._fail(name, error)
            return
        model.runner.draining = self.draining
        self._known[name] = model
        logger.info("model %s is ready", name)

    async def _read(self, name: str) -> LoadedModel:
        """A model from its directory, which is fetched first where it is on the Hub.

        Raises:
            HubError: it cannot be fetched; the message says why.
            ModelError: it cannot be served; likewise.
        """
        directory = await in_daemon_thread(directory_of, self._locations[name])
        self._locations[name] = directory
        return await in_daemon_thread(
            load_model, directory, self.settings.device, self.settings.dtype
        )

    def _fail(self, name: str, error: Exception) -> None:
        expected = isinstance(error, EXPECTED_FAILURES)
        if not expected:
            logger.error("unexpected error while loading", exc_info=error)
        message = explain(error)
        self._failures[name] = (
            without_path(message, self._locations.get(name))
            if expected
            else "unexpected error; the server's log has the details"
        )
        if self.settings.on_load_failure == "serve":
            logger.error("model %s: %s", name, message)
        else:
            self._on_failure(f"model {name}: {message}")

    async def drain(self, grace: float) -> bool:
        """See `Catalogue.drain`."""
        self.draining = True
        for model in self.served:
            model.runner.draining = True
        done: Sequence[bool] = await asyncio.gather(
            *(model.runner.drain(grace) for model in self.served)
        )
        return all(done)

    async def stop(self) -> None:
        """See `Catalogue.stop`."""
        await asyncio.gather(*(model.runner.stop() for model in self.served))


def warm_up(loaded: LoadedModel, config: EngineConfig) -> None:
    """Generate two tokens with an engine of its own, whose figures and caches nobody sees.

    Raises:
        Exception: what would fail a request.
    """
    spec = loaded.spec
    engine = Engine(loaded, config)
    token = next(token for token in range(spec.src_vocab_size) if token != spec.pad_id)
    engine.submit(Row([token], list(spec.decoder_start_ids), Decoding(max_new_tokens=2)))
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, FailureEvent):
                raise event.error


def check_default_beams(spec: ModelSpec, settings: Settings) -> None:
    """Refuse a model whose every request without parameters would be refused.

    Raises:
        ModelError: its own `num_beams` are more than there are rows.
    """
    beams = spec.defaults.num_beams or 1
    if beams > settings.max_rows:
        raise ModelError(
            f"num_beams of its generation_config.json or config.json is {beams}, but max_rows is "
            f"{settings.max_rows}: a search's beams are rows, so raise max_rows or lower num_beams"
        )


async def in_daemon_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`, but the process can end while the function still runs."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # cancelled
            return
        if error is None:
            future.set_result(cast("T", result))
        else:
            future.set_exception(error)

    def call() -> None:
        result, failure = None, None
        try:
            result = function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=call, name="loader", daemon=True).start()
    return await future


def generator_of(loaded: LoadedModel) -> Generator:
    """What plans and answers /generate for a model."""
    spec = loaded.spec
    return Generator(
        spec,
        Vocabulary("source", spec.src_vocab_size, loaded.source_tokenizer),
        Vocabulary("target", spec.tgt_vocab_size, loaded.target_tokenizer),
        loaded.languages,
    )


def tasks_of(spec: ModelSpec) -> dict[str, dict[str, Any]]:
    """The tasks that can be served."""
    return {name: task.stated for name, task in spec.tasks.items() if not task.fault}


def inspector_of(loaded: LoadedModel, generator: Generator) -> Inspector:
    """What plans and answers /logits, /next, /score, /attention and /tokenize for a model."""
    network = cast("Transformer", loaded.network)
    return Inspector(
        loaded.spec, generator.source, generator.target, network.heads, generator.languages
    )


def facts_of(loaded: LoadedModel) -> dict[str, Any]:
    """What /info and `seqserve info` say of a model."""
    spec, languages = loaded.spec, loaded.languages
    return {
        "family": spec.family,
        "parameters": loaded.parameters,
        "dtype": loaded.dtype,
        "src_vocab_size": spec.src_vocab_size,
        "tgt_vocab_size": spec.tgt_vocab_size,
        "max_source_tokens": spec.max_src,
        "max_target_tokens": spec.max_tgt,
        "decoder_start_ids": list(spec.decoder_start_ids),
        "eos_token_id": spec.eos_id,
        "eos_token_ids": list(spec.eos_ids),
        "tasks": tasks_of(spec),
        "default_decoding": default_decoding(spec.defaults),
        "default_max_new_tokens": spec.default_max_new_tokens,
        "generation_defaults": spec.defaults.stated,
        "languages": list(languages.ids) if languages else [],
        "default_src_lang": languages.default_src if languages else None,
        "default_tgt_lang": languages.default_tgt if languages else None,
        "source_is_target": spec.source_is_target,
        "source_tokenizer": loaded.source_tokenizer is not None,
        "target_tokenizer": loaded.target_tokenizer is not None,
        **_memory_of(loaded),
    }


def _memory_of(loaded: LoadedModel) -> dict[str, int]:
    if loaded.spec.source_is_target:  # nothing is kept: each new token changes the source
        return {}
    memory = RequestMemory.of(cast("Transformer", loaded.network), loaded.spec)
    return {
        "cache_bytes_per_source_token": memory.per_source_token,
        "cache_bytes_per_target_token": memory.per_target_token,
        "cache_bytes_per_request": memory.longest,
    }


def batches(figures: StepFigures) -> Batches:
    """Summary of the step counts."""
    counts = list(figures.rows_per_step)  # one copy: the engine goes on counting
    histogram = {rows: count for rows, count in enumerate(counts) if rows and count}
    steps = sum(histogram.values())
    total = sum(rows * count for rows, count in histogram.items())
    return Batches(
        steps=steps,
        mean_rows=round(total / steps, 3) if steps else 0.0,
        max_rows=max(histogram, default=0),
        histogram=histogram,
        forward_passes=figures.forward_passes,
    )


def cache_info(cache: EncoderCache | None) -> EncoderCacheInfo | None:
    """Summary of the encoder cache."""
    if cache is None:
        return None
    return EncoderCacheInfo(
        hits=cache.hits, misses=cache.misses, bytes=cache.bytes, max_bytes=cache.max_bytes
    )


def explain(error: BaseException) -> str:
    """Why a model could not be loaded, for a person."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "out of memory while loading; try --dtype bfloat16 or another --device"
    return str(error) or type(error).__name__


def without_path(message: str, location: Location | None) -> str:
    """A message about a model directory that does not tell where it is."""
    for path in (location, location.resolve()) if isinstance(location, Path) else ():
        message = message.replace(f"{path}/", "").replace(str(path), "its directory")
    return message
