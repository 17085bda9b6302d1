"""Runs a rank other than the first: it does what the first one asks for, over gloo, and knows no
broker. Of sharded weights it stores and reads its own part."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgpack
import structlog
import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from services.trainer.engine.checkpoint import Replacement, Restoration
from services.trainer.engine.trainer_engine import TrainerEngine
from services.trainer.engine.world import local_rank, num_ranks, this_rank
from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData, Snapshot
from shared.devices.slices import GroupSlice
from shared.diffusion.device import own_device
from shared.diffusion.policy import load_policy
from shared.diffusion.training.rows import TrainingGroup
from shared.errors import ContractError, DigenRLError, OutOfMemory, Untrainable
from shared.messages.contracts import ObjectRef
from shared.recipe.recipe import Recipe
from shared.run.manifest import Fetched, Piece
from shared.run.shards import open_tensors, store_version_parts
from shared.store import ObjectStore, StoreSettings, open_store

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


@dataclass(frozen=True, slots=True)
class Links:
    """Two connections to another rank, so that it stores beside its training."""

    training: Link
    storing: Link


def join() -> list[Links]:
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
            dist.new_group([0, other], timeout=FOR_EVER, backend="gloo") for _ in range(2)
        )
        if this_rank() in (0, other):
            peer = other if this_rank() == 0 else 0
            links.append(Links(Link(training, peer), Link(storing, peer)))
    return links


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


PIECES = TypeAdapter(dict[str, Piece] | None)
KEPT_GROUPS = 2
"""Number of sliced groups that a rank keeps, so that each is sent once. Both ends forget the older
one at the same time."""

log = structlog.get_logger()


Make = Callable[[Recipe, ObjectStore], "Follower"]
"""Loads what a rank holds."""


def make_follower(recipe: Recipe, store: ObjectStore) -> "Follower":
    return Follower(load_engine(recipe), recipe.run.name, store)


def follow(settings: StoreSettings, make: Make = make_follower) -> None:
    """Answer the first rank until it says that it is over, or is gone."""
    [links] = join()
    link = links.training
    recipe = Recipe.model_validate_json(link.receive().blobs[0])
    follower = make(recipe, open_store(settings))
    storing = threading.Thread(target=follower.store, args=(links.storing,), daemon=True)
    storing.start()
    try:
        while (message := link.receive()).name != "end":
            link.send(follower.answer(message))
            if follower.is_lost:
                log.error("rank_lost", rank=this_rank(), of=message.name)
                link.receive()  # the first rank says why the run has failed, and ends
    except RuntimeError as error:
        log.warning("first_rank_gone", rank=this_rank(), error=str(error).splitlines()[0])
        raise SystemExit(1) from None
    storing.join()


def load_engine(recipe: Recipe) -> TrainerEngine:
    """Load this rank's network and optimizer: all of it, or its shard."""
    loaded = load_policy(recipe, {"transformer"}, local_rank(), trains=True)
    num_samples = max(1, recipe.trained_samples // num_ranks())
    return TrainerEngine(recipe, loaded, num_samples=num_samples)


@dataclass(slots=True)
class Follower:
    engine: TrainerEngine
    run: str
    objects: ObjectStore
    is_lost: bool = False
    """Whether other ranks wait for something that this one had no memory for."""
    _snapshots: dict[int, Snapshot] = field(default_factory=dict)
    """This rank's part of the version that is to be stored, by the first rank's number."""
    _restoration: Restoration | Replacement | None = None
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

    def store(self, link: Link) -> None:
        """Store this rank's part of each version, beside its training, until it is over."""
        with suppress(RuntimeError):  # the first rank is gone: the other thread says so
            while (message := link.receive()).name != "end":
                link.send(self._stored(message))

    def _stored(self, message: Message) -> Message:
        if message.name == "digest":  # of whole weights, which stay until the version is committed
            return self._digest()
        snapshot, half = self._snapshots[message.values["number"]], message.values["half"]
        weights = snapshot.weights if half == "weights" else ()
        checkpoint = snapshot.checkpoint if half == "checkpoint" else ()
        try:
            stored = asyncio.run(store_version_parts(self.objects, self.run, weights, checkpoint))
        except (DigenRLError, OSError) as error:  # the first rank waits for an answer
            return Message("unstored", {"reason": f"rank {this_rank()}: {error}"})
        return Message("stored", blobs=(stored.model_dump_json().encode(),))

    def _read(self, message: Message) -> Message:
        """Go back to a version whose weights are sharded: every rank reads its own part."""
        refs = {name: ObjectRef.model_validate(ref) for name, ref in message.values.items()}

        async def read() -> None:
            opened = {name: await open_tensors(self.objects, ref) for name, ref in refs.items()}
            if "checkpoint" in opened:
                await self.engine.restore(opened["weights"], opened["checkpoint"])
            else:
                await self.engine.replace(opened["weights"], None)

        try:
            asyncio.run(read())
        except (DigenRLError, OSError) as error:  # the first rank tells the others
            return Message("unread", {"reason": f"rank {this_rank()}: {error}"})
        return Message("read")

    def _restore(self, message: Message) -> Message:
        """Go back to a version that the first rank reads and sends, part by part."""
        self._restoration = self.engine.restoration()
        return Message("restoring")

    def _replace(self, message: Message) -> Message:
        """Put other weights in use that the first rank reads and sends, part by part."""
        self._restoration = self.engine.replacement()
        return Message("replacing")

    def _part(self, message: Message) -> Message:
        data, pieces = message.blobs
        part = Fetched(data, PIECES.validate_json(pieces))
        getattr(self._restoration, f"add_{message.values['of']}")(part)
        return Message("added")

    def _restored(self, message: Message) -> Message:
        """End the restoration that was begun, if there is one, and begin a batch."""
        if self._restoration is not None:
            self._restoration.finish()
        self._restoration = None
        self.engine.begin()
        return self._digest()

    def _train(self, message: Message) -> Message:
        values = message.values
        group = self._group(values["group"], message)
        if group is None:
            return Message("unknown")
        self.engine.num_steps = values["num_steps"]
        chunk = values["chunk"] and Chunk(*values["chunk"])
        part = group.sliced(read_slice(values["cut"]))
        shortage = self.engine.train(part, chunk, values["kind"])
        return Message("trained", {"shortage": shortage and shortage.model_dump()})

    def _tally(self, message: Message) -> Message:
        return Message("tally", self.engine.tally)

    def _step(self, message: Message) -> Message:
        self.engine.num_steps = message.values["num_steps"]  # it may have had no group of this part
        self.engine.step(*(message.values[name] for name in ("batch", "scale", "kept")))
        self.engine.begin()
        self._groups.clear()
        return Message("stepped")

    def _copy(self, message: Message) -> Message:
        """Copy this rank's shard. What it overwrites is stored by now; states that were copied
        before may be on their way."""
        number, states, kept = (message.values[name] for name in ("number", "states", "kept"))
        stored = [each for each in self._snapshots.items() if each[1].checkpoint]
        snapshot = self.engine.copy(states=states, kept=kept).snapshot()
        self._snapshots = dict([*stored[-1:], (number, snapshot)])
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
            kind=message.values["kind"],
            limit=message.values["limit"],
        )
        read = self.engine.read(data)
        self._groups.append((number, read))
        return read


def slice_values(group_slice: GroupSlice) -> list[int | None]:
    """Return a slice as values of a message; `read_slice` reads them."""
    return [
        group_slice.samples.start,
        group_slice.samples.stop,
        group_slice.part,
        group_slice.num_parts,
        group_slice.first,
        group_slice.end,
    ]


def read_slice(values: list[Any]) -> GroupSlice:
    first, last, *steps = values
    return GroupSlice(range(first, last), *steps)
