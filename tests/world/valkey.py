"""The Redis of a world: the real client speaks its protocol with it, through no socket.

`Valkey.installed` leads every connection here: the host of a URL (`Valkey.url`) names the client,
and users are those of the lines that the product writes into redis.conf.

Not modelled: commands that no role has, lists (whose rights are checked, for worlds share no cache
of a host), options of SET, pages of SCAN, and a log of which a crash leaves half a transaction.
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any

from redis.asyncio.connection import Connection

from digenrl.local.brokers.embedded import redis_users
from shared.messages.rights import Role
from shared.process.http_access import secret_digest
from tests.world.bucket import KEYS, Cut
from tests.world.table import Table

AGAIN_S = 1.0
"""Seconds after which TCP sends again what got lost."""
READS = {"GET": 1, "LRANGE": 3, "WATCH": -1}
WRITES = {"SET": 2, "RPUSH": -2, "EXPIRE": 2, "DEL": -1}
"""Arguments of each command; below 0: at least so many."""
AT_ONCE = ("WATCH", "MULTI", "EXEC", "DISCARD")
"""Commands that a transaction does not queue."""
HELLO = ["server", "valkey", "version", "9.1.2", "mode", "standalone", "role", "master"]


class User:
    def __init__(self, line: str) -> None:
        _, self.name, _, secret, *rules = line.split()
        self.digest, self.commands = secret[1:], {each[1:] for each in rules if each[0] == "+"}
        keys = [rule.partition("~") for rule in rules if rule[0] in "~%"]
        self.reads, self.writes = (
            re.compile(
                b"|".join(_glob(of) for may, _, of in keys if not may or way in may) or b"(?!)"
            )
            for way in "RW"
        )


def _glob(pattern: str) -> bytes:
    return re.escape(pattern.encode()).replace(rb"\*", b"(?s:.*)")


@cache
def _users() -> dict[str, User]:
    return {user.name: user for user in map(User, redis_users(KEYS).splitlines()[1:])}


@dataclass(slots=True)
class Line:
    """What is between one client and the server."""

    delay: Callable[[], float] = lambda: 0.0
    """Returns the seconds of each way."""
    cut: Cut = ""
    num_lost: int = 0
    """So many of the next answers are lost, with their connections."""


@dataclass(slots=True, eq=False)
class Valkey:
    is_down: bool = False
    is_hanging: bool = False
    """It does what arrives once it no longer hangs."""
    is_full: bool = False
    context: Context = field(default_factory=copy_context)
    """The server's own: it works on if a client is killed."""
    users: dict[str, User] = field(default_factory=_users)
    table: Table[bytes, bytes] = field(default_factory=Table)
    changes: dict[bytes, int] = field(default_factory=dict)
    """How often each key has changed."""
    sessions: "list[Session]" = field(default_factory=list)
    _lines: dict[str, Line] = field(default_factory=dict)

    def url(self, client: str, role: Role) -> str:
        return f"redis://{role}:{KEYS.secret(role)}@{client}:6379"

    def line(self, client: str) -> Line:
        return self._lines.setdefault(client.lower(), Line())

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have every client of Redis connect to this one."""
        real: Any = Connection._connect

        async def connect(connection: Any) -> None:
            async with asyncio.timeout(connection.socket_connect_timeout):
                line = self.line(connection.host)
                await asyncio.sleep(line.delay())
                while line.cut:  # noqa: ASYNC110 -- TCP
                    await asyncio.sleep(AGAIN_S)
            if self.is_down:
                raise ConnectionRefusedError(111, "Connection refused")
            session = Session(self, connection.host, line)
            self.sessions.append(session)
            connection._reader, connection._writer = session.reader, session

        Connection._connect = connect  # type: ignore[method-assign]
        try:
            yield
        finally:
            Connection._connect = real  # type: ignore[method-assign]

    def stop(self) -> None:
        self.is_down = True
        for session in self.sessions.copy():
            session.end()

    def start(self) -> None:
        self.is_down = False

    def lose_unsynced(self, seconds: float) -> None:
        """Restart it without what it has acknowledged in the last seconds: inf is all."""
        self.stop()
        self.table = Table() if seconds == inf else self.table.before(seconds)
        self.start()

    def set(self, key: bytes, value: bytes | None) -> str:
        self.table.set(key, value)
        self.changes[key] = self.changes.get(key, 0) + 1
        return "OK"


class Refusal(Exception):
    """An error that the server answers with."""


class Session:
    """One connection: what the client has as its stream to write to, and the server's part."""

    def __init__(self, server: Valkey, client: str, line: Line) -> None:
        self.server, self.client, self.line = server, client, line
        self.reader = asyncio.StreamReader()
        self.user: User | None = None
        self.protocol = 2
        self.queue: list[tuple[str, list[bytes]]] | None = None
        self.is_over = self.is_spoilt = False
        self.watched: dict[bytes, int] = {}
        self._sent: deque[bytes] = deque()
        self._answers: deque[bytes] = deque()

    def writelines(self, data: list[bytes]) -> None:
        if not self.is_over:
            self._sent.append(b"".join(data))
            self._later(self.line.delay(), self._arrive)

    async def drain(self) -> None: ...
    async def wait_closed(self) -> None: ...
    def get_extra_info(self, name: str) -> None: ...

    def close(self) -> None:
        if self in self.server.sessions:
            self.server.sessions.remove(self)

    def end(self) -> None:
        """Close it from the server's side."""
        self.is_over = True
        self._sent.clear()
        self._answers.clear()
        self.close()
        self.reader.feed_eof()

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, call, context=self.server.context)

    def _arrive(self) -> None:
        if self.line.cut == "requests" or self.server.is_hanging:
            return self._later(AGAIN_S, self._arrive)
        if self._sent:
            answers = map(self._answer, _commands(self._sent.popleft()))
            self._answers.append(b"".join(answers))
            self._later(self.line.delay(), self._deliver)

    def _deliver(self) -> None:
        if self.line.cut == "answers":
            return self._later(AGAIN_S, self._deliver)
        if self._answers and self.line.num_lost:
            self.line.num_lost -= 1
            self.end()
        elif self._answers:
            self.reader.feed_data(self._answers.popleft())

    def _answer(self, words: list[bytes]) -> bytes:
        name, arguments = words[0].upper().decode(), words[1:]
        try:
            if name in ("HELLO", "AUTH"):
                return self._encoded(self._log_in(name, [each.decode() for each in arguments]))
            self._check(name, arguments)
            if self.queue is not None and name not in AT_ONCE:
                self.queue.append((name, arguments))
                return b"+QUEUED\r\n"
            return self._encoded(COMMANDS[name](self, *arguments))
        except Refusal as refusal:
            self.is_spoilt = True
            return self._encoded(refusal)

    def _log_in(self, name: str, words: list[str]) -> Any:
        login = words[-2:] if name == "AUTH" or "AUTH" in words else []
        if login:
            user = self.server.users.get(login[0])
            if user is None or user.digest != secret_digest(login[-1]):
                raise Refusal("WRONGPASS invalid username-password pair or user is disabled.")
            self.user = user
        elif self.user is None:
            raise Refusal("NOAUTH HELLO must be called with the client already authenticated")
        if name == "AUTH":
            return "OK"
        self.protocol = int(words[0]) if words else self.protocol
        return dict(zip(HELLO[::2], HELLO[1::2], strict=True)) | {"proto": self.protocol}

    def _check(self, name: str, arguments: list[bytes]) -> None:
        """Raises Refusal if the server would not do or queue this."""
        if self.user is None:
            raise Refusal("NOAUTH Authentication required.")
        command, number = name.lower(), READS.get(name) or WRITES.get(name)
        if name == "CLIENT":
            command += f"|{arguments[0].decode().lower()}"
        if command not in self.user.commands:
            raise Refusal(
                f"NOPERM User {self.user.name} has no permissions to run the '{command}' command"
            )
        if number is not None:
            self._check_keys(name, arguments, number)

    def _check_keys(self, name: str, arguments: list[bytes], number: int) -> None:
        if len(arguments) < -number or 0 <= number != len(arguments):
            raise Refusal(f"ERR wrong number of arguments for '{name.lower()}' command")
        assert self.user is not None
        mine = self.user.writes if name in WRITES else self.user.reads
        if not all(mine.fullmatch(key) for key in (arguments if number == -1 else arguments[:1])):
            raise Refusal("NOPERM No permissions to access a key")
        if self.server.is_full and name in ("SET", "RPUSH"):
            raise Refusal("OOM command not allowed when used memory > 'maxmemory'.")

    def watch(self, keys: tuple[bytes, ...]) -> str:
        self.watched |= {key: self.server.changes.get(key, 0) for key in keys}
        return "OK"

    def begin(self, queue: "list[tuple[str, list[bytes]]] | None") -> str:
        self.queue, self.is_spoilt = queue, False
        self.watched = self.watched if queue is not None else {}
        return "OK"

    def execute(self) -> list[Any] | None:
        watched, queue, is_spoilt = self.watched, self.queue, self.is_spoilt
        if queue is None:
            raise Refusal("ERR EXEC without MULTI")
        self.begin(None)
        if is_spoilt:
            raise Refusal("EXECABORT Transaction discarded because of previous errors.")
        if any(self.server.changes.get(key, 0) != number for key, number in watched.items()):
            return None
        return [COMMANDS[name](self, *arguments) for name, arguments in queue]

    def _encoded(self, value: Any) -> bytes:
        match value:
            case None:
                return b"_\r\n" if self.protocol == 3 else b"$-1\r\n"
            case bytes():
                return b"$%d\r\n%b\r\n" % (len(value), value)
            case int():
                return b":%d\r\n" % value
            case str():
                return b"+%b\r\n" % value.encode()
            case Refusal():
                return b"-%b\r\n" % str(value).encode()
            case dict() if self.protocol == 3:
                pairs = [self._encoded(each) for pair in value.items() for each in pair]
                return b"%%%d\r\n%b" % (len(value), b"".join(pairs))
            case dict():
                return self._encoded([each for pair in value.items() for each in pair])
            case _:
                return b"*%d\r\n%b" % (len(value), b"".join(map(self._encoded, value)))


