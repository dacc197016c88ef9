"""HTTP/1.1 on a connection, as uvicorn speaks it, for callers that do not keep to it."""

from __future__ import annotations

import asyncio
import secrets
from http import HTTPStatus

import h11
import orjson
from uvicorn.protocols.http.h11_impl import H11Protocol

from seqserve.errors import InvalidRequestError
from service.errors import envelope_of


class Protocol(H11Protocol):
    """uvicorn's protocol, and

    - what is no HTTP is refused in the envelope of all errors;
    - a request's head must come in time: otherwise anybody could hold connections, of which a
      process has only so many, by sending a byte now and then. (`Gate` sees to bodies.)
    """

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequestError("the request is not valid HTTP", status=400))

    @property
    def _between_requests(self) -> bool:
        # None before the first request, whatever its type says
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]

    def _watch_head(self) -> None:
        """Let time run while a head is awaited, from its first byte (or the connection) on."""
        if not self._between_requests or self.transport.is_closing():
            self._stop_watching()
        elif self._patience is None:
            self._patience = self.loop.call_later(self._seconds, self._lose_patience)

    def _stop_watching(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    @property
    def _seconds(self) -> float:
        seconds: float = self.config.app.state.settings.receive_timeout  # type: ignore[union-attr]
        return seconds

    def _lose_patience(self) -> None:
        self._refuse(
            InvalidRequestError(
                f"the request's head took longer than {self._seconds:g} seconds (receive_timeout)",
                status=408,
            )
        )

    def _refuse(self, error: InvalidRequestError) -> None:
        """Answer, if no other answer has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            request_id = secrets.token_hex(16)
            body = orjson.dumps(envelope_of(error, request_id))
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
                "x-content-type-options": "nosniff",
                "x-request-id": request_id,
            }
            start = h11.Response(
                status_code=error.status,
                headers=list(headers.items()),
                reason=HTTPStatus(error.status).phrase,
            )
            send = self.conn.send
            self.transport.write(send(start) + send(h11.Data(data=body)) + send(h11.EndOfMessage()))
        self.transport.close()
