"""The object store of a world: a bucket in memory, with the rights of each role and with faults.

A service gets ``ObjectStore(bucket.handle("trainer-0", "trainer"))``. A request that has been sent
arrives even if its sender is killed or gives up meanwhile. What cannot be served is repeated as
obstore does, for a minute; whoever creates a name and loses the answer finds it taken then.

Not modelled: the parts of a large object (a put is one request), a stream that breaks in the
middle, pages of a list, limits of a rate, versions and rules of a bucket, bytes that are not
yet swept (`ObjectStore.bytes_on_disk`), and that SeaweedFS creates no object where a folder is.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple, TypeVar, cast

from obstore.exceptions import BaseError, GenericError, PermissionDeniedError

from digenrl.local.brokers.seaweedfs import BUCKET, OWNER, _identities
from digenrl.local.secrets.keys import Keys
from shared.errors import IntegrityError
from shared.limits import MAX_RETRY_PAUSE, MAX_RETRY_TIME
from shared.messages.contracts import ObjectRef
from shared.messages.rights import Role
from shared.store.backend import CHUNK, Content, StoredObject
from shared.store.bucket import _as_unavailable
from tests.world.table import Table

RETRIES_S, PAUSE_S = MAX_RETRY_TIME.total_seconds(), MAX_RETRY_PAUSE.total_seconds()
"""The client's; `MAX_SILENCE` is as long as the first. TCP sends again as often as the second."""
FIRST_PAUSE_S = 0.1
RESET = 0.9
"""Share of a killed store's connections that end so that obstore does not repeat a create: of 1,200
while SeaweedFS was killed, 296 had an unknown outcome, and 2 found their own object."""
Cut = Literal["", "requests", "answers"]
"""What gets lost between a client and a server."""
T = TypeVar("T")


class RoleKeys(Keys):
    """Keys of which each is the name of its role."""

    def secret(self, role: Role) -> str:
        return role

    @property
    def store(self) -> str:
        return OWNER


KEYS = RoleKeys(Path())


class Repeat(Exception):
    """An attempt has failed, and the client's library makes another one."""


class Stored(NamedTuple):
    data: bytes
    modified: float


@dataclass(slots=True, eq=False)
class Bucket:
    """What the store has; the fields below `random` are faults, as are the methods that change
    without being asked by a client."""

    runs: Collection[str]
    """Names of runs that the roles may write to."""
    random: Random
    epoch: float = 0.0
    """Unix seconds at second 0 of the loop."""
    record: Callable[[str, str, str], None] | None = None
    """Called with each request that is served: client, operation and key."""
    clock_offset: float = 0.0
    is_down: bool = False
    is_hanging: bool = False
    """It serves what arrives once it no longer does."""
    is_full: bool = False
    slow_s: float = 0.0
    """Seconds of the disk, for each request."""
    objects: Table[str, Stored] = field(default_factory=Table)
    num_stops: int = 0
    context: Context = field(default_factory=copy_context)
    """The store's own: it works on if a client is killed."""

    def handle(self, name: str, role: str) -> "BucketHandle":
        """Return what a client has with the keys of a role, or of the OWNER."""
        for identity in _identities(KEYS, self.runs):
            if identity["name"] == role:
                return BucketHandle(self, name, _rules(identity["actions"]))
        raise ValueError(f"{role} has no keys")

    @property
    def clock(self) -> float:
        return self.epoch + asyncio.get_running_loop().time() + self.clock_offset

    def put(self, key: str, data: bytes) -> None:
        self.objects.set(key, Stored(data, float(int(self.clock))))

    def stop(self) -> None:
        """Kill the store: what has arrived is stored, and its answer lost."""
        self.is_down = True
        self.num_stops += 1

    def start(self) -> None:
        self.is_down = False

    def lose_unsynced(self, seconds: float, folders: tuple[str, ...] = ("",)) -> None:
        """Have the power fail, so that what was stored in these folders in the last seconds is
        gone; it runs again afterwards."""
        was_down, then = self.is_down, self.objects.before(seconds).now
        self.stop()
        for key in sorted({*self.objects.now, *then}):
            if key.startswith(folders) and then.get(key) != self.objects.now.get(key):
                self.objects.set(key, then.get(key))
        self.is_down = was_down

    def flip(self, key: str) -> None:
        """Change a bit of an object, if it is there."""
        self._damage(key, is_torn=False)

    def tear(self, key: str) -> None:
        """Have an object's first bytes only, as after a crash."""
        self._damage(key, is_torn=True)

    def _damage(self, key: str, *, is_torn: bool) -> None:
        if (found := self.objects.now.get(key)) is not None and found.data:
            data, at = bytearray(found.data), self.random.randrange(len(found.data))
            data[at] ^= 1 << self.random.randrange(8)
            self.objects.now[key] = found._replace(data=bytes(data[:at] if is_torn else data))


