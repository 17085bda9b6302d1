"""Streams of the NATS server in memory: what is stored, its limits, what a crash loses of it."""

import contextlib
import datetime
import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from tests.world.nats_consumers import Consumer

SECOND = 10**9
DEFAULTS: dict[str, Any] = {
    "subjects": [], "retention": "limits", "max_consumers": -1, "max_msgs": -1, "max_bytes": -1,
    "max_age": 0, "max_msgs_per_subject": -1, "max_msg_size": -1, "discard": "old",
    "storage": "file", "num_replicas": 1, "duplicate_window": 120 * SECOND, "compression": "none",
    "allow_direct": False, "mirror_direct": False, "discard_new_per_subject": False,
    "sealed": False, "deny_delete": False, "deny_purge": False, "allow_rollup_hdrs": False,
    "consumer_limits": {}, "allow_msg_ttl": False,
}  # fmt: skip
RECORD_BYTES = 30
"""What the file of a stream has of a message besides its subject, headers and body."""


class ApiError(Exception):
    """Is answered in JetStream's words."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        self.error = {"code": code, "err_code": err_code, "description": description}


class NoAnswer(Exception):
    """Is not answered at all."""


NO_STREAM = 404, 10059, "stream not found"
NO_MESSAGE = 404, 10037, "no message found"
DISK_FULL = "write msgs/1.blk: no space left on device"


def matcher(patterns: Sequence[str]) -> Callable[[str], Any]:
    """Return what tells whether a subject matches one of some patterns; a subject with wildcards
    does if all that it matches does."""
    return _matcher(tuple(patterns))


@lru_cache(4096)
def _matcher(patterns: tuple[str, ...]) -> Callable[[str], Any]:
    if not any(wild in pattern for pattern in patterns for wild in "*>"):
        return frozenset(patterns).__contains__
    words = {"*": r"[^.>]+", ">": r".+"}
    each = (r"\.".join(words.get(w) or re.escape(w) for w in p.split(".")) for p in patterns)
    return re.compile("|".join(each)).fullmatch


@lru_cache(256)
def parse(data: bytes) -> dict[str, Any]:
    """Return a request's fields; none if it is no JSON."""
    with contextlib.suppress(ValueError):
        found = json.loads(data or b"{}")
        return found if isinstance(found, dict) else {}
    return {}


