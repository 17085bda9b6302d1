"""Closes HTTP/1.1 connections whose request does not arrive in time.

uvicorn closes a connection that is idle between two requests, and waits for ever for a request
that was begun. Here the head of a request must be complete within a time limit, and a body may
not be silent for longer than that.
"""

import asyncio
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE_S = 15.0


class PatientH11(H11Protocol):
    """Closes the connection when its patience is at an end."""

    patience_s = PATIENCE_S
    _deadline: asyncio.TimerHandle | None = None
    _waits_for: object = None
    """IDLE while a request, or the rest of its head, is awaited; SEND_BODY for more of its body."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel()

    def _wait(self) -> None:
        """Start the time limit: for a head at its first byte, for a body at its newest."""
        state = self.conn.their_state
        if state is h11.IDLE and self._waits_for is h11.IDLE:
            return
        self._cancel()
        if state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing():
            self._waits_for = state
            self._deadline = self.loop.call_later(self.patience_s, self._give_up)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._waits_for = None

    def _give_up(self) -> None:
        self._cancel()
        if self.flow.read_paused:  # it is the service that does not read
            self._wait()
        elif self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self.transport.close()