def _rules(actions: object) -> re.Pattern[str]:
    """Return what matches ``action:bucket/key`` if SeaweedFS allows it: `*` is for slashes too, and
    a rule without one is for all of its bucket."""
    assert isinstance(actions, list)
    rules = [
        re.escape(rule).replace(r"\*", ".*").replace(r"\?", ".") if "*" in rule
        else ".*" if rule == "Admin"
        else f"{re.escape(rule)}/.*"
        for rule in actions
    ]  # fmt: skip
    return re.compile("|".join(rules), re.DOTALL)


@dataclass(slots=True, eq=False)
class BucketHandle:
    """Implements `Backend` for one client. What follows `delay` are faults of this client's."""

    bucket: Bucket
    name: str
    rules: re.Pattern[str]
    delay: Callable[[str, int], float] = lambda operation, size: 0.0
    """Returns the seconds that a request of so many bytes takes, there and back."""
    seconds_per_byte: float = 0.0
    """Of the line by which it reads."""
    cut: Cut = ""
    breaks: list[Literal["close", "reset"]] = field(default_factory=list)
    """How the connection breaks before each of the next answers. After a reset obstore does not
    repeat a create, whose outcome then is unknown."""
    stale_s: float = 0.0
    """What it reads and lists is so many seconds old."""
    num_misdirected: int = 0
    """So many of the next reads return another object of the folder."""
    spoils: str = "nothing"
    """How the keys end of what it stores with a wrong byte."""

    async def write(self, key: str, data: Content) -> None:
        sent = bytes(data)
        await self._serve("write", key, len(data), lambda: self._put(key, sent))

    async def write_unnamed(self, folder: str, data: Content, ref: Awaitable[ObjectRef]) -> None:
        await self.write((await ref).key, data)

    async def create(self, key: str, data: bytes) -> bool:
        return await self._serve("create", key, len(data), lambda: self._create(key, data))

    async def read(self, key: str) -> bytes | None:
        found = await self._serve("read", key, 0, lambda: self._read(key))
        if found is None:
            return None
        await self._cross(found.data)
        return found.data

    async def stream(self, key: str, first: int) -> AsyncGenerator[bytes]:
        found = await self._serve("stream", key, 0, lambda: self._read(key))
        if found is None:
            raise IntegrityError(f"{key} is not in the store")
        if first >= len(found.data) and first:
            with _as_unavailable():
                raise GenericError(f"GET {key}: 416 Range Not Satisfiable")
        for begin in range(first, len(found.data), CHUNK):
            await self._cross(found.data[begin : begin + CHUNK])
            yield found.data[begin : begin + CHUNK]

    async def size(self, key: str) -> int | None:
        found = await self._serve("size", key, 0, lambda: self._head(key))
        return None if found is None else len(found.data)

    async def keys(self, prefix: str) -> list[str]:
        folder = f"{prefix.rstrip('/')}/"
        return await self._serve("list", folder, 0, lambda: self._keys(folder))

    async def entries(self, prefix: str) -> list[StoredObject]:
        folder = f"{prefix.rstrip('/')}/"
        return await self._serve("list", folder, 0, lambda: self._list(folder))

    async def folders(self) -> list[str]:
        keys = await self._serve("list", "", 0, lambda: self._keys(""))
        return [*{key.partition("/")[0] for key in keys}]

    async def unfinished(self, prefix: str) -> list[StoredObject]:
        return []

    async def delete(self, keys: list[str]) -> None:
        if keys:
            await self._serve("delete", keys[0], 0, lambda: self._delete(keys))

    async def _cross(self, data: bytes) -> None:
        if self.seconds_per_byte:
            await asyncio.sleep(len(data) * self.seconds_per_byte)

    def _put(self, key: str, data: bytes) -> None:
        self._check("Write", key)
        if self.bucket.is_full:
            raise Repeat("500 Internal Server Error: no space left on device")
        self.bucket.put(key, data[:-1] + b"?" if key.endswith(self.spoils) else data)

    def _create(self, key: str, data: bytes) -> bool:
        self._check("Write", key)
        if key in self.bucket.objects.now:
            return False
        self._put(key, data)
        return True

    def _delete(self, keys: list[str]) -> None:
        if self.bucket.is_full:  # the names are in a database, which needs space for its log
            raise GenericError(f"DeleteObjects request failed for key {keys[0]}")
        refused = ""
        for key in keys:
            if self.rules.fullmatch(f"Write:{BUCKET}/{key}"):
                self.bucket.objects.set(key, None)
            else:
                refused = refused or key
        if refused:
            raise GenericError(f"DeleteObjects request failed for key {refused}: Access Denied.")

    def _head(self, key: str) -> Stored | None:
        self._check("Read", key)
        return self._seen.now.get(key)

    def _read(self, key: str) -> Stored | None:
        if self.num_misdirected and key in self.bucket.objects.now:
            folder = f"{key.rpartition('/')[0]}/"
            others = [each for each in self.bucket.objects.under(folder) if each != key]
            if others:
                self.num_misdirected -= 1
                key = self.bucket.random.choice(others)
        return self._head(key)

    def _keys(self, folder: str) -> list[str]:
        self._check("List", folder)
        return self._seen.under(folder)

    def _list(self, folder: str) -> list[StoredObject]:
        found, now = self._keys(folder), self._seen.now
        return [StoredObject(key, len(now[key].data), now[key].modified) for key in found]

    @property
    def _seen(self) -> Table[str, Stored]:
        objects = self.bucket.objects
        return objects.before(self.stale_s) if self.stale_s else objects

    def _check(self, action: str, key: str) -> None:
        if not self.rules.fullmatch(f"{action}:{BUCKET}/{key}"):
            raise PermissionDeniedError(f"The operation lacked the privileges for path {key}")

    async def _serve(self, operation: str, key: str, size: int, act: Callable[[], T]) -> T:
        """Send a request until it is answered, or obstore gives up."""
        loop = asyncio.get_running_loop()
        began, longest = loop.time(), FIRST_PAUSE_S
        while True:
            lag, answer = self.delay(operation, size) / 2, loop.create_future()
            request = Request(operation, key, act, lag, loop.time() + RETRIES_S, answer)
            self._later(lag + self.bucket.slow_s, self._arrive, request)
            result, error = await answer
            if error is None:
                return cast(T, result)
            with _as_unavailable():
                if not isinstance(error, Repeat):
                    raise error
                if error.args[1:] or loop.time() - began >= RETRIES_S:
                    raise GenericError(f"{operation} {key}: {error.args[0]}")
            longest = min(PAUSE_S, 2 * longest)
            await asyncio.sleep(self.bucket.random.uniform(FIRST_PAUSE_S, longest))

    def _later(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        asyncio.get_running_loop().call_later(seconds, call, *args, context=self.bucket.context)

    def _arrive(self, request: "Request") -> None:
        bucket, result, error = self.bucket, None, None
        if self.cut == "requests" or bucket.is_hanging:
            return self._wait(request, self._arrive, request)
        try:
            if bucket.is_down:
                raise Repeat("connection refused")
            if bucket.record is not None:
                bucket.record(self.name, request.operation, request.key)
            result = request.act()
        except (Repeat, BaseError) as failed:
            error = failed
        back = (request, result, error, bucket.num_stops)
        if request.lag:
            self._later(request.lag, self._answer, *back)
        else:
            self._answer(*back)

    def _answer(
        self, request: "Request", result: Any, error: Exception | None, num_stops: int
    ) -> None:
        if self.cut == "answers":
            return self._wait(request, self._answer, request, result, error, num_stops)
        if self.bucket.num_stops != num_stops or self.breaks:
            by_chance = "reset" if self.bucket.random.random() < RESET else "close"
            how = self.breaks.pop(0) if self.breaks else by_chance
            is_over = how == "reset" and request.operation in ("create", "delete")
            error = Repeat("connection broke", *["outcome unknown"] * is_over)
        if not request.answer.done():
            request.answer.set_result((result, error))

    def _wait(self, request: "Request", call: Callable[..., None], *args: Any) -> None:
        """Send again a second later, as TCP does; nobody waits for ever."""
        if request.answer.done():
            return
        if asyncio.get_running_loop().time() >= request.until:
            request.answer.set_result((None, Repeat("no answer for 60 s")))
        else:
            self._later(PAUSE_S, call, *args)


class Request(NamedTuple):
    operation: str
    key: str
    act: Callable[[], Any]
    lag: float
    """Seconds of its answer under way."""
    until: float
    answer: "asyncio.Future[tuple[Any, Exception | None]]"