@lru_cache(4096)
def iso(nanoseconds: int) -> str:
    """Return a time of the Unix clock as JetStream writes it."""
    if not nanoseconds:
        return "0001-01-01T00:00:00Z"
    when = datetime.datetime.fromtimestamp(nanoseconds // SECOND, datetime.UTC)
    return f"{when:%Y-%m-%dT%H:%M:%S}.{nanoseconds % SECOND:09d}Z"


def headers_of(block: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in block.decode().split("\r\n")[1:])
    return {name: value.strip() for name, colon, value in lines if colon}


class Server(Protocol):
    """Is the server as its streams and consumers see it."""

    is_full: bool

    def now(self) -> float: ...
    def wall(self) -> int: ...
    def after(self, seconds: float, call: Callable[[], None]) -> None: ...
    def publish(self, subject: str, reply: str, header: bytes, data: bytes) -> None: ...
    def has_reader(self, subject: str) -> bool: ...
    def deliver(self, to: str, subject: str, reply: str, header: bytes, data: bytes) -> None: ...


class StoredMessage(NamedTuple):
    seq: int
    subject: str
    header: bytes
    data: bytes
    time: int

    @property
    def size(self) -> int:
        header = len(self.header) + 4 if self.header else 0
        return RECORD_BYTES + len(self.subject) + header + len(self.data)


class Stream:
    def __init__(self, server: Server, config: dict[str, Any], created: int) -> None:
        self.name: str = config["name"]
        self.created = created
        self.messages: dict[int, StoredMessage] = {}
        self.consumers: dict[str, Consumer] = {}
        self.last = self.bytes = self.last_time = 0
        self.is_read_only = False
        """It could not write: it answers no publisher until the server is started again."""
        self._server = server
        self._by_subject: dict[str, dict[int, None]] = {}
        self._message_ids: dict[str, tuple[int, int]] = {}
        """Sequence and time of each message that has a name."""
        self._removed: deque[tuple[int, StoredMessage]] = deque(maxlen=4096)
        self._is_expiring = False
        self.configure(config)

    def configure(self, config: dict[str, Any]) -> None:
        self.config, self.matches = config, matcher(config["subjects"])
        self.trim()

    @property
    def first(self) -> int:
        return next(iter(self.messages), self.last + 1 if self.last else 0)

    def last_of(self, subject: str) -> StoredMessage | None:
        found = self._by_subject.get(subject)
        return self.messages[next(reversed(found))] if found else None

    def publish(self, subject: str, header: bytes, data: bytes) -> bytes:
        """Store a message; return the answer."""
        try:
            seq, known = self._store(subject, header, data)
        except ApiError as error:
            return json.dumps({"error": error.error, "stream": self.name, "seq": 0}).encode()
        again = ',"duplicate": true' if known else ""
        return f'{{"stream":"{self.name}","seq":{seq}{again}}}'.encode()

    def _store(self, subject: str, header: bytes, data: bytes) -> tuple[int, bool]:
        if self.is_read_only:
            raise NoAnswer
        now, name = self._server.wall(), None
        if b"\r\nNats-" in header:
            headers = headers_of(header)
            self._check_last(subject, headers.get("Nats-Expected-Last-Subject-Sequence"))
            name = headers.get("Nats-Msg-Id")
            known = self._message_ids.get(name or "")
            if known is not None and now - known[1] < self.config["duplicate_window"]:
                return known[0], True
        made = StoredMessage(self.last + 1, subject, header, data, now)
        self._check_room(made)
        if self._server.is_full:
            self.is_read_only = True
            raise NoAnswer
        if name is not None:
            self._message_ids[name] = made.seq, now
        self.append(made)
        return made.seq, False

    def _check_last(self, subject: str, expected: str | None) -> None:
        newest = self.last_of(subject) if expected else None
        seq = 0 if newest is None else newest.seq
        if expected and int(expected) != seq:
            raise ApiError(400, 10071, f"wrong last sequence: {seq}")

    def _check_room(self, made: StoredMessage) -> None:
        config, known = self.config, self._by_subject.get(made.subject, {})
        if 0 <= config["max_msg_size"] < len(made.header) + len(made.data):
            raise ApiError(400, 10054, "message size exceeds maximum allowed")
        if config["discard"] != "new":
            return
        is_replaced = 0 < config["max_msgs_per_subject"] <= len(known)
        if is_replaced and config["discard_new_per_subject"]:
            raise ApiError(503, 10077, "maximum messages per subject exceeded")
        freed = self.messages[next(iter(known))].size if is_replaced else 0
        if 0 <= config["max_bytes"] < self.bytes + made.size - freed:
            raise ApiError(503, 10077, "maximum bytes exceeded")

    def append(self, made: StoredMessage) -> None:
        self.messages[made.seq] = made
        self.last, self.last_time = made.seq, made.time
        self.bytes += made.size
        known = self._by_subject.setdefault(made.subject, {})
        known[made.seq] = None
        while 0 < self.config["max_msgs_per_subject"] < len(known):
            self.remove(next(iter(known)))
        self.trim()
        if not self._is_expiring:
            self.expire()
        if made.seq in self.messages:
            for consumer in list(self.consumers.values()):
                consumer.on_stored(made)

    def remove(self, seq: int) -> None:
        gone = self.messages.pop(seq)
        self.bytes -= gone.size
        self._removed.append((self._server.wall(), gone))
        known = self._by_subject[gone.subject]
        del known[seq]
        if not known:
            del self._by_subject[gone.subject]
        for consumer in self.consumers.values():
            consumer.on_removed(gone)

    def trim(self) -> None:
        while self.messages and 0 <= self.config["max_bytes"] < self.bytes:
            self.remove(self.first)

    def expire(self) -> None:
        """Remove what is too old, and look again when the next one is."""
        now, age = self._server.wall(), self.config["max_age"]
        while age and self.messages and self.messages[self.first].time + age <= now:
            self.remove(self.first)
        self._is_expiring = bool(age and self.messages)
        if self._is_expiring:
            left = self.messages[self.first].time + age - now
            self._server.after(min(left, age) / SECOND, self.expire)

    def purge(self, request: Mapping[str, Any]) -> int:
        """Remove messages, of a subject and but for the newest where asked; return how many."""
        wanted = matcher([request.get("filter", ">")])
        found = [seq for seq, each in self.messages.items() if wanted(each.subject)]
        found = found[: max(0, len(found) - request.get("keep", 0))]
        for seq in found:
            self.remove(seq)
        return len(found)

    def state(self) -> dict[str, Any]:
        first = self.messages[self.first].time if self.messages else 0
        return {
            "messages": len(self.messages), "bytes": self.bytes,
            "first_seq": self.first, "first_ts": iso(first),
            "last_seq": self.last, "last_ts": iso(self.last_time),
            "num_subjects": len(self._by_subject), "consumer_count": len(self.consumers),
        }  # fmt: skip

    def recover(self) -> None:
        """Start again from the files: names are known of the messages that are left."""
        self.is_read_only = self._is_expiring = False
        self._message_ids = {}
        for each in self.messages.values():
            if b"\r\nNats-Msg-Id" in each.header:
                self._message_ids[headers_of(each.header)["Nats-Msg-Id"]] = each.seq, each.time
        self.expire()

    def roll_back(self, time: float) -> None:
        """Lose what was stored since a time; what was removed since then is there again."""
        back = [each for at, each in self._removed if at > time]
        kept = {each.seq: each for each in (*self.messages.values(), *back) if each.time <= time}
        lost = [each.seq for each in (*self.messages.values(), *back) if each.time > time]
        self.messages, self._by_subject, self.bytes = {}, {}, 0
        self.last = min(lost, default=self.last + 1) - 1
        for seq in sorted(kept):
            self.messages[seq] = kept[seq]
            self.bytes += kept[seq].size
            self._by_subject.setdefault(kept[seq].subject, {})[seq] = None
        self._removed.clear()
        for consumer in self.consumers.values():
            consumer.roll_back(time)
