"""A host passes on what it has of an object, while it still receives it.

Hosts that want an object enter a list for it, in the order in which they come (`peers`). The first
of a site reads from the store, and each other one from the one before it, so that the store sends
an object to a site once, and the last host has it hardly later than the first. A host of another
site is a source only if its line is known to be at least as fast as the store. A source that is
half as fast as the store is left after a second. A host that gives nothing, or something else,
costs no more than a read from the store: who receives takes the digest of the whole.

One process of a host answers for all of it, from the files of its cache; which one does not matter.
The request is one line, the response is one line, and the bytes follow:

    {"token": "...", "sha256": "...", "size": 1048576, "attempt": "...", "first": 0}
    ok

The bytes themselves go from the page cache to the line (``sendfile``), and from there into memory,
in a thread for each transfer, which waits in the kernel: the loop of the process that happens to
answer has other things to do, and copies would take as many CPU seconds as everything else.

Nothing is encrypted: it is for a network in which only one's own hosts are.
"""

import asyncio
import contextlib
import errno
import hmac
import math
import os
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, Protocol

import structlog
from pydantic import Field, ValidationError

from shared.errors import UserError
from shared.limits import MAX_PEERS
from shared.messages.contracts import ObjectRef
from shared.messages.records import HOME, Count, Digest, Record, Token
from shared.store.cache_folder import CacheFolder
from shared.store.traffic import STARTING, Meter, Pace

