"""Runs a rank of a shard group other than the first: it does what the first rank requests, over
gloo, and knows no broker. It stores and reads its own part of sharded weights."""

import asyncio
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog

from services.trainer import limits
from services.trainer.engine.world import this_rank
from services.trainer.fluid.links import DONE, Message, RankLink, join
from services.trainer.fluid.shard import Shard, gradient_scale
from services.trainer.fluid.shard_fragments import RankFragments
from services.trainer.fluid.sums import StoredSum, SumPart, Term
from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData, Snapshot
from shared.diffusion.training.rows import TrainingGroup
from shared.errors import ContractError, DigenRLError, OutOfMemory, Untrainable
from shared.messages.contracts import ObjectRef
from shared.messages.fluid import Piece
from shared.recipe.recipe import Recipe
from shared.run.shards import open_tensors, store_version_parts
from shared.store import ObjectStore, StoreSettings, open_store

log = structlog.get_logger()


def follow(settings: StoreSettings) -> None:
    """Answer the first rank until it ends, or is gone."""
    [links] = join()
    link = links.training
    recipe = Recipe.model_validate_json(link.receive().blobs[0])
    store = open_store(settings)
    shard = Shard(recipe, store)
    fragments = RankFragments(shard) if recipe.run_schedule.trainer_generates else None
    follower = Follower(shard, recipe.run.name, store, fragments)
    storing = threading.Thread(target=follower.store, args=(links.storing,), daemon=True)
    storing.start()
    try:
        while (message := link.receive()).name != "end":
            answer = follower.answer(message)
            link.send(answer)
            if answer.name == "lost":
                log.error("rank_lost", rank=this_rank(), of=message.name)
                link.receive()  # the first rank logs the reason, and ends
    except RuntimeError as error:
        log.warning("first_rank_gone", rank=this_rank(), error=str(error).splitlines()[0])
        raise SystemExit(1) from None
    storing.join()


@dataclass(slots=True)
class Follower:
    shard: Shard
    run: str
    objects: ObjectStore
    fragments: RankFragments | None
    _snapshots: dict[int, Snapshot] = field(default_factory=dict)
    """This rank's part of the version that is to be stored, by the first rank's number."""
    _groups: "deque[tuple[int, TrainingGroup]]" = field(
        default_factory=lambda: deque(maxlen=limits.MAX_SENT_GROUPS)
    )

    def answer(self, message: Message) -> Message:
        """Do what the first rank requests. After "lost", other ranks wait for this one in an
        exchange that nothing interrupts."""
        try:
            return getattr(self, f"_{message.name}")(message)  # type: ignore[no-any-return]
        except (OutOfMemory, Untrainable) as error:
            return Message("lost", {"reason": f"{error} (on rank {this_rank()})"})
        except ContractError as error:
            return Message("refused", {"reason": str(error)})

    def store(self, link: RankLink) -> None:
        """Store this rank's part of each version, concurrently with its training."""
        with suppress(RuntimeError):  # the first rank is gone: the other thread logs it
            while (message := link.receive()).name != "end":
                link.send(self._stored(message))

    def _stored(self, message: Message) -> Message:
        snapshot, half = self._snapshots[message.values["number"]], message.values["half"]
        weights = snapshot.weights if half == "weights" else ()
        checkpoint = snapshot.checkpoint if half == "checkpoint" else ()
        try:
            stored = asyncio.run(store_version_parts(self.objects, self.run, weights, checkpoint))
        except (DigenRLError, OSError) as error:  # the first rank waits for an answer
            return Message("unstored", {"reason": f"rank {this_rank()}: {error}"})
        return Message("stored", blobs=(stored.model_dump_json().encode(),))

    def _restore(self, message: Message) -> Message:
        refs = {name: ObjectRef.model_validate(ref) for name, ref in message.values.items()}

        async def restore() -> None:
            opened = {name: await open_tensors(self.objects, ref) for name, ref in refs.items()}
            await self.shard.restore(opened["weights"], opened["checkpoint"])

        asyncio.run(restore())
        return DONE

    def _fragment(self, message: Message) -> Message:
        assert self.fragments is not None
        return self.fragments.answer(message)

    def _train(self, message: Message) -> Message:
        values = message.values
        group = self._group(values["group"], message)
        self._begin(values)
        self.shard.train(group, _piece(values), Chunk(*values["chunk"]))
        return DONE

    def _skip(self, message: Message) -> Message:
        self._begin(message.values)
        self.shard.skip(_piece(message.values))
        return DONE

    def _begin(self, values: Any) -> None:
        if values["is_new"]:
            self.shard.begin()

    def _copy_sum(self, message: Message) -> Message:
        self._begin(message.values)
        copied = self.shard.copy_sum(message.values["number"], message.values["kept"])
        return Message("done", {"tallies": [(key, dict(t.tally)) for key, t in copied.items()]})

    def _put_sum(self, message: Message) -> Message:
        values = message.values
        return _put(asyncio.run(self.shard.put_sum(values["number"], values["batch"])))

    def _put_total(self, message: Message) -> Message:
        return _put(asyncio.run(self.shard.put_total(message.values["batch"])))

    def _take_total(self, message: Message) -> Message:
        stored = StoredSum.model_validate_json(message.values["stored"])
        asyncio.run(self.shard.take_total(stored))
        return DONE

    def _add(self, message: Message) -> Message:
        values = message.values
        order = [(str(worker), int(key)) for worker, key in values["order"]]
        stored = {n: StoredSum.model_validate_json(each) for n, each in values["stored"].items()}
        asyncio.run(self.shard.add(order, values["own"], stored))
        return DONE

    def _measure(self, message: Message) -> Message:
        total = self.shard.total
        assert total is not None
        total = Term(total.gradient, message.values["tally"])
        self.shard.measured(total)
        self.shard.sum_id(total)
        return DONE

    def _step(self, message: Message) -> Message:
        values = message.values
        given = gradient_scale(values["norm"], values["scale"])
        self.shard.step(values["batch"], values["tally"], given)
        return DONE

    def _weights(self, message: Message) -> Message:
        snapshot = self.shard.engine.weights()
        self._snapshots = dict(
            [*list(self._snapshots.items())[-1:], (message.values["number"], snapshot)]
        )
        return DONE

    def _checksum(self, message: Message) -> Message:
        self.shard.engine.checksum()
        return DONE

    def _digest(self, message: Message) -> Message:
        self.shard.engine.newest_digest()
        return DONE

    def _group(self, number: int, message: Message) -> TrainingGroup:
        """Return the group of this number, which is sent once."""
        for number_of_group, group in self._groups:
            if number_of_group == number:
                return group
        *trajectories, conditions = message.blobs
        data = GroupData(
            trajectories=tuple(trajectories),
            conditions=conditions,
            advantages=tuple(message.values["advantages"]),
            staleness=message.values["staleness"],
        )
        read = self.shard.engine.read(data)
        self._groups.append((number, read))
        return read


def _piece(values: Any) -> Piece:
    return Piece.model_validate(values["piece"])


def _put(part: SumPart) -> Message:
    return Message("put", blobs=(part.model_dump_json().encode(),))
