"""The Ray Serve application: each model a deployment, and gateways where there are several.

`build` is what a Serve config names as `import_path`; docs/scaling.md describes its arguments.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric
from pydantic import ValidationError
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message

from seqserve.errors import UnavailableError
from service.app import create_app
from service.cluster.arguments import Arguments, bounds
from service.cluster.autoscaling import OUTSTANDING
from service.cluster.callers import CallerGone
from service.cluster.forwarding import (
    Described,
    Forwarded,
    Forwarding,
    RemoteModels,
    answered,
    described,
)
from service.cluster.metrics import MergedMetrics
from service.served import Models
from service.server import CLOSING_SECONDS, prepare_process
from service.settings import Settings
from service.tracing import exporting_tracer
from service.validation import describe

GATHERING_SECONDS = 2.0
"""How long /metrics waits for replicas; those that do not answer are left out."""

GATEWAY = "gateway"

POLICY = "service.cluster.autoscaling:ByOutstandingInputs"

UNBOUNDED = 1_000_000
"""Requests that Ray hands to a replica at a time: each replica bounds its queue itself."""

DRAIN_LOOK = 0.2
"""Seconds between two looks of Ray at whether a replica that is to end has requests left."""


class Replica:
    """One model in one process: the application of `seqserve serve`, without its socket.

    As it is, Ray can be told to send it requests: `Ingress`.

    Args:
        settings: with this model alone.
    """

    def __init__(self, settings: Settings) -> None:
        prepare_process(settings)
        self._failure: str | None = None
        tracer = exporting_tracer() if settings.tracing else None
        self._app = create_app(settings, on_failure=self._fail, tracer=tracer)
        self._models: Models = self._app.state.models
        self._metrics = self._app.state.metrics
        self._app.state.metrics = MergedMetrics(lambda: gathered([own_handle()]))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return CallerGone(self._app)

    async def check_health(self) -> None:
        """Return if the model can answer, once it has been loaded: what /ready says.

        Raises:
            RuntimeError: it cannot, and the message says why. Ray does not begin to use the
                replica, or puts another one in its place.
        """
        await self._models.settled()
        if self._failure:
            raise RuntimeError(self._failure)
        try:
            self._models.check_ready()
        except UnavailableError as error:
            raise RuntimeError(error.message) from None

    async def describe(self) -> Described:
        """What a gateway is told of the model."""
        (model,) = self._models.here
        return described(model)

    async def answer(self, request: Forwarded) -> AsyncIterator[Message]:
        """The answer to a request that a gateway has read."""
        async with aclosing(answered(CallerGone(self._app), request)) as messages:  # type: ignore[type-var]
            async for message in messages:
                yield message

    async def families(self) -> tuple[str, list[Metric]]:
        """The name of this replica, and its metrics."""
        return own_name(), self._metrics.families()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `ByOutstandingInputs` goes by."""
        return {OUTSTANDING: float(sum(model.runner.outstanding for model in self._models.here))}

    def _fail(self, message: str) -> None:
        self._failure = message


Ingress = serve.ingress()(Replica)
"""A replica that gets its requests from Ray's proxies, which run its application's lifespan."""


class BehindGateway(Replica):
    """A replica that gets its requests from gateways, and so runs its lifespan itself."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc] # Ray awaits it
        super().__init__(settings)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()

    async def __del__(self) -> None:  # likewise
        await self._lifespan.__aexit__(None, None, None)


@serve.ingress()
class Gateway:
    """The application in front of models that run in replicas of their own.

    Args:
        handles: name of a model -> its deployment.
    """

    def __init__(self, settings: Settings, handles: Mapping[str, DeploymentHandle[Any]]) -> None:
        prepare_process(settings)
        remotes = {name: Replicas(handle) for name, handle in handles.items()}
        models = RemoteModels(settings, remotes)
        tracer = exporting_tracer() if settings.tracing else None
        self._app = create_app(settings, models, tracer=tracer)
        self._app.user_middleware.append(Middleware(Forwarding, models=models))
        self._metrics = self._app.state.metrics
        self._app.state.metrics = MergedMetrics(lambda: gathered([own_handle(), *handles.values()]))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return CallerGone(self._app)

    async def families(self) -> tuple[str, list[Metric]]:
        """The name of this gateway, and its metrics."""
        return own_name(), self._metrics.families()


class Replicas:
    """See `service.cluster.forwarding.Remote`."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def describe(self) -> Described:
        try:
            told: Described = await self._handle.describe.remote()
        except RayError as error:
            raise UnavailableError("no replica says how its model is") from error
        return told

    async def answer(self, request: Forwarded) -> AsyncIterator[Message]:
        messages = self._handle.options(stream=True).answer.remote(request)
        try:
            async for message in messages:
                yield message
        except RayError as error:
            raise UnavailableError(
                "the replica that had the request has ended; ask again", retry_after=1
            ) from error
        finally:
            messages.cancel()  # does nothing when all has come