CHUNK = 1 << 19
"""Bytes that are received at a time: what a host is behind the one before it."""
MAX_SEND_BYTES = 1 << 22
"""Bytes that one call sends at most."""
MAX_LINE = 1024
CONNECT_S = 3.0
RECEIVE_S = 0.25
"""Longest time for a chunk: what has come by then is passed on."""
RESPONSE_TIMEOUT_S = 10.0
"""Longest time for a question, and for sending a chunk."""
MIN_RATE_SHARE = 0.5
"""Least rate of a source, in rates of the store."""
GROWTH_CHECK_S = 0.005
"""Seconds between two looks whether more of an object has come."""
STALL_CHECK_S = 0.25
"""Seconds without more of it, after which its receiver may be dead."""
READERS = 16
"""Hosts that are answered at a time."""
RESPONSE_OK, RESPONSE_NO = b"ok\n", b"no\n"

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Bytes per second."""
PeerHost = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,255}$")]
RelayToken = Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]

log = structlog.get_logger()


class PeerFailed(Exception):
    """Another host does not deliver a requested object, or too slowly."""


class RelayRequest(Record):
    token: RelayToken
    sha256: Digest
    size: Count
    attempt: RelayToken
    """Which of the attempts to receive it, if it is not complete."""
    first: Count
    """Bytes that the reader has already."""


class Peer(Record):
    """A host that has an object, or is receiving it."""

    host: PeerHost
    port: Annotated[int, Field(ge=1, le=65535)]
    token: RelayToken
    """Secret of readers."""
    attempt: RelayToken
    site: Token
    receives: Rate | None
    """Measured rate at which the host reads from the store; None: nothing was measured."""
    sends: Rate | None
    """Measured rate at which it stores."""

    def is_source(
        self, site: str, store_rate: float | None, min_share: float = MIN_RATE_SHARE
    ) -> bool:
        """Return whether a host of ``site`` may read from this one instead of the store."""
        if self.site == site:
            return (self.receives or math.inf) >= STARTING * min_share * (store_rate or 0.0)
        return min(self.receives or 0.0, self.sends or 0.0) >= (store_rate or math.inf)

    async def chunks(
        self, ref: ObjectRef, first: int, min_rate: Callable[[], Awaitable[float]]
    ) -> AsyncGenerator[bytes]:
        """Yield the object's bytes from ``first`` on, as far as the host has them.

        Raises:
            PeerFailed: if it gives none, or no more, or in a second no more than ``min_rate``.
        """
        question = RelayRequest(
            token=self.token, sha256=ref.sha256, size=ref.size, attempt=self.attempt, first=first
        )
        line, reading, threads = None, None, ThreadPoolExecutor(1, "from-peer")
        try:
            async with asyncio.timeout(CONNECT_S):
                line = await _connected(self.host, self.port)
            async with asyncio.timeout(RESPONSE_TIMEOUT_S):
                await _ask(line, question)
            _wait_in_the_kernel(line, socket.SO_RCVTIMEO, RECEIVE_S)
            pace = Pace()
            while first < ref.size:
                began = time.monotonic()
                reading = threads.submit(_received, line, min(CHUNK, ref.size - first))
                chunk = await asyncio.wrap_future(reading)
                waited = min(RECEIVE_S, time.monotonic() - began)  # the rest is this process's own
                is_due = pace.add(len(chunk), waited)
                first += len(chunk)
                if chunk:
                    yield chunk
                if is_due and first < ref.size and pace.is_slow(await min_rate()):
                    raise TimeoutError(f"too slow, with {first} of {ref.size} bytes")
        except (OSError, TimeoutError, EOFError, ValueError) as error:
            raise PeerFailed(f"{self.host}:{self.port}: {error!r}") from error
        finally:
            if line is not None:
                _hang_up(line, reading)
            threads.shutdown(wait=False)


async def _connected(host: str, port: int) -> socket.socket:
    """Return a socket that does not block; raise OSError if there is no such host, or it takes no
    connection."""
    loop = asyncio.get_running_loop()
    refusal = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        line = socket.socket(family, kind, protocol)
        line.setblocking(False)
        try:
            await loop.sock_connect(line, address)
        except OSError as error:
            line.close()
            refusal = error
        except BaseException:
            line.close()
            raise
        else:
            return line
    raise refusal


async def _ask(line: socket.socket, question: RelayRequest) -> None:
    """Raise EOFError unless the answer is yes."""
    loop, answer = asyncio.get_running_loop(), b""
    await loop.sock_sendall(line, question.model_dump_json().encode() + b"\n")
    while len(answer) < len(RESPONSE_OK):
        more = await loop.sock_recv(line, len(RESPONSE_OK) - len(answer))
        if not more:
            break
        answer += more
    if answer != RESPONSE_OK:
        raise EOFError("it does not have it")


def _wait_in_the_kernel(line: socket.socket, which: int, seconds: float) -> None:
    """Limit the seconds for which a call in a thread waits."""
    line.setblocking(True)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    line.setsockopt(socket.SOL_SOCKET, which, limit)


def _received(line: socket.socket, number: int) -> bytes:
    """Return this number of bytes, or what has come after `RECEIVE_S`; raise EOFError at the end of
    the stream."""
    try:
        chunk = line.recv(number, socket.MSG_WAITALL)
    except BlockingIOError:
        return b""
    if not chunk:
        raise EOFError("it gives no more")
    return chunk


def _hang_up(line: socket.socket, reading: "Future[bytes] | None") -> None:
    """Close a socket, once a thread that still waits for it has been woken."""
    if reading is None or reading.done():
        line.close()
        return
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    reading.add_done_callback(lambda _: line.close())


class StoreRates(NamedTuple):
    """Rates at which the store was read."""

    own: float | None
    """By this host; None: its processes have not read from the store."""
    best: float | None
    """By the fastest host of its site."""

    @property
    def known(self) -> float | None:
        return self.best if self.own is None else self.own


class PeerList(Protocol):
    async def enter(self, sha256: str, me: Peer) -> list[Peer]:
        """Enter the object's list, and return who has entered it before, the last one first."""

    async def store_rates(self, site: str, host: str, measured: float | None) -> StoreRates:
        """Note the rate that a process of a host has measured, and return the known rates."""


