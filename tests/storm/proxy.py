"""Proxies between each service and each broker, which can be cut, and which lose, repeat or delay
messages of NATS on their way."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

CHUNK = 1 << 16
VARIABLES = {
    "nats": "DIGENRL_NATS_URL",
    "valkey": "DIGENRL_REDIS_URL",
    "objects": "DIGENRL_S3_ENDPOINT",
}
"""Broker -> the variable by which a service finds it."""
WITH_BODY = (b"PUB", b"HPUB", b"MSG", b"HMSG")
"""Words of NATS's protocol that begin a message; its size ends the line."""

Trick = Literal["lose", "repeat", "delay"]
SHARE = 0.2
"""Share of messages to which a trick is played."""
LATE_S = (0.2, 3.0)


class Frames:
    """Cuts what NATS and its clients say to each other into lines, each message with its body.

    >>> Frames().feed(b"PING" + bytes((13, 10)) + b"PUB a 2" + bytes((13, 10)) + b"hi")
    [b'PING\\r\\n']
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are whole."""
        self._buffer += data
        found = []
        while (end := self._buffer.find(b"\r\n")) >= 0:
            size = end + 2
            if is_message(self._buffer):
                size += int(self._buffer[:end].rsplit(None, 1)[1]) + 2
            if len(self._buffer) < size:
                break
            found.append(bytes(self._buffer[:size]))
            del self._buffer[:size]
        return found


def is_message(frame: bytes | bytearray) -> bool:
    return bytes(frame[:5]).split(b" ")[0].upper() in WITH_BODY


@dataclass(slots=True)
class Link:
    """The way from one service to one broker."""

    port_of_broker: int
    speaks_nats: bool
    draw: random.Random
    port: int = 0
    """Where the service finds the broker."""
    trick: Trick | None = None
    is_used: bool = False
    """Whether the service has ever connected."""
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _refuses: bool = False
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _server: asyncio.Server | None = None

    async def begin(self) -> None:
        self._open.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self, *, refuse: bool) -> None:
        """Let nothing through; ``refuse``: connections are closed, otherwise they are silent."""
        self._open.clear()
        self._refuses = refuse
        if refuse:
            for writer in list(self._writers):
                writer.transport.abort()

    def heal(self) -> None:
        self._refuses = False
        self._open.set()

    def end(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.is_used = True
        try:
            if self._refuses:
                return
            await self._open.wait()
            there = await asyncio.open_connection("127.0.0.1", self.port_of_broker)
            self._writers.add(there[1])
            try:
                await _either(self._pump(reader, there[1]), self._pump(there[0], writer))
            finally:
                self._close(there[1])
        except OSError:
            pass  # the broker is away
        finally:
            self._close(writer)

    def _close(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = Frames()
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._open.wait()
                if writer.is_closing():
                    return
                if self.speaks_nats:
                    for frame in frames.feed(data):
                        self._pass_on(frame, writer)
                else:
                    writer.write(data)
                await writer.drain()

    def _pass_on(self, frame: bytes, writer: asyncio.StreamWriter) -> None:
        if self.trick is None or not is_message(frame) or self.draw.random() >= SHARE:
            writer.write(frame)
        elif self.trick == "repeat":
            writer.write(frame + frame)
        elif self.trick == "delay":
            later = asyncio.get_running_loop().call_later
            later(self.draw.uniform(*LATE_S), _write, writer, frame)


def _write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    if not writer.is_closing():
        writer.write(frame)


async def _either(*works: Coroutine[Any, Any, None]) -> None:
    """Return when one of them has ended."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class Links:
    """All ways between services and brokers, by the name of the service and of the broker."""

    draw: random.Random
    each: dict[tuple[str, str], Link] = field(default_factory=dict)

    async def through(self, service: str, environment: dict[str, str]) -> dict[str, str]:
        """Return the environment of a service that finds brokers behind links of its own."""
        changed = dict(environment)
        for broker, variable in VARIABLES.items():
            port = urlsplit(environment.get(variable, "")).port
            if port is not None:
                link = Link(port, broker == "nats", self.draw)
                await link.begin()
                self.each[service, broker] = link
                before, _, behind = environment[variable].rpartition(f":{port}")
                changed[variable] = f"{before}:{link.port}{behind}"
        return changed

    def of(self, name: str) -> list[Link]:
        """Return the links of a service, or those to a broker."""
        return [link for ends, link in self.each.items() if name in ends]

    def of_nats(self, name: str) -> list[Link]:
        return [link for link in self.of(name) if link.speaks_nats]

    async def play(self, links: list[Link], trick: Trick, seconds: float) -> None:
        """Lose, repeat or delay some messages for a while."""
        await _meanwhile(links, lambda link: setattr(link, "trick", trick), seconds, _stop_tricks)

    async def cut(self, links: list[Link], seconds: float) -> None:
        """Let nothing through for a while; half of the time connections are closed as well."""
        refuse = self.draw.random() < 0.5
        await _meanwhile(links, lambda link: link.cut(refuse=refuse), seconds, Link.heal)

    def end(self) -> None:
        for link in self.each.values():
            link.end()


def _stop_tricks(link: Link) -> None:
    link.trick = None


async def _meanwhile(
    links: list[Link], begin: Callable[[Link], None], seconds: float, end: Callable[[Link], None]
) -> None:
    for link in links:
        begin(link)
    try:
        await asyncio.sleep(seconds)
    finally:
        for link in links:
            end(link)