def build(arguments: dict[str, Any]) -> Application:
    """The application that a Serve config asks for.

    Args:
        arguments: see `Arguments`.

    Raises:
        ValueError: one of them, or a setting, is wrong.
    """
    try:
        given = Arguments(**arguments)
        settings = Settings(**given.settings)
    except ValidationError as error:
        raise ValueError(describe(error.errors(), None).message) from None
    return application(given, settings)


def application(given: Arguments, settings: Settings) -> Application:
    """The application with settings that have been read.

    Raises:
        ValueError: two models have one name, or a pair is for a model that there is not.
    """
    models = {name: alone(settings, name) for name in settings.locations}
    settings.pairs_of(models)
    kind = Ingress if len(models) == 1 else BehindGateway
    replicas = {
        name: serve.deployment(kind, **options_of(given, own))
        .options(name=f"model-{name}")
        .bind(own)
        for name, own in models.items()
    }
    if len(replicas) == 1:
        return next(iter(replicas.values()))
    gateway = serve.deployment(
        Gateway,
        name=GATEWAY,
        num_replicas=given.gateways,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=UNBOUNDED,
        **process_options(settings),
    )
    return gateway.bind(settings, replicas)


def alone(settings: Settings, name: str) -> Settings:
    """The settings of a server with one of the models alone, and the pairs that are set for it."""
    pairs = settings.pairs_of(settings.locations)[name]
    location = settings.locations[name]
    place = location.resolve() if isinstance(location, Path) else location
    own = {"models": (f"{name}={place}",), "pairs": tuple(map(str, pairs))}
    return settings.model_copy(update=own)


def options_of(given: Arguments, settings: Settings) -> dict[str, Any]:
    """Options of a model's deployment.

    Each replica's own queue is the one that bounds and refuses, so Ray's must not.
    """
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": given.cpus, "num_gpus": given.gpus},
        "max_ongoing_requests": UNBOUNDED,
        **process_options(settings),
    }
    if given.autoscale is None:
        return options | {"num_replicas": given.replicas}
    least, most = bounds(given.autoscale)
    policy = {"policy_function": POLICY, "policy_kwargs": {"per_replica": settings.max_rows}}
    return options | {
        "autoscaling_config": {
            **given.autoscaling,
            "min_replicas": least,
            "max_replicas": most,
            "policy": policy,
        }
    }


def process_options(settings: Settings) -> dict[str, Any]:
    """Options of all deployments: what replicas have begun may finish before they end."""
    return {
        "logging_config": {"enable_access_log": False},  # the application tells of each request
        "graceful_shutdown_wait_loop_s": DRAIN_LOOK,
        "graceful_shutdown_timeout_s": settings.grace + CLOSING_SECONDS,
    }


def own_name() -> str:
    """Of the replica that this runs in."""
    return str(serve.get_replica_context().replica_tag)


def own_handle() -> DeploymentHandle[Any]:
    """The deployment that this replica is of."""
    context = serve.get_replica_context()
    return serve.get_deployment_handle(context.deployment, context.app_name)


async def gathered(handles: Sequence[DeploymentHandle[Any]]) -> dict[str, list[Metric]]:
    """Name of each replica of some deployments that answers in time -> its metrics."""
    calls = (
        handle.broadcast("families").results_async(
            timeout_s=GATHERING_SECONDS, return_exceptions=True
        )
        for handle in handles
    )
    told = await asyncio.gather(*calls, return_exceptions=True)
    answers = [answer for each in told if isinstance(each, list) for answer in each]
    return dict(answer for answer in answers if isinstance(answer, tuple))
