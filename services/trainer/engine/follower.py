"""Runs a rank other than the first: it does what the first one asks for, over gloo, and knows no
broker."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgpack
import structlog
import torch
import torch.distributed as dist

from services.trainer.engine.trainer_engine import TrainerEngine
from services.trainer.engine.world import local_rank, num_ranks, this_rank
from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData
from shared.devices.slices import GroupSlice
from shared.diffusion.policy import Tell, load_policy
from shared.diffusion.training.rows import TrainingGroup
from shared.errors import ContractError, OutOfMemory, Untrainable
from shared.recipe.recipe import Recipe

FOR_EVER = timedelta(days=365)
"""Timeout of a rank that waits for its next message: nothing may be ready for long, and the
connection tells it if its peer is gone."""


@dataclass(frozen=True, slots=True)
class Message:
    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values that msgpack can pack."""
    blobs: Sequence[bytes] = ()


class Link:
    """Connects to one other rank. One message at a time: whoever has asked waits for the answer."""

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


def join() -> list[Link]:
    """Meet the other ranks. Rank 0 gets a link to each, the others get one to rank 0."""
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(local_rank())
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    links = []
    for other in range(1, num_ranks()):
        # Each pair has connections of its own, which no other thread uses. All ranks have to name
        # all groups, in the same order.
        group = dist.new_group([0, other], timeout=FOR_EVER, backend="gloo")
        if this_rank() in (0, other):
            links.append(Link(group, other if this_rank() == 0 else 0))
    return links


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


KEPT_GROUPS = 2
"""Number of sliced groups that a rank keeps, so that each is sent once. Both ends forget the older
one at the same time."""

log = structlog.get_logger()


def follow() -> None:
    """Answer the first rank until it says that it is over, or is gone."""
    [link] = join()
    begin = link.receive()
    engine = load_engine(Recipe.model_validate_json(begin.blobs[0]))
    follower = Follower(engine)
    try:
        while (message := link.receive()).name != "end":
            link.send(follower.answer(message))
            if follower.is_lost:
                log.error("rank_lost", rank=this_rank(), of=message.name)
                link.receive()  # the first rank says why the run has failed, and ends
    except RuntimeError as error:
        log.warning("first_rank_gone", rank=this_rank(), error=str(error).splitlines()[0])
        raise SystemExit(1) from None


def load_engine(recipe: Recipe, tell: Tell | None = None) -> TrainerEngine:
    """Load this rank's network and optimizer: all of it, or its shard. ``tell`` gets the share that
    is loaded."""
    loaded = load_policy(recipe, {"transformer"}, local_rank(), trains=True, tell=tell)
    num_samples = max(1, recipe.batch.group_size // num_ranks())
    return TrainerEngine(recipe, loaded, num_samples=num_samples)


@dataclass(slots=True)
class Follower:
    engine: TrainerEngine
    is_lost: bool = False
    """Whether other ranks wait for something that this one had no memory for."""
    _groups: deque[tuple[int, TrainingGroup]] = field(
        default_factory=lambda: deque(maxlen=KEPT_GROUPS)
    )

    def answer(self, message: Message) -> Message:
        try:
            return getattr(self, f"_{message.name}")(message)  # type: ignore[no-any-return]
        except Untrainable as error:
            if self.engine.is_sharded:
                raise  # as below
            return Message("untrainable", {"reason": str(error)})
        except ContractError as error:
            return Message("refused", {"reason": str(error)})
        except OutOfMemory as error:
            self.is_lost = self.engine.is_sharded or message.name != "train"
            about = {"smaller": error.smaller, "what": error.what, "remedy": error.remedy}
            return Message("out_of_memory", {"reason": str(error), **about})

    def _restore(self, message: Message) -> Message:
        self.engine.restore(*message.blobs)
        self.engine.begin()
        return self._digest()

    def _train(self, message: Message) -> Message:
        values = message.values
        group = self._group(values["group"], message)
        if group is None:
            return Message("unknown")
        self.engine.num_steps = values["num_steps"]
        chunk = values["chunk"] and Chunk(*values["chunk"])
        shortage = self.engine.train(group.sliced(read_slice(values["cut"])), chunk)
        return Message("trained", {"shortage": shortage and shortage.model_dump()})

    def _tally(self, message: Message) -> Message:
        return Message("tally", self.engine.tally)

    def _step(self, message: Message) -> Message:
        self.engine.step(message.values["batch"], message.values["scale"])
        self.engine.begin()
        self._groups.clear()
        return Message("stepped")

    def _weights(self, message: Message) -> Message:
        if self.engine.is_sharded:
            self.engine.weights()  # the first rank cannot gather them alone
        return self._digest()

    def _digest(self) -> Message:
        return Message("digest", {"digest": self.engine.weights_digest()})

    def _group(self, number: int, message: Message) -> TrainingGroup | None:
        """Return the group of this number; None if it was not kept, and is not sent."""
        for known, group in self._groups:
            if known == number:
                return group
        if not message.blobs:
            return None
        *trajectories, conditions = message.blobs
        data = GroupData(
            trajectories=tuple(trajectories),
            conditions=conditions,
            advantages=tuple(message.values["advantages"]),
            staleness=message.values["staleness"],
        )
        read = self.engine.read(data)
        self._groups.append((number, read))
        return read


def slice_values(group_slice: GroupSlice) -> list[int]:
    """Return a slice as values of a message; `read_slice` reads them."""
    return [
        group_slice.samples.start,
        group_slice.samples.stop,
        group_slice.part,
        group_slice.num_parts,
    ]


def read_slice(values: list[Any]) -> GroupSlice:
    first, last, part, num_parts = values
    return GroupSlice(range(first, last), part, num_parts)
