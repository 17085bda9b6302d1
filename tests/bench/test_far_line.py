"""A far line delays, drops and loses frames as its settings say."""

import random
import socket
from collections.abc import Iterator

import pytest

from bench.spread.far_line import Direction, FarLine

FRAME = bytes(1250)
"""Takes 10 ms at 1 Mbit/s."""
LINE = FarLine(mbits=1.0, delay_s=0.025, queue_bytes=10 * len(FRAME) + 1)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket, Direction]]:
    """Yield the sender, the receiver, and the direction between them."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    (sender, source), (sink, receiver) = pairs
    for each in (sender, source, sink, receiver):
        each.setblocking(False)
    yield sender, receiver, Direction(source.fileno(), sink.fileno(), random.Random(0), free_at=1.0)
    for each in (sender, source, sink, receiver):
        each.close()


def arrived(receiver: socket.socket) -> int:
    count = 0
    try:
        while receiver.recv(2048):
            count += 1
    except BlockingIOError:
        return count
    return count


def test_frames_arrive_at_the_line_s_rate_after_its_delay(
    ends: tuple[socket.socket, socket.socket, Direction],
) -> None:
    sender, receiver, way = ends
    for _ in range(5):
        sender.send(FRAME)
    way.take(LINE, 1.0)
    for milliseconds, frames in ((34, 0), (36, 1), (46, 1), (76, 3)):
        way.deliver(1.0 + milliseconds / 1000)
        assert arrived(receiver) == frames, milliseconds


def test_frames_beyond_the_queue_are_dropped(
    ends: tuple[socket.socket, socket.socket, Direction],
) -> None:
    sender, receiver, way = ends
    for _ in range(8):
        sender.send(FRAME)
    way.take(LINE, 1.0)
    for _ in range(8):
        sender.send(FRAME)
    way.take(LINE, 1.0)
    way.deliver(2.0)
    assert arrived(receiver) == 10


def test_a_share_of_the_frames_is_lost_and_a_line_that_is_cut_loses_all(
    ends: tuple[socket.socket, socket.socket, Direction],
) -> None:
    sender, receiver, way = ends
    lossy = FarLine(mbits=1000.0, delay_s=0.0, loss=0.25, queue_bytes=1 << 20)
    count = 0
    for number in range(400):
        sender.send(FRAME)
        way.take(lossy, 1.0 + number)
        way.deliver(1.5 + number)
        count += arrived(receiver)
    assert 270 < count < 330
    sender.send(FRAME)
    way.take(FarLine(mbits=1000.0, is_cut=True), 1000.0)
    way.deliver(1001.0)
    assert arrived(receiver) == 0
