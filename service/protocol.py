"""HTTP/1.1 on a connection, as uvicorn speaks it, for callers that do not keep to it."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from http import HTTPStatus

import h11
import orjson
from starlette.datastructures import State
from uvicorn.protocols.http.h11_impl import H11Protocol

from seqserve.errors import InvalidRequestError
from service.errors import envelope_of
from service.observation import refused
from service.settings import Settings


class Protocol(H11Protocol):
    """uvicorn's protocol, and

    - what is no HTTP is refused in the envelope of all errors;
    - a request's head must come in time: otherwise anybody could hold connections, of which a
      process has only so many, by sending a byte now and then. (`Gate` sees to bodies.)
    - answers must be taken: otherwise anybody could have the memory filled with them.
    """

    _patience: asyncio.TimerHandle | None = None
    _taking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Writing pauses as soon as the system takes no more, and goes on when all is written.
        transport.set_write_buffer_limits(high=0)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._stop_waiting()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_taker(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequestError("the request is not valid HTTP", status=400))

    # --- callers that do not read ----------------------------------------------------------------

    def _wait_for_taker(self, left: int) -> None:
        """Let time run until some of the `left` bytes of an answer are taken."""
        self._taking = self.loop.call_later(self._settings.send_timeout, self._check_taker, left)

    def _check_taker(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._wait_for_taker(left)
        else:
            self._cut_off()

    def _cut_off(self) -> None:
        """Close the connection without waiting for what is not taken; nor shall the system."""
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    # --- callers that do not write ---------------------------------------------------------------

    @property
    def _between_requests(self) -> bool:
        # None before the first request, whatever its type says
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]

    def _watch_head(self) -> None:
        """Let time run while a head is awaited, from its first byte (or the connection) on."""
        if not self._between_requests or self.transport.is_closing():
            self._stop_watching()
        elif self._patience is None:
            seconds = self._settings.receive_timeout
            self._patience = self.loop.call_later(seconds, self._lose_patience)

    def _stop_watching(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self) -> None:
        self._refuse(
            InvalidRequestError(
                f"the request's head took longer than {self._settings.receive_timeout:g} seconds "
                "(receive_timeout)",
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
            self._tell(error, request_id)
        self.transport.close()

    def _tell(self, error: InvalidRequestError, request_id: str) -> None:
        """Have the refusal counted and logged: no middleware sees it."""
        record = refused(error, request_id)
        self._state.metrics.begin()
        for listener in self._state.listeners:
            listener(record)

    @property
    def _state(self) -> State:
        state: State = self.config.app.state  # type: ignore[union-attr]
        return state

    @property
    def _settings(self) -> Settings:
        settings: Settings = self._state.settings
        return settings
