"""Runs a rank of a shard group other than the first: it does what that one says, over gloo."""

import asyncio
from dataclasses import dataclass
from typing import Any

from services.trainer.engine.follower import Follower, Message
from services.trainer.fluid.shard import Shard, scale_of
from services.trainer.fluid.sums import StoredSum, SumPart, Term
from shared.devices.chunks import Chunk
from shared.messages.contracts import ObjectRef
from shared.messages.fluid import Piece
from shared.recipe.recipe import Recipe
from shared.run.shards import open_tensors
from shared.store import ObjectStore


def make_follower(recipe: Recipe, store: ObjectStore) -> "ShardFollower":
    shard = Shard(recipe, store)
    return ShardFollower(shard.engine, recipe.run.name, store, shard=shard)


@dataclass(slots=True, kw_only=True)
class ShardFollower(Follower):
    shard: Shard

    def answer(self, message: Message) -> Message:
        answer = Follower.answer(self, message)
        # The other ranks wait for this one, in an exchange that nothing interrupts.
        self.is_lost = self.is_lost or answer.name == "out_of_memory"
        return answer

    def _restore(self, message: Message) -> Message:
        refs = {name: ObjectRef.model_validate(ref) for name, ref in message.values.items()}

        async def restore() -> None:
            opened = {name: await open_tensors(self.objects, ref) for name, ref in refs.items()}
            await self.shard.restore(opened["weights"], opened["checkpoint"])

        asyncio.run(restore())
        return DONE

    def _train(self, message: Message) -> Message:
        values = message.values
        group = self._group(values["group"], message)
        assert group is not None, "the first rank sends each group once"
        self._begin(values)
        self.shard.train(group, _piece(values), values["kind"], Chunk(*values["chunk"]))
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
        given = scale_of(values["norm"], values["scale"])
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

    def _digest(self, message: Message | None = None) -> Message:
        return Message("digest", {"digest": self.shard.engine.newest_digest()})


DONE = Message("done")


def _piece(values: Any) -> Piece:
    return Piece.model_validate(values["piece"])


def _put(part: SumPart) -> Message:
    return Message("put", blobs=(part.model_dump_json().encode(),))
