"""Consumers of the NATS server in memory: readers that are pushed messages, and shared work."""

import json
from collections import deque
from typing import Any, NamedTuple

from tests.world.nats_streams import SECOND, Server, StoredMessage, Stream, iso, matcher, parse

MAX_ACK_PENDING = 1000
SAVE_S = 0.1
"""Time between two writes of what a consumer has delivered and got acknowledged."""


class Consumer:
    """Reads a stream from a message on, what its filters let through."""

    def __init__(self, server: Server, stream: Stream, config: dict[str, Any]) -> None:
        self.server, self.stream, self.config = server, stream, config
        self.name: str = config["name"]
        self.created = server.wall()
        self.delivered, self.is_gone = 0, False
        filters = config.get("filter_subjects") or [config.get("filter_subject") or ">"]
        self.matches = matcher(filters)
        start = config.get("opt_start_seq", 1)
        self.last = start - 1
        """Number of the newest message that was delivered."""
        self.undelivered = self._matching_after(self.last)
        """Numbers of the messages that are stored and not yet delivered."""

    def _matching_after(self, last: int) -> deque[int]:
        messages = self.stream.messages.values()
        return deque(m.seq for m in messages if m.seq > last and self.matches(m.subject))

    def on_stored(self, message: StoredMessage) -> None:
        if message.seq > self.last and self.matches(message.subject):
            self.undelivered.append(message.seq)
            self.pump()

    def on_removed(self, message: StoredMessage) -> None:
        """A message is no longer stored."""
        if message.seq > self.last and message.seq in self.undelivered:
            self.undelivered.remove(message.seq)

    def pump(self) -> None:
        """Deliver what can be."""

    def send(self, to: str, seq: int, attempt: int) -> None:
        self.delivered += 1
        self.last = max(self.last, seq)
        message = self.stream.messages[seq]
        numbers = f"{attempt}.{seq}.{self.delivered}.{message.time}.{len(self.undelivered)}"
        reply = f"$JS.ACK.{self.stream.name}.{self.name}.{numbers}"
        self.server.deliver(to, message.subject, reply, message.header, message.data)

    def info(self) -> dict[str, Any]:
        at = {"consumer_seq": self.delivered, "stream_seq": self.last}
        return {
            "stream_name": self.stream.name, "name": self.name, "created": iso(self.created),
            "config": self.config, "delivered": at, "ack_floor": at, "num_ack_pending": 0,
            "num_redelivered": 0, "num_waiting": 0, "num_pending": len(self.undelivered),
        }  # fmt: skip

    def delete(self) -> None:
        self.is_gone = True

    def restart(self) -> bool:
        """The server is started again; return whether the consumer is still there."""
        return False

    def roll_back(self, time: float) -> None:
        """What was done since a time is lost."""


class Push(Consumer):
    """Delivers to one subject for as long as it has a subscriber, and sends heartbeats to it."""

    def __init__(self, server: Server, stream: Stream, config: dict[str, Any]) -> None:
        super().__init__(server, stream, config)
        self.to: str = config["deliver_subject"]
        self._heartbeat_s = config.get("idle_heartbeat", 0) / SECOND
        self._threshold = config.get("inactive_threshold", 5 * SECOND) / SECOND
        self._last_sent = self._inactive_since = server.now()
        self.is_active = server.has_reader(self.to)
        if self._heartbeat_s:
            server.after(self._heartbeat_s, self._heartbeat)
        # Deliver after the answer to the request that made it.
        server.after(0.0, lambda: self.interest_changed(self.is_active))

    def interest_changed(self, is_active: bool) -> None:
        """Subscribers of the subject are there, or none any more."""
        self.is_active = is_active
        if is_active:
            self.pump()
        else:
            self._inactive_since = self.server.now()
            self.server.after(self._threshold, self._delete_if_inactive)

    def _delete_if_inactive(self) -> None:
        is_inactive = not self.is_active and not self.is_gone
        if is_inactive and self.server.now() + 1e-6 >= self._inactive_since + self._threshold:
            self.stream.consumers.pop(self.name, None)
            self.is_gone = True

    def pump(self) -> None:
        while self.undelivered and self.is_active and not self.is_gone:
            self.send(self.to, self.undelivered.popleft(), 1)
            self._last_sent = self.server.now()

    def _heartbeat(self) -> None:
        if self.is_gone:
            return
        now = self.server.now()
        if not self.is_active:
            self._last_sent = now
        elif now + 1e-6 >= self._last_sent + self._heartbeat_s:
            self._last_sent = now
            block = (
                "NATS/1.0 100 Idle Heartbeat\r\n"
                f"Nats-Last-Consumer: {self.delivered}\r\n"
                f"Nats-Last-Stream: {max(self.last, self.stream.last)}\r\n\r\n"
            )
            self.server.deliver(self.to, self.to, "", block.encode(), b"")
        self.server.after(self._last_sent + self._heartbeat_s - now, self._heartbeat)


