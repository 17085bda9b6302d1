"""A NATS server with JetStream in memory, which the real client reaches over `nats_transport`.

It reads the nats.conf of the real one: users, what each may publish and subscribe to, room.
`test_nats_conformance.py` runs the same assertions on both. Not modelled:

    queue groups, clusters, accounts, TLS, `$SYS`, slow consumers, pings of the server
    limits of a reply's subject, of a payload (clients keep it), and of subjects' spelling
    advisories but for MAX_DELIVERIES
    streams: retention but by limits, mirrors, rollups, TTLs of messages, max_msgs
    consumers: acknowledgement but none (pushed) and explicit (pulled); flow control; a start but
    by number; pauses, priorities, back-off, +NXT, heartbeats of pulled ones, max_bytes of a pull
    the API's lists and names, direct gets, snapshots, deletion of streams
    checks of what the product never sends
    the time that storing takes
"""

import asyncio
import heapq
import json
import re
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

from tests.world.nats_jetstream import JetStream
from tests.world.nats_streams import SECOND, matcher
from tests.world.nats_transport import NO_PROCESS, Connection

EPOCH = 1_800_000_000 * SECOND


class Subscription(NamedTuple):
    session: "Session"
    sid: bytes
    subject: str
    fits: Callable[[str], Any]


