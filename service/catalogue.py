"""The models that a server knows, whichever process they run in: finding them, telling of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

from seqserve.errors import InvalidRequestError, NotFoundError, UnavailableError
from seqserve.schemas import ModelInfo
from service.settings import Settings
from service.translation import Direction, Directions, Translator
from service.validation import shown

if TYPE_CHECKING:
    from service.served import ServedModel

State = Literal["loading", "ready", "failed", "draining"]


class Entry(Protocol):
    """What is known of a model that was loaded."""

    @property
    def name(self) -> str: ...
    @property
    def loaded_at(self) -> float:
        """Seconds since the epoch."""

    @property
    def state(self) -> State: ...
    @property
    def directions(self) -> Sequence[Directions]:
        """What it translates."""

    def info(self) -> ModelInfo:
        """What /info says of it."""


Known_co = TypeVar("Known_co", bound=Entry, covariant=True)


class Catalogue(ABC, Generic[Known_co]):
    """All models of a server, in order; the first one is the default.

    Args:
        names: of all, whether or not they are loaded yet.

    Attributes:
        draining: nothing more is accepted.

    Raises:
        ValueError: a pair is for a model that there is not.
    """

    def __init__(self, settings: Settings, names: Iterable[str]) -> None:
        self.settings = settings
        self.names = list(names)
        self.draining = False
        self._known: dict[str, Known_co] = {}
        self._failures: dict[str, str] = {}  # name -> why it could not be loaded
        self._pairs = settings.pairs_of(self.names)

    @property
    def served(self) -> list[Known_co]:
        """Those that were loaded."""
        return list(self._known.values())

    @property
    @abstractmethod
    def here(self) -> list[ServedModel]:
        """Those of them that run in this process."""

    @abstractmethod
    async def load(self) -> None:
        """Get to know all; each can be asked as soon as it is known."""

    @abstractmethod
    async def drain(self, grace: float) -> bool:
        """Accept nothing more; wait for what runs. False if the grace period was too short."""

    @abstractmethod
    async def stop(self) -> None:
        """End all engine threads."""

    @abstractmethod
    def get(self, name: str | None) -> ServedModel:
        """The model that a request asks for.

        Raises:
            NotFoundError: there is none of this name.
            UnavailableError: it is not in memory yet.
        """

    def find(self, name: str | None) -> Known_co:
        """What is known of the model that a request asks for.

        Raises:
            SeqserveError: see `get`.
        """
        names = self.names
        wanted = names[0] if name is None else name
        if wanted not in names:
            raise NotFoundError(
                f"there is no model {shown(wanted)}; there are: {', '.join(names)}", "model"
            )
        if wanted not in self._known:
            coming = wanted not in self._failures
            raise UnavailableError(self._why_not(wanted), retry_after=1 if coming else None)
        return self._known[wanted]

    @property
    def translator(self) -> Translator:
        """What the models in memory translate: first those that pairs are set for."""
        in_order = sorted(self.names, key=lambda name: not self._pairs[name])
        known = (self._known[name] for name in in_order if name in self._known)
        return Translator([each for model in known for each in model.directions])

    def direction(self, source: str, target: str) -> Direction:
        """Which model translates one language to another, and how.

        Raises:
            InvalidRequestError: none does.
            UnavailableError: none in memory does, and others are still loading.
        """
        try:
            return self.translator.find(source, target)
        except InvalidRequestError:
            for name in self.names:
                if name not in self._known and name not in self._failures:
                    raise UnavailableError(self._why_not(name), retry_after=1) from None
            raise

    def check_ready(self) -> None:
        """Return if some model can answer.

        Raises:
            UnavailableError: none can; the message says why.
        """
        if self.draining:
            raise UnavailableError("the server is shutting down")
        if any(model.state == "ready" for model in self.served):
            return
        raise UnavailableError("; ".join(map(self._why_not, self.names)))

    def info(self) -> list[ModelInfo]:
        """What /info says of all."""
        return [self._info(name) for name in self.names]

    def _info(self, name: str) -> ModelInfo:
        if name in self._known:
            return self._known[name].info()
        if name in self._failures:
            return ModelInfo(name=name, state="failed", error=self._failures[name])
        return ModelInfo(name=name, state="loading")

    def _why_not(self, name: str) -> str:
        """Why a model does not answer."""
        if name in self._failures:
            return f"model {name} is not loaded: {self._failures[name]}"
        if name not in self._known:
            return f"model {name} is still loading"
        failed = self._known[name].state == "failed"
        return f"model {name} has failed" if failed else f"model {name} is being restarted"