class State(NamedTuple):
    """What the file of a consumer has."""

    time: int
    last: int
    delivered: int
    pending: dict[int, int]
    attempts: dict[int, int]


class Request:
    """Asks for the next messages."""

    def __init__(self, to: str, batch: int) -> None:
        self.to, self.remaining = to, batch


class Pull(Consumer):
    """Gives each message to one of those who ask, and again until it is acknowledged."""

    def __init__(self, server: Server, stream: Stream, config: dict[str, Any]) -> None:
        super().__init__(server, stream, config)
        self.waiting: deque[Request] = deque()
        self.pending: dict[int, int] = {}
        """Delivered and not acknowledged, with the time from which the wait counts."""
        self._attempts: dict[int, int] = {}
        self._redelivery: deque[int] = deque()
        self._saved = deque([self._state()], maxlen=64)
        """States that were written to the file."""
        self._is_saving = False
        self._check_at: float | None = None

    def _state(self) -> State:
        wall = self.server.wall()
        return State(wall, self.last, self.delivered, dict(self.pending), dict(self._attempts))

    def _changed(self) -> None:
        """Save the state, as the real one does: at once, but at most ten times a second."""
        if not self._is_saving:
            self._is_saving = True
            left = SAVE_S - (self.server.wall() - self._saved[-1].time) / SECOND
            self.server.after(min(max(0.0, left), SAVE_S), self._save)

    def _save(self) -> None:
        self._is_saving = False
        self._saved.append(self._state())

    @property
    def _wait(self) -> int:
        return int(self.config.get("ack_wait") or 30 * SECOND)

    def info(self) -> dict[str, Any]:
        waiting, pending = len(self.waiting), len(self.pending)
        return {**super().info(), "num_waiting": waiting, "num_ack_pending": pending}

    def request(self, reply: str, wanted: dict[str, Any]) -> None:
        """Deliver messages to a subject, now or as they come."""
        asked, expires = Request(reply, wanted.get("batch", 1)), wanted.get("expires", 0)
        self.waiting.append(asked)
        self.pump()
        if expires and asked.remaining:
            self.server.after(expires / SECOND, lambda: self._expire(asked))
        elif wanted.get("no_wait"):
            self._finish(asked, "404 No Messages")

    def _expire(self, asked: Request) -> None:
        words = f"Nats-Pending-Messages: {asked.remaining}\r\nNats-Pending-Bytes: 0"
        self._finish(asked, f"408 Request Timeout\r\n{words}")

    def _finish(self, asked: Request, status: str) -> None:
        if asked in self.waiting:
            self.waiting.remove(asked)
            block = f"NATS/1.0 {status}\r\n\r\n".encode()
            self.server.deliver(asked.to, asked.to, "", block, b"")

    def pump(self) -> None:
        while self.waiting:
            asked = self.waiting[0]
            is_there = self.server.has_reader(asked.to)
            seq = self._next() if is_there else None
            if is_there and seq is None:
                return
            self.waiting.popleft()
            if seq is None:
                continue
            asked.remaining -= 1
            if asked.remaining:
                self.waiting.append(asked)
            self.pending[seq] = self.server.wall()
            self.send(asked.to, seq, self._attempts[seq])
            self._changed()
            self._check_in(self._wait / SECOND)

    def _next(self) -> int | None:
        """Return the next message to deliver, one that was given back before others."""
        most = self.config.get("max_deliver", -1)
        while self._redelivery:
            seq = self._redelivery.popleft()
            self._attempts[seq] += 1
            if most < 1 or self._attempts[seq] <= most:
                return seq
            self.pending.pop(seq, None)
            if self._attempts[seq] == most + 1:
                self._publish_advisory(seq, most)
        if len(self.pending) >= MAX_ACK_PENDING or not self.undelivered:
            return None
        seq = self.undelivered.popleft()
        self._attempts[seq] = self._attempts.get(seq, 0) + 1
        return seq

    def _publish_advisory(self, seq: int, deliveries: int) -> None:
        stream = self.stream.name
        advisory = {
            "type": "io.nats.jetstream.advisory.v1.max_deliver",
            "id": f"{stream}-{self.name}-{seq}", "timestamp": iso(self.server.wall()),
            "stream": stream, "consumer": self.name, "stream_seq": seq, "deliveries": deliveries,
        }  # fmt: skip
        subject = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{stream}.{self.name}"
        self.server.publish(subject, "", b"", json.dumps(advisory).encode())

    def acknowledge(self, seq: int, words: bytes) -> None:
        """Process a worker's acknowledgement, or what it sends instead."""
        if seq not in self.pending:
            return
        if words.startswith(b"+WPI"):
            self.pending[seq] = self.server.wall()
        elif words.startswith(b"-NAK"):
            self._nak(seq, parse(words[4:]).get("delay", 0))
        elif words[:5] in (b"", b"+ACK", b"+TERM"):
            self._forget(seq)
            self._changed()
            self.pump()

    def _nak(self, seq: int, delay: int) -> None:
        if seq in self._redelivery:
            return
        if delay:
            self.pending[seq] = self.server.wall() + delay - self._wait
            self._check_in(delay / SECOND)
        else:
            self._redelivery.append(seq)
            self.pump()

    def _forget(self, seq: int) -> None:
        self.pending.pop(seq, None)
        self._attempts.pop(seq, None)
        if seq in self._redelivery:
            self._redelivery.remove(seq)

    def on_removed(self, message: StoredMessage) -> None:
        super().on_removed(message)
        self._forget(message.seq)

    def _check_in(self, seconds: float) -> None:
        """Check the pending messages in some seconds, unless an earlier check is due."""
        at = self.server.now() + seconds
        if self._check_at is None or at < self._check_at:
            self._check_at = at
            self.server.after(seconds, lambda: self._check_pending(at))

    def _check_pending(self, at: float) -> None:
        if at != self._check_at or self.is_gone:
            return
        self._check_at, now, next_look = None, self.server.wall(), None
        for seq, since in self.pending.items():
            left = since + self._wait - now
            if seq in self._redelivery:
                continue
            if left <= SECOND // 10**6:
                self._redelivery.append(seq)
            else:
                next_look = min(next_look or left, left, self._wait)
        if next_look is not None:
            self._check_in(next_look / SECOND)
        self.pump()

    def delete(self) -> None:
        super().delete()
        while self.waiting:
            self._finish(self.waiting[0], "409 Consumer Deleted")

    def restart(self) -> bool:
        """Go on from what the file has; what was done since, others do again."""
        saved, there = self._saved[-1], self.stream.messages
        self.last, self.delivered = min(saved.last, self.stream.last), saved.delivered
        self.pending = {seq: since for seq, since in saved.pending.items() if seq in there}
        self._attempts = {seq: each for seq, each in saved.attempts.items() if seq in there}
        self.waiting.clear()
        self._redelivery.clear()
        self.undelivered = self._matching_after(self.last)
        self._check_at, self._is_saving = None, False
        if self.pending:
            self._check_in(0.0)
        return True

    def roll_back(self, time: float) -> None:
        while len(self._saved) > 1 and self._saved[-1].time > time:
            self._saved.pop()