class Session:
    """A connection as the server sees it."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection, self.number = connection, number
        self.user: User | None = None
        self.subscriptions: dict[bytes, Subscription] = {}
        self.limits: dict[bytes, int] = {}
        """Messages that a subscription still gets, where the client has said so."""
        self.buffer = b""
        self.outbox: list[bytes] = []


class User:
    def __init__(self, name: str, password: str, permissions: dict[str, Any] | None = None) -> None:
        self.name, self.password = name, password
        allowed = permissions or {"publish": {"allow": [">"]}, "subscribe": {"allow": [">"]}}
        self.may_publish = lru_cache(4096)(matcher(allowed["publish"]["allow"]))
        self.may_subscribe = matcher(allowed["subscribe"]["allow"])


@cache
def users_in(config: str) -> list[User]:
    """Return the users of a nats.conf as `digenrl.local.brokers.nats_config` writes it."""
    text = config.partition("\nauthorization ")[2]
    if found := re.match(r"{ user: (\S+), password: (\".*\") }", text):
        return [User(found[1], json.loads(found[2]))]
    return [User(u["user"], u["password"], u["permissions"]) for u in json.loads(text)["users"]]


class NatsServer(JetStream):
    """Is put into a `Network` under its host and port; `start` it first."""

    def __init__(self, config: str, *, epoch: int = EPOCH, version: str = "2.15.1") -> None:
        super().__init__(int(re.findall(r"max_file_store: (\d+)", config)[0]))
        self.users = {user.name: user for user in users_in(config)}
        self.epoch, self.clock_offset = epoch, 0.0
        """The Unix clock at the loop's 0, in ns; seconds by which the server is ahead of it."""
        self.version = version
        self.is_up = self.is_hung = False
        self.sessions: dict[Connection, Session] = {}
        self._exact: dict[str, list[Subscription]] = {}
        self._below: dict[str, list[Subscription]] = {}
        """Subscriptions to `<key>.*`: the inboxes."""
        self._others: list[Subscription] = []
        self._backlog: list[Callable[[], None]] = []
        """What came while the server hung."""
        self._to_flush: list[Session] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._numbers = 0

    # What faults do

    def start(self) -> None:
        self.is_up = True
        self.recover()

    def kill(self) -> None:
        """Connections end; streams stay, and so do consumers with a durable name."""
        self.is_up = self.is_hung = False
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._timers, self._backlog, self._to_flush = [], [], []
        self._exact, self._below, self._others = {}, {}, []
        sessions, self.sessions = self.sessions, {}
        for session in sessions.values():
            session.connection.to_client.write(None)

    def wipe(self) -> None:
        """Lose all streams in a crash; a server that was up is up again."""
        self.lose_unsynced(float("inf"))

    def lose_unsynced(self, seconds: float) -> None:
        """Lose what was written in the last seconds, in a crash after which the disk lacks it."""
        was_up, since = self.is_up, self.wall() - min(seconds, 1e9) * SECOND
        self.kill()
        self.roll_back(since)
        if was_up:
            self.start()

    def lose_stream(self, name: str) -> None:
        """Lose one stream, and nothing else."""
        self.kill()
        del self.streams[name]
        self._stream_of.clear()
        self.start()

    def hang(self) -> None:
        """Stop without dying: connections stay, and nothing is answered until `go_on`."""
        self.is_hung = True

    def go_on(self) -> None:
        self.is_hung = False
        waiting, self._backlog = self._backlog, []
        for call in waiting:
            call()
        if self._timer is None:  # a tick came meanwhile
            self._tick()

    # Time

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> int:
        return self.epoch + int((self.now() + self.clock_offset) * SECOND)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._timers, (self.now() + seconds, self._numbers, call))
        self._arm()

    def _arm(self) -> None:
        at = self._timers[0][0]
        if self._timer is not None and self._timer.when() > at:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(at, self._tick, context=NO_PROCESS)

    def _tick(self) -> None:
        self._timer = None
        if self.is_hung or not self.is_up:
            return
        now = self.now() + 1e-6
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        self._flush()
        if self._timers:
            self._arm()

    # Connections

    def accept(self, connection: Connection) -> None:
        if self.is_hung:
            self._backlog.append(lambda: self.accept(connection))
            return
        self._numbers += 1
        session = Session(connection, self._numbers)
        self.sessions[connection] = session
        info = {
            "server_id": "WORLD", "server_name": "WORLD", "version": self.version, "proto": 1,
            "headers": True, "max_payload": 256 * 1024, "jetstream": True, "auth_required": True,
            "client_id": session.number,
        }  # fmt: skip
        connection.to_client.write(f"INFO {json.dumps(info)}\r\n".encode())

    def disconnected(self, connection: Connection) -> None:
        if self.is_hung:
            self._backlog.append(lambda: self.disconnected(connection))
            return
        session = self.sessions.pop(connection, None)
        if session is not None:
            for subscription in list(session.subscriptions.values()):
                self._unsubscribe(subscription)

    def _send_error(self, session: Session, why: str, *, closes: bool = True) -> None:
        self._write(session, f"-ERR '{why}'\r\n".encode())
        if closes:
            self._flush()
            session.connection.to_client.write(None)
            self.disconnected(session.connection)

    def _write(self, session: Session, data: bytes) -> None:
        if not session.outbox:
            self._to_flush.append(session)
        session.outbox.append(data)

    def _flush(self) -> None:
        unsent, self._to_flush = self._to_flush, []
        for session in unsent:
            out, session.outbox = session.outbox, []
            session.connection.to_client.write(out[0] if len(out) == 1 else b"".join(out))

    # The protocol

    def receive(self, connection: Connection, data: bytes) -> None:
        if self.is_hung:
            self._backlog.append(lambda: self.receive(connection, data))
            return
        session = self.sessions.get(connection)
        if session is None:
            return
        data, at = session.buffer + data, 0
        while connection in self.sessions and (end := data.find(b"\r\n", at)) >= 0:
            behind = self._handle_line(session, data[at:end], data, end + 2)
            if behind < 0:
                break
            at = behind
        session.buffer = data[at:]
        self._flush()

    def _handle_line(self, session: Session, line: bytes, data: bytes, at: int) -> int:
        """Do what a line says; return where the next one begins, -1 if bytes are missing."""
        words = line.split()
        match words[0] if words else b"":
            case b"PUB" | b"HPUB":
                end = at + int(words[-1])
                if len(data) < end + 2:
                    return -1
                self._handle_publish(session, words, data[at:end])
                return end + 2
            case b"SUB":
                self._subscribe(session, words[1].decode(), words[-1])
            case b"UNSUB":
                self._handle_unsubscribe(session, words[1], int(words[2]) if len(words) > 2 else 0)
            case b"PING":
                self._write(session, b"PONG\r\n")
            case b"CONNECT":
                self._connect(session, json.loads(line[8:]))
            case _:
                self._send_error(session, "Unknown Protocol Operation")
        return at

    def _connect(self, session: Session, options: dict[str, Any]) -> None:
        user = self.users.get(options.get("user", ""))
        if user is None or user.password != options.get("pass"):
            self._send_error(session, "Authorization Violation")
            return
        session.user, session.connection.user = user, user.name
        session.connection.name = options.get("name") or ""

    def _handle_publish(self, session: Session, words: list[bytes], body: bytes) -> None:
        subject, has_header = words[1].decode(), words[0] == b"HPUB"
        if session.user is None or not session.user.may_publish(subject):
            why = f'Permissions Violation for Publish to "{subject}"'
            self._send_error(session, why, closes=session.user is None)
            return
        reply = words[2].decode() if len(words) > 3 + has_header else ""
        cut = int(words[-2]) if has_header else 0
        self.publish(subject, reply, body[:cut], body[cut:])

    def publish(self, subject: str, reply: str, header: bytes, data: bytes) -> None:
        """Give a message to JetStream and to whoever listens."""
        is_taken = self.handle(subject, reply, header, data)
        found = self._readers(subject)
        for each in found:
            self._send_message(each, subject, reply, header, data)
        if reply and not is_taken and not found:
            block = f"NATS/1.0 503\r\nNats-Subject: {subject}\r\n\r\n".encode()
            self.deliver(reply, reply, "", block, b"")

    # Subscriptions

    def _subscribe(self, session: Session, subject: str, sid: bytes) -> None:
        if session.user is None or not session.user.may_subscribe(subject):
            why = f'Permissions Violation for Subscription to "{subject}"'
            self._send_error(session, why, closes=session.user is None)
            return
        made = Subscription(session, sid, subject, matcher([subject]))
        session.subscriptions[sid] = made
        self._index_for(subject).append(made)
        self.interest_changed(subject, True)

    def _index_for(self, subject: str) -> list[Subscription]:
        head, _, tail = subject.rpartition(".")
        if "*" not in subject and tail != ">":
            return self._exact.setdefault(subject, [])
        return self._below.setdefault(head, []) if tail == "*" not in head else self._others

    def _unsubscribe(self, gone: Subscription) -> None:
        gone.session.subscriptions.pop(gone.sid, None)
        gone.session.limits.pop(gone.sid, None)
        index = self._index_for(gone.subject)
        if gone in index:
            index.remove(gone)
        if not index:
            self._exact.pop(gone.subject, None)
            self.interest_changed(gone.subject, False)

    def _handle_unsubscribe(self, session: Session, sid: bytes, most: int) -> None:
        found = session.subscriptions.get(sid)
        if found is not None and not most:
            self._unsubscribe(found)
        elif found is not None:
            session.limits[sid] = most

    def _readers(self, subject: str) -> list[Subscription]:
        found = [*self._exact.get(subject, ()), *self._below.get(subject.rpartition(".")[0], ())]
        found += [each for each in self._others if each.fits(subject)]
        return found

    def has_reader(self, subject: str) -> bool:
        return bool(self._readers(subject))

    def deliver(self, to: str, subject: str, reply: str, header: bytes, data: bytes) -> None:
        """Give the readers of one subject a message as if it came under another one."""
        for each in self._readers(to):
            self._send_message(each, subject, reply, header, data)

    def _send_message(
        self, to: Subscription, subject: str, reply: str, header: bytes, data: bytes
    ) -> None:
        words = f"{subject} {to.sid.decode()} {reply}{' ' if reply else ''}"
        size = len(header) + len(data)
        line = f"HMSG {words}{len(header)} {size}\r\n" if header else f"MSG {words}{size}\r\n"
        self._write(to.session, b"%b%b%b\r\n" % (line.encode(), header, data))
        limits = to.session.limits
        if to.sid in limits:
            limits[to.sid] -= 1
            if limits[to.sid] < 1:
                self._unsubscribe(to)
