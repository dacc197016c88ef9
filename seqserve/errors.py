"""Every error of the wire contract, once: the server raises them, the SDK raises them again.

`ERRORS` maps the envelope's `error_type` to its class.
"""

from __future__ import annotations

from typing import ClassVar


class SeqserveError(Exception):
    """A request failed.

    Args:
        message: for a person; names the field and the value received.
        param: the field at fault, as a path such as `parameters.top_p` or `inputs[3]`.
        status: HTTP status, where it is not the kind's usual one; 0 where no answer came (SDK).
        request_id: of the failed request, where known (SDK).
        retry_after: seconds to wait before another try, where the server said so.
    """

    error_type: ClassVar[str] = "internal"
    usual_status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = self.usual_status if status is None else status
        self.request_id = request_id
        self.retry_after = retry_after


class InvalidRequestError(SeqserveError):
    """The body is no JSON (400), or a field is wrong, missing, unknown or too long (422)."""

    error_type = "validation"
    usual_status = 422


class UnauthorizedError(SeqserveError):
    """The server wants an API key and none, or a wrong one, came."""

    error_type = "unauthorized"
    usual_status = 401


class NotFoundError(SeqserveError):
    """There is no such model or path."""

    error_type = "not_found"
    usual_status = 404


class MethodNotAllowedError(SeqserveError):
    """The path exists, but not for this HTTP method."""

    error_type = "method_not_allowed"
    usual_status = 405


class TooLargeError(SeqserveError):
    """The body is over the server's limit."""

    error_type = "too_large"
    usual_status = 413


class OverloadedError(SeqserveError):
    """The queue is full; try again after `retry_after` seconds."""

    error_type = "overloaded"
    usual_status = 429


class ClientGoneError(SeqserveError):
    """The caller closed the connection; nobody reads this."""

    error_type = "client_gone"
    usual_status = 499


class GenerationFailedError(SeqserveError):
    """The model failed on this input, for example with logits that are not finite."""

    error_type = "generation"
    usual_status = 500


class UnavailableError(SeqserveError):
    """The server is loading its models or shutting down."""

    error_type = "unavailable"
    usual_status = 503


class DeadlineError(SeqserveError):
    """The request's time was up; its rows are freed. Status 0: no answer came in time (SDK)."""

    error_type = "deadline"
    usual_status = 504


class NoConnectionError(SeqserveError):
    """The server could not be reached, or broke off (SDK)."""

    error_type = "connection"
    usual_status = 0


class VersionError(SeqserveError):
    """The server is of another major version than the client (SDK)."""

    error_type = "version"
    usual_status = 0


ERRORS: dict[str, type[SeqserveError]] = {
    kind.error_type: kind
    for kind in (
        SeqserveError,
        InvalidRequestError,
        UnauthorizedError,
        NotFoundError,
        MethodNotAllowedError,
        TooLargeError,
        OverloadedError,
        ClientGoneError,
        GenerationFailedError,
        UnavailableError,
        DeadlineError,
        NoConnectionError,
        VersionError,
    )
}
