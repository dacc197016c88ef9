"""A gateway: the application whose models run in other processes.

Its routes read and check a request as always, and ask for the model that it names. What they get is
`Elsewhere`, and the request goes on to that model as it came. So which model answers is decided by
the very code that decides it in a server of one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seqserve.errors import SeqserveError, UnavailableError
from seqserve.schemas import ModelInfo
from service.catalogue import Catalogue, State
from service.errors import envelope
from service.served import ServedModel
from service.settings import Settings
from service.translation import Directions

ASKING_SECONDS = 2.0
"""How long a gateway waits when it asks a model how it is. One whose replicas have all gone says
nothing; it counts as loading until another one is up."""

TELLING = ("/frontend", "/info", "/languages", "/metrics", "/ping", "/ready", "/v1/models")
"""What paths begin with whose answers tell of the models."""

SENT = ("type", "asgi", "http_version", "method", "scheme", "path", "query_string", "client")
"""What of a request's scope goes on, beside its headers: all of it plain data."""


@dataclass(frozen=True)
class Described:
    """What a replica says of its model."""

    description: ModelInfo
    directions: Sequence[Directions]
    loaded_at: float

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def state(self) -> State:
        return self.description.state

    def info(self) -> ModelInfo:
        """What /info says of it."""
        return self.description


def described(model: ServedModel) -> Described:
    """What a gateway is told of a model here."""
    return Described(model.info(), model.directions, model.loaded_at)


@dataclass(frozen=True)
class Forwarded:
    """A request that a gateway has read, as it goes to a replica.

    Attributes:
        scope: without what belongs to the gateway's connection.
        body: all of it.
    """

    scope: dict[str, Any]
    body: bytes


class Remote(Protocol):
    """The replicas of one model."""

    def describe(self) -> Awaitable[Described]:
        """How it is, as one of them says.

        Raises:
            UnavailableError: none can say.
        """

    def answer(self, request: Forwarded) -> AsyncIterator[Message]:
        """One's answer, as an ASGI application sends it. Closing the iterator ends the request.

        Raises:
            UnavailableError: the replica ended before its answer was complete.
        """


class Elsewhere(Exception):  # noqa: N818 - no error: a turn that a request takes
    """The model asked for runs in other processes.

    Attributes:
        model: its name.
    """

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.model = model


class RemoteModels(Catalogue[Described]):
    """Models that run in other processes.

    Args:
        remotes: name -> its replicas.
    """

    def __init__(self, settings: Settings, remotes: Mapping[str, Remote]) -> None:
        super().__init__(settings, remotes)
        self._remotes = dict(remotes)
        self._loaded_at: dict[str, float] = {}

    @property
    def here(self) -> list[ServedModel]:
        """None."""
        return []

    def get(self, name: str | None) -> NoReturn:
        """See `Catalogue.get`.

        Raises:
            Elsewhere: there is such a model.
        """
        raise Elsewhere(self.find(name).name)

    async def load(self) -> None:
        """Hear of each model once, however long it takes to come up."""
        await asyncio.gather(*map(self._ask, self.names))

    async def refresh(self) -> None:
        """Hear how each model is now."""
        await asyncio.gather(*map(self._ask_briefly, self.names))

    def answer(self, name: str, request: Forwarded) -> AsyncIterator[Message]:
        """See `Remote.answer`."""
        return self._remotes[name].answer(request)

    async def drain(self, grace: float) -> bool:
        """Nothing runs here; what is forwarded is waited for by whoever ends this process."""
        self.draining = True
        return True

    async def stop(self) -> None:
        """There is nothing to end."""

    async def _ask(self, name: str) -> None:
        told = await self._remotes[name].describe()
        # Each replica has its own time; callers are told one, whichever replica is asked.
        loaded_at = self._loaded_at.setdefault(name, told.loaded_at)
        self._known[name] = replace(told, loaded_at=loaded_at)

    async def _ask_briefly(self, name: str) -> None:
        try:
            await asyncio.wait_for(self._ask(name), ASKING_SECONDS)
        except (TimeoutError, UnavailableError):
            self._known.pop(name, None)


class Forwarding:
    """Innermost middleware of a gateway: sends requests on that belong elsewhere.

    Before a request that tells of the models, they are asked how they are.
    """

    def __init__(self, app: ASGIApp, models: RemoteModels) -> None:
        self.app = app
        self.models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] != "POST" and scope["path"].startswith(TELLING):
            await self.models.refresh()
        reader = Reader(receive)
        try:
            await self.app(scope, reader, send)
        except Elsewhere as turn:
            await self._forward(turn.model, scope, reader, send)

    async def _forward(self, model: str, scope: Scope, reader: Reader, send: Send) -> None:
        started = False
        request = Forwarded(scope_to_send(scope), await reader.all())
        try:
            async with aclosing(self.models.answer(model, request)) as messages:  # type: ignore[type-var]
                async for message in messages:
                    await send(message)
                    started = True
        except SeqserveError as error:
            if started:  # the connection is cut, so that half an answer does not look like a whole
                raise
            await envelope(error, scope)(scope, reader, send)


@dataclass
class Reader:
    """An ASGI `receive` that keeps the body it has read."""

    receive: Receive
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False

    async def __call__(self) -> Message:
        message = await self.receive()
        if message["type"] == "http.request":
            self.body += message.get("body", b"")
            self.complete = not message.get("more_body", False)
        return message

    async def all(self) -> bytes:
        """The whole body, also where the routes had no use for it."""
        while not self.complete and (await self())["type"] == "http.request":
            pass
        return bytes(self.body)


def scope_to_send(scope: Scope) -> dict[str, Any]:
    """A request's scope as it goes on: as it came, with the id that the gateway gave it."""
    sent = {name: scope[name] for name in SENT if name in scope}
    headers = MutableHeaders(raw=list(scope["headers"]))
    headers["x-request-id"] = scope["state"]["request_id"]
    if "content_type" in scope["state"]:
        headers["content-type"] = scope["state"]["content_type"]
    return sent | {"headers": headers.raw, "root_path": scope.get("root_path", "")}


async def answered(app: ASGIApp, request: Forwarded) -> AsyncIterator[Message]:
    """An application's answer to a request that was read elsewhere.

    Closing the iterator, or cancelling whoever waits for it, is the caller going away.
    """
    messages: asyncio.Queue[Message] = asyncio.Queue()
    unread: asyncio.Queue[Message] = asyncio.Queue()
    unread.put_nowait({"type": "http.request", "body": request.body, "more_body": False})
    run = asyncio.ensure_future(app(dict(request.scope), unread.get, messages.put))
    try:
        while not run.done() or not messages.empty():
            waiting = asyncio.ensure_future(messages.get())
            await asyncio.wait([run, waiting], return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                yield waiting.result()
            else:
                waiting.cancel()
        run.result()
    finally:
        if not run.done():
            run.cancel()
            await asyncio.wait([run])