@dataclass(slots=True)
class Relay:
    """This host's part: it answers others, unless another of its processes does so already."""

    folder: CacheFolder
    at: tuple[str, int]
    """Host and port at which other hosts reach this one."""
    peers: PeerList
    site: str = HOME
    min_share: float = MIN_RATE_SHARE
    """Least rate of a source of the site, in rates of the store."""
    store_reads: Meter = field(default_factory=Meter)
    """Reads of this process from the store of what other hosts do not give."""
    _server: asyncio.Server | None = None
    _answering: "set[asyncio.Task[None]]" = field(default_factory=set)
    _stopping: threading.Event = field(default_factory=threading.Event)

    async def __aenter__(self) -> "Relay":
        """Raises UserError if this machine has no such address."""
        try:
            await self._listen()
        except OSError as error:
            host, port = self.at
            raise UserError(
                f"share_at: this machine cannot listen on {host}:{port}: {error.strerror}; "
                "name an address of its own"
            ) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        if self._server is not None:
            self._server.close()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    async def join(self, ref: ObjectRef, attempt: str, sends: float | None) -> list[Peer]:
        """Announce that this host is about to receive an object, and the rate at which it stores;
        return the hosts that it may receive it from, beginning with its own site."""
        await self._listen()  # whoever did may have died
        (host, port), rates = self.at, await self.store_rates()
        me = Peer(
            host=host, port=port, token=self.folder.secret(), attempt=attempt, site=self.site,
            receives=rates.own, sends=sends,
        )  # fmt: skip
        sources = [
            each for each in await self.peers.enter(ref.sha256, me)
            if (each.host, each.port) != self.at
            and each.is_source(self.site, rates.known, self.min_share)
        ]  # fmt: skip
        return sorted(sources, key=lambda each: each.site != self.site)[:MAX_PEERS]

    async def min_rate(self) -> float:
        """Return the least rate of a source; 0 if the store's is not known."""
        return self.min_share * ((await self.store_rates()).known or 0.0)

    async def store_rates(self) -> StoreRates:
        """Share the rate at which this host reads from the store; return the rates of its site."""
        host = ":".join(map(str, self.at))
        return await self.peers.store_rates(self.site, host, self.store_reads.rate)

    async def _listen(self) -> None:
        if self._server is not None:
            return
        host, port = self.at
        try:
            self._server = await asyncio.start_server(self._connected, host, port, limit=MAX_LINE)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            log.info("sharing", host=host, port=port)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        connection_errors = (OSError, TimeoutError, EOFError, ValueError, asyncio.CancelledError)
        try:
            with contextlib.closing(writer), contextlib.suppress(*connection_errors):
                await self._answer(reader, writer)
        finally:
            self._answering.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(RESPONSE_TIMEOUT_S):
            request = _read(await reader.readline())
        descriptor = None if request is None else self._offered(request)
        if request is None or descriptor is None:
            writer.write(RESPONSE_NO)
            return
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a socket, it can
        line = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        threads = ThreadPoolExecutor(1, "to-peer")
        giving = threads.submit(self._give, line, descriptor, request)
        try:
            await asyncio.shield(asyncio.wrap_future(giving))
        finally:
            if not giving.done():
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)
            threads.shutdown(wait=False)

    def _give(self, line: socket.socket, descriptor: int, request: RelayRequest) -> None:
        """Send the present part of an object, and continue as more arrives, until it is whole or
        its own transfer has ended. Closes both."""
        with line, os.fdopen(descriptor, "rb"):
            _wait_in_the_kernel(line, socket.SO_SNDTIMEO, RESPONSE_TIMEOUT_S)
            line.sendall(RESPONSE_OK)
            at, grew = request.first, time.monotonic()
            while at < request.size and not self._stopping.is_set():
                sent = os.sendfile(
                    line.fileno(), descriptor, at, min(MAX_SEND_BYTES, request.size - at)
                )
                if sent:
                    at, grew = at + sent, time.monotonic()
                elif time.monotonic() - grew < STALL_CHECK_S:
                    self._stopping.wait(GROWTH_CHECK_S)
                elif os.fstat(descriptor).st_nlink and self.folder.is_locked(request.sha256):
                    self._stopping.wait(STALL_CHECK_S)  # it is received, but slowly
                else:
                    return

    def _offered(self, request: RelayRequest) -> int | None:
        if len(self._answering) > READERS:
            return None
        if not hmac.compare_digest(request.token, self.folder.secret()):
            return None
        return self.folder.offered(request.sha256, request.attempt, request.size)


def _read(line: bytes) -> RelayRequest | None:
    with contextlib.suppress(ValidationError, RecursionError):
        return RelayRequest.model_validate_json(line)
    return None
