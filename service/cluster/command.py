"""`seqserve serve --ray`: Ray, where none runs yet, and the application on it, until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
from typing import Any

from seqserve import __version__
from service.cluster.arguments import Arguments, bounds
from service.cluster.proxies import CALLBACK
from service.logs import configure_logging
from service.settings import Settings

logger = logging.getLogger(__name__)

APPLICATION = "seqserve"
"""Its name in Ray Serve."""

MIDDLEWARES = "service.cluster.proxies:middlewares"

LONGEST_SECONDS = 3600.0
"""How long a request may take on Ray, whatever it asks for: its proxies cannot see the timeout in a
body, and must not wait for a replica for ever."""

ADDRESS = "RAY_ADDRESS"
"""Variable that names a Ray cluster to join; without it one is started on this machine."""


class RayError(Exception):
    """Replicas cannot be started; the message says why."""


def check(arguments: Arguments, settings: Settings) -> None:
    """Refuse what makes no sense with Ray, before it is started.

    Raises:
        RayError: the message says what.
    """
    if importlib.util.find_spec("ray") is None:
        raise RayError('--ray needs the extra ray: pip install ".[server,ray]" in the checkout')
    if settings.port == 0:
        raise RayError(
            "--port must not be 0 with --ray: the proxies of all machines listen on one port"
        )
    if settings.device.startswith("cuda:"):
        raise RayError(
            f"--device must be auto, cpu or cuda with --ray, which gives each replica a device of "
            f"its own, got {settings.device}"
        )
    if os.environ.get(ADDRESS):
        return
    wanted, there = least_cpus(arguments, settings), os.cpu_count() or 1
    if wanted > there:
        raise RayError(
            f"the replicas need {wanted:g} CPUs and this machine has {there}: ask for fewer, "
            f"lower --replica-cpus, or set {ADDRESS} to a cluster that has more"
        )


def least_cpus(arguments: Arguments, settings: Settings) -> float:
    """CPUs that all models take at least."""
    replicas = bounds(arguments.autoscale)[0] if arguments.autoscale else arguments.replicas
    return replicas * arguments.cpus * len(settings.locations)


def serve(settings: Settings, arguments: Arguments) -> str | None:
    """Serve until a signal comes.

    Returns:
        why it ended, if the application could not be started.
    """
    os.environ.setdefault(CALLBACK, MIDDLEWARES)  # read when Ray is imported, here and in proxies
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "1")
    import ray
    from ray import serve as ray_serve

    from service.cluster.deployments import application

    configure_logging(settings.log_level, settings.log_format)
    ray.init(address=os.environ.get(ADDRESS, "local"))
    try:
        ray_serve.start(http_options=http_options(settings))
        ray_serve.run(application(arguments, settings), name=APPLICATION)
        logger.info("seqserve %s listens on %s", __version__, address(settings))
        asyncio.run(signalled())
        logger.info("finishing what runs")
        with contextlib.suppress(TimeoutError):
            ray_serve.delete(APPLICATION)  # while the proxies, which are next, bring the answers
    except RuntimeError as error:  # the application did not come up
        return str(error)
    finally:
        ray_serve.shutdown()
        ray.shutdown()
    return None


def http_options(settings: Settings) -> dict[str, Any]:
    """Of Ray's proxies."""
    return {
        "host": settings.host,
        "port": settings.port,
        "request_timeout_s": LONGEST_SECONDS,
    }


def address(settings: Settings) -> str:
    """Where the proxy of this machine is reached."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}"


async def signalled() -> None:
    """Wait for SIGTERM or SIGINT."""
    came = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, came.set)
    await came.wait()
