"""The models of a server: loading them, finding them, draining them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch

from model.cache import EncoderCache
from model.checkpoint import ModelError
from model.engine import Engine
from model.loader import LoadedModel, load_model
from model.transformer import Transformer
from seqserve.errors import NotFoundError, UnavailableError
from seqserve.schemas import Batches, EncoderCacheInfo, ModelInfo
from service.generation import Generator
from service.inspection import Inspector
from service.runner import Runner, StepFigures
from service.settings import Settings, engine_config
from service.validation import shown
from service.vocabulary import Side, Vocabulary

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

EXPECTED_FAILURES = (ModelError, OSError, MemoryError, torch.OutOfMemoryError)
"""What loading raises for reasons that its message explains."""

State = Literal["loading", "ready", "failed", "draining"]


@dataclass(frozen=True)
class ServedModel:
    """A model that answers requests."""

    name: str
    loaded: LoadedModel
    runner: Runner
    figures: StepFigures
    encoder_cache: EncoderCache | None = None

    @classmethod
    def start(cls, name: str, loaded: LoadedModel, settings: Settings) -> ServedModel:
        """Give a model an engine and a thread. Call it on the event loop."""
        figures = StepFigures(settings.max_rows)
        engine = Engine(loaded, engine_config(settings), figures.record)
        runner = Runner(engine, settings.max_queue, name)
        runner.start()
        return cls(name, loaded, runner, figures, engine.encoder_cache)

    @cached_property
    def generator(self) -> Generator:
        return generator_of(self.loaded)

    @cached_property
    def inspector(self) -> Inspector:
        network = cast("Transformer", self.loaded.network)
        spec, generator = self.loaded.spec, self.generator
        return Inspector(
            spec, generator.source, generator.target, network.heads, generator.languages
        )

    def vocabulary(self, side: Side) -> Vocabulary:
        """The encoder's or the decoder's."""
        return self.generator.source if side == "source" else self.generator.target

    @property
    def state(self) -> State:
        if self.runner.broken:
            return "failed"
        return "draining" if self.runner.draining else "ready"

    def info(self) -> ModelInfo:
        """What /info says of it."""
        loaded, spec = self.loaded, self.loaded.spec
        return ModelInfo(
            name=self.name,
            state=self.state,
            family=spec.family,
            device=str(loaded.device),
            dtype=loaded.dtype,
            parameters=loaded.parameters,
            src_vocab_size=spec.src_vocab_size,
            tgt_vocab_size=spec.tgt_vocab_size,
            max_source_tokens=spec.max_src,
            max_target_tokens=spec.max_tgt,
            default_max_new_tokens=spec.default_max_new_tokens,
            generation_defaults=spec.defaults.stated,
            **languages_of(loaded),
            source_is_target=spec.source_is_target,
            source_tokenizer=loaded.source_tokenizer is not None,
            target_tokenizer=loaded.target_tokenizer is not None,
            waiting=self.runner.engine.waiting,
            running=self.runner.engine.running,
            batches=batches(self.figures),
            encoder_cache=cache_info(self.encoder_cache),
        )


class Models:
    """All models of a server, in order; the first one is the default.

    Args:
        directories: name -> directory of each model.
        on_failure: called with the message when a model cannot be loaded.
        loaded: models that are in memory already, by name.
    """

    def __init__(
        self,
        settings: Settings,
        directories: Mapping[str, Path],
        on_failure: Callable[[str], None],
        loaded: Mapping[str, LoadedModel] | None = None,
    ) -> None:
        self.settings = settings
        self.failure: str | None = None
        self._directories = directories
        self._on_failure = on_failure
        self._loaded = dict(loaded or {})
        self._served: dict[str, ServedModel] = {}
        self.draining = False

    @property
    def names(self) -> list[str]:
        return list({**self._loaded, **self._directories})

    @property
    def served(self) -> list[ServedModel]:
        """Those in memory."""
        return list(self._served.values())

    async def load(self) -> None:
        """Load one after the other, off the event loop; each answers as soon as it is there."""
        for name, loaded in self._loaded.items():
            self._served[name] = ServedModel.start(name, loaded, self.settings)
        for name, directory in self._directories.items():
            try:
                loaded = await in_daemon_thread(
                    load_model, directory, self.settings.device, self.settings.dtype
                )
                self._served[name] = ServedModel.start(name, loaded, self.settings)
            except Exception as error:  # noqa: BLE001 - a server without its model must say so
                self._fail(f"model {name}: {explain(error)}", error)
                return
            logger.info("model %s is ready", name)

    def _fail(self, message: str, error: Exception) -> None:
        if not isinstance(error, EXPECTED_FAILURES):
            logger.error("unexpected error while loading", exc_info=error)
        self.failure = message
        self._on_failure(message)

    def get(self, name: str | None) -> ServedModel:
        """The model that a request asks for.

        Raises:
            NotFoundError: there is none of this name.
            UnavailableError: it is not in memory yet.
        """
        names = self.names
        wanted = names[0] if name is None else name
        if wanted not in names:
            raise NotFoundError(
                f"there is no model {shown(wanted)}; there are: {', '.join(names)}", "model"
            )
        if wanted not in self._served:
            raise UnavailableError(f"model {wanted} is {self._missing()}", retry_after=1)
        return self._served[wanted]

    def check_ready(self) -> None:
        """Return if some model can answer.

        Raises:
            UnavailableError: none can; the message says why.
        """
        if self.draining:
            raise UnavailableError("the server is shutting down")
        if any(model.runner.ready for model in self.served):
            return
        if self._served:
            raise UnavailableError("the model has failed; the server's log has the details")
        raise UnavailableError(f"the model is {self._missing()}")

    def info(self) -> list[ModelInfo]:
        state: State = "failed" if self.failure else "loading"
        return [
            self._served[name].info() if name in self._served else ModelInfo(name=name, state=state)
            for name in self.names
        ]

    async def drain(self, grace: float) -> bool:
        """Accept nothing more; wait for what runs. False if the grace period was too short."""
        self.draining = True
        for model in self.served:
            model.runner.draining = True
        done: Sequence[bool] = await asyncio.gather(
            *(model.runner.drain(grace) for model in self.served)
        )
        return all(done)

    async def stop(self) -> None:
        """End all engine threads."""
        await asyncio.gather(*(model.runner.stop() for model in self.served))

    def _missing(self) -> str:
        return f"not loaded: {self.failure}" if self.failure else "still loading"


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


def languages_of(loaded: LoadedModel) -> dict[str, Any]:
    """What /info and `seqserve info` say of a model's languages."""
    languages = loaded.languages
    return {
        "languages": list(languages.ids) if languages else [],
        "default_src_lang": languages.default_src if languages else None,
        "default_tgt_lang": languages.default_tgt if languages else None,
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
