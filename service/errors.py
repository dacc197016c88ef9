"""Every error leaves in one envelope; routes that speak another API's language have that API's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from seqserve.errors import (
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    SeqserveError,
    UnauthorizedError,
)
from seqserve.schemas import ErrorResponse
from service.observation import record_of
from service.validation import cut, describe

DESCRIPTIONS: dict[int, str] = {
    400: "The body is not valid JSON.",
    401: "API keys are set, and none or a wrong one came.",
    404: "There is no such model.",
    408: "The body took too long to come.",
    413: "The body is over the limit.",
    415: "The body is compressed.",
    422: "A field is wrong, missing, unknown or too long; `param` names it.",
    429: "The queue is full; `Retry-After` says when to try again.",
    500: "The model failed on this input.",
    503: "Loading, or shutting down.",
    504: "The request's timeout passed.",
}
"""HTTP status -> what it means, for the OpenAPI document."""

OF_A_BODY = (400, 401, 404, 408, 413, 415, 422, 503)
"""What any route with a body may answer."""

OF_A_RUN = (*OF_A_BODY, 429, 500, 504)
"""What any route may answer for which a model runs."""


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for the OpenAPI document."""
    return {
        status: {"model": ErrorResponse, "description": DESCRIPTIONS[status]} for status in statuses
    }


class ErrorAnswer(Response):
    """An error's answer, which notes the error in the request's record when it is sent."""

    media_type = "application/json"

    def __init__(
        self, error: SeqserveError, body: bytes, status: int, headers: Mapping[str, str]
    ) -> None:
        super().__init__(body, status, headers)
        self.error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).note_error(self.error)
        await super().__call__(scope, receive, send)


def envelope_of(error: SeqserveError, request_id: str | None) -> dict[str, Any]:
    """An error as the one JSON object that all errors leave in."""
    return {
        "error": error.message,
        "error_type": error.error_type,
        "param": error.param,
        "request_id": request_id,
    }


@dataclass(frozen=True)
class Dialect:
    """How the routes of one API tell of errors.

    Attributes:
        speaks: whether a request, by its method and path, is meant for that API.
        body: an error, and the id of its request, as a JSON object.
        status: of an error's answer.
        headers: of an error's answer, beside those of all.
    """

    speaks: Callable[[str, str], bool]
    body: Callable[[SeqserveError, str | None], dict[str, Any]]
    status: Callable[[SeqserveError], int]
    headers: Callable[[SeqserveError], dict[str, str]] = lambda error: {}


OURS = Dialect(lambda method, path: True, envelope_of, lambda error: error.status)


def dialect_of(scope: Scope) -> Dialect:
    """The dialect of the API that a request is meant for."""
    return cast("Dialect", scope["state"]["dialect"])


def spoken(error: SeqserveError, scope: Scope) -> dict[str, Any]:
    """An error as the JSON object that its request's API has for errors."""
    return dialect_of(scope).body(error, scope["state"]["request_id"])


def envelope(error: SeqserveError, scope: Scope) -> Response:
    """An error as an HTTP answer."""
    dialect = dialect_of(scope)
    headers = dialect.headers(error)
    if error.retry_after is not None:
        headers["retry-after"] = f"{error.retry_after:g}"
    if isinstance(error, UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    body = orjson.dumps(spoken(error, scope))
    return ErrorAnswer(error, body, dialect.status(error), headers)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Have refusals call fields as the request did that ours was made from.

    Args:
        names: expression for our name of a field -> the caller's; the values that messages show
            are left alone.

    Raises:
        InvalidRequestError: the one that was raised, with the caller's names.
    """
    try:
        yield
    except InvalidRequestError as error:
        said, got, value = error.message.partition(", got ")
        param = error.param
        for ours, theirs in names.items():
            said = re.sub(ours, theirs, said)
            param = re.sub(ours, theirs, param) if param else param
        raise InvalidRequestError(said + got + value, param, status=error.status) from error


def install_error_handlers(app: FastAPI) -> None:
    """Have the application answer every error in the envelope."""

    @app.exception_handler(SeqserveError)
    async def known(request: Request, error: SeqserveError) -> Response:
        return envelope(error, request.scope)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return envelope(_from_validation(error), request.scope)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        answer = envelope(_from_http(request, error), request.scope)
        answer.headers.update(error.headers or {})
        return answer


def _from_validation(error: RequestValidationError) -> InvalidRequestError:
    """FastAPI's own: there is no body at all."""
    errors = [{**e, "loc": e["loc"][1:]} for e in error.errors()]  # without "body"
    return describe(errors, None)


def _from_http(request: Request, error: HTTPException) -> SeqserveError:
    """Starlette's and FastAPI's own errors."""
    if isinstance(error.__cause__, SeqserveError):  # raised while FastAPI read the body
        return error.__cause__
    path = cut(request.url.path)
    if error.status_code == 404:
        return NotFoundError(f"there is no {path}")
    if error.status_code == 405:
        return MethodNotAllowedError(f"{path} does not take {request.method}")
    return InvalidRequestError(str(error.detail), status=error.status_code)
