"""A line with delay, loss, a queue and cuts, between a host and the switch: two TAP devices and
this program, which passes frames from one to the other.

    python -m bench.spread.far_line HOST SWITCH PORT < settings

Each line of its input has the settings from now on, as JSON of a `FarLine`.
"""

import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from bench.spread.namespaces import enter

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
MAX_FRAME = 2048
MAX_BURST_S = 0.1
"""The relay may wake this late, and still sends what the line would have sent by then."""


@dataclass(frozen=True, slots=True)
class FarLine:
    """Rate, delay, loss and queue of a line, in each direction."""

    mbits: float
    delay_s: float = 0.025
    """On the way to the other end; a round trip takes twice this."""
    loss: float = 0.0
    """Share of the frames that are lost."""
    queue_bytes: int = 1 << 16
    """Frames that wait beyond this are dropped."""
    is_cut: bool = False


@dataclass(slots=True)
class Direction:
    """Frames on the way from one device to the other."""

    source: int
    sink: int
    draws: random.Random
    free_at: float = 0.0
    """When the line has sent all frames that wait."""
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)
    """Each frame with the time of its arrival."""

    def take(self, line: FarLine, now: float) -> None:
        """Take all frames that the source has."""
        while (frame := _frame(self.source)) is not None:
            rate = line.mbits * 1e6 / 8
            starts = max(self.free_at, now - MAX_BURST_S)
            if line.is_cut or (starts - now) * rate + len(frame) > line.queue_bytes:
                continue
            self.free_at = starts + len(frame) / rate
            if self.draws.random() >= line.loss:
                self.under_way.append((max(self.free_at, now) + line.delay_s, frame))

    def deliver(self, now: float) -> None:
        while self.under_way and self.under_way[0][0] <= now:
            _, frame = self.under_way.popleft()
            try:
                os.write(self.sink, frame)
            except OSError:  # the device is down
                return


def _frame(device: int) -> bytes | None:
    try:
        return os.read(device, MAX_FRAME)
    except OSError:  # none waits, or the device is down
        return None


def _tap(namespace: str, name: str) -> int:
    enter(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def relay(host: str, switch: str, port: str) -> None:
    """Relay until the input ends."""
    ends = _tap(host, "line"), _tap(switch, port)
    os.write(1, b"ready\n")
    ways = [Direction(*pair, random.Random(n)) for n, pair in enumerate([ends, ends[::-1]])]
    line, settings = FarLine(0.0, is_cut=True), b""
    while True:
        dues = [way.under_way[0][0] for way in ways if way.under_way]
        wait = max(0.0, min(dues) - time.monotonic()) if dues else None
        ready, _, _ = select.select([0, *ends], [], [], wait)
        if 0 in ready:
            more = os.read(0, 4096)
            if not more:
                return
            *whole, settings = (settings + more).split(b"\n")
            for each in whole:
                line = FarLine(**json.loads(each))
        now = time.monotonic()
        for way in ways:
            way.take(line, now)
            way.deliver(now)


@dataclass(slots=True)
class RunningLine:
    process: "subprocess.Popen[bytes]"

    def set(self, line: FarLine) -> None:
        """Change what the line does, from now on."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(line)).encode() + b"\n")
        self.process.stdin.flush()


@contextmanager
def far_line(line: FarLine, host: str, switch: str, port: str) -> Iterator[RunningLine]:
    """Connect a host to a switch by such a line; the devices vanish with it."""
    argv = [sys.executable, "-m", "bench.spread.far_line", host, switch, port]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise OSError("no TAP devices can be made")
            running = RunningLine(process)
            running.set(line)
            yield running
        finally:
            process.kill()


if __name__ == "__main__":
    relay(*sys.argv[1:])