def _delete(session: Session, *keys: bytes) -> int:
    found = [key for key in keys if key in session.server.table.now]
    for key in found:
        session.server.set(key, None)
    return len(found)


def _scan(session: Session, cursor: bytes, *options: bytes) -> list[Any]:
    named = dict(zip(options[::2], options[1::2], strict=True))
    wanted = re.compile(_glob(named.get(b"MATCH", b"*").decode()))
    return [b"0", [key for key in session.server.table.under(b"") if wanted.fullmatch(key)]]


COMMANDS: dict[str, Callable[..., Any]] = {
    "PING": lambda session: "PONG",
    "CLIENT": lambda session, *_: "OK",
    "GET": lambda session, key: session.server.table.now.get(key),
    "SET": lambda session, key, value: session.server.set(key, value),
    "DEL": _delete,
    **dict.fromkeys(("RPUSH", "LRANGE", "EXPIRE"), lambda *_: 0),
    "SCAN": _scan,
    "WATCH": lambda session, *keys: session.watch(keys),
    "UNWATCH": lambda session: session.begin(None),
    "MULTI": lambda session: session.begin([]),
    "DISCARD": lambda session: session.begin(None),
    "EXEC": Session.execute,
}


def _commands(data: bytes) -> Iterator[list[bytes]]:
    at = 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        words, count, at = [], int(data[at + 1 : end]), end + 2
        for _ in range(count):
            end = data.index(b"\r\n", at)
            at = end + 4 + int(data[at + 1 : end])
            words.append(data[end + 2 : at - 2])
        yield words
