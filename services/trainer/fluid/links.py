"""Connections among the ranks of a shard group, over gloo."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from services.trainer import limits
from services.trainer.engine.world import local_rank, num_ranks, this_rank
from shared.diffusion.loading.device import own_device


@dataclass(frozen=True, slots=True)
class Message:
    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values that msgpack can pack."""
    blobs: Sequence[bytes] = ()


DONE = Message("done")
"""A rank's response without a result."""


class RankLink:
    """Connects to one other rank. One message at a time: a rank that has asked waits for the
    answer."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group = group
        self._peer = peer

    def ask(self, message: Message) -> Message:
        self.send(message)
        return self.receive()

    def send(self, message: Message) -> None:
        sizes = [len(blob) for blob in message.blobs]
        self._send(msgpack.packb([message.name, dict(message.values), sizes]))
        for blob in message.blobs:
            if blob:
                dist.send(_as_tensor(blob), self._peer, group=self._group)

    def receive(self) -> Message:
        """Raises RuntimeError if the other rank is gone."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, self._peer, group=self._group)
        name, values, sizes = msgpack.unpackb(self._receive(int(size)))
        return Message(name, values, [self._receive(each) for each in sizes])

    def _send(self, data: bytes) -> None:
        dist.send(torch.tensor([len(data)]), self._peer, group=self._group)
        dist.send(_as_tensor(data), self._peer, group=self._group)

    def _receive(self, size: int) -> bytes:
        if not size:
            return b""
        data = torch.empty(size, dtype=torch.uint8)
        dist.recv(data, self._peer, group=self._group)
        return data.numpy().tobytes()


@dataclass(frozen=True, slots=True)
class RankLinks:
    """Two connections to another rank, so that it stores concurrently with its training."""

    training: RankLink
    storing: RankLink


def join() -> list[RankLinks]:
    """Meet the other ranks. Rank 0 gets links to each, the others get theirs to rank 0."""
    device = own_device(local_rank())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    links = []
    for other in range(1, num_ranks()):
        # Each pair has connections of its own, which no other thread uses. All ranks have to name
        # all groups, in the same order.
        training, storing = (
            dist.new_group([0, other], timeout=limits.RANK_TIMEOUT, backend="gloo")
            for _ in range(2)
        )
        if this_rank() in (0, other):
            peer = other if this_rank() == 0 else 0
            links.append(RankLinks(RankLink(training, peer), RankLink(storing, peer)))
    return links


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
