"""What went wrong, as an exception: a failed answer, none at all, or one of another version."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from pydantic import ValidationError

from seqserve import __version__
from seqserve.errors import (
    ERRORS,
    DeadlineError,
    NoConnectionError,
    SeqserveError,
    VersionError,
)
from seqserve.schemas import ErrorResponse

TIMED_OUT = (httpx.ReadTimeout, httpx.WriteTimeout)
"""The server had the request, or a part of it, and said nothing in time."""


def error_of(response: httpx.Response) -> SeqserveError:
    """A failed answer as an exception, also where a proxy answered instead of the server."""
    try:
        envelope = ErrorResponse.model_validate_json(response.content)
    except ValidationError:
        envelope = ErrorResponse(
            error=f"status {response.status_code}: {response.text[:200]}",
            error_type="internal",
            param=None,
            request_id=response.headers.get("x-request-id"),
        )
    return error_from(
        envelope,
        status=response.status_code,
        retry_after=wait_of(response.headers.get("retry-after")),
    )


def error_from(envelope: ErrorResponse, **known: Any) -> SeqserveError:
    """The envelope's error; of a kind that this client does not know, the general one."""
    kind = ERRORS.get(envelope.error_type, SeqserveError)
    return kind(envelope.error, envelope.param, request_id=envelope.request_id, **known)


def failure_of(error: httpx.HTTPError, request_id: str) -> SeqserveError:
    """The exception for a request that got no answer."""
    message = str(error) or type(error).__name__
    if isinstance(error, TIMED_OUT):
        return DeadlineError(f"no answer in time: {message}", status=0, request_id=request_id)
    return NoConnectionError(message, request_id=request_id)


def check_version(response: httpx.Response) -> None:
    """Whether this client and what answered speak the same language.

    An answer that does not name its version is taken as it is: older servers and proxies do not.

    Raises:
        VersionError: the server is of another major version.
    """
    version = response.headers.get("x-seqserve-version", __version__)
    major = __version__.partition(".")[0]
    if version.partition(".")[0] != major:
        raise VersionError(
            f"the server is seqserve {version}, and this is the client of {__version__}, which "
            f"talks to servers of version {major}; install the client of the server's version",
            request_id=response.headers.get("x-request-id"),
        )


def wait_of(text: str | None) -> float | None:
    """Seconds that `Retry-After` asks for, as a number or as a date; None where it says nothing."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        return _seconds_until(text)
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _seconds_until(date: str) -> float | None:
    try:
        moment = parsedate_to_datetime(date)
    except ValueError:
        return None
    if moment.tzinfo is None:  # "-0000": the time is UTC, its place unknown
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
