"""The job of two ranks that are one member (`tests.trainer.engine.ranks`): a shard group, alone or
beside a whole card, which the test is."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from services.trainer.engine.follower import follow
from services.trainer.engine.world import this_rank
from services.trainer.fluid.device import EngineMember
from services.trainer.fluid.exchange import Exchange, Meeting, Sum
from services.trainer.fluid.process import load_group
from services.trainer.fluid.protocols import FluidDevice
from services.trainer.fluid.shard_exchange import ShardExchange
from services.trainer.fluid.shard_follower import make_follower
from services.trainer.fluid.store_exchange import StoreExchange
from services.trainer.versions import store_version
from shared.devices.protocols import GroupData
from shared.messages.contracts import ObjectRef
from shared.messages.fluid import ExchangeSums, Piece, Share
from shared.recipe.recipe import Recipe, load_recipe
from shared.run.shards import open_tensors
from shared.store import ObjectStore
from tests import examples

GROUP, CARD = "group", "card"


class Task(BaseModel):
    """What the members do: batches, and pieces of each member in each."""

    parts: dict[str, list[Piece]]
    committer: str
    batches: int = 1


class Seen(BaseModel):
    """What a member has of a batch."""

    checksum: str
    digest: str
    sum_id: str
    norm: float
    weights: ObjectRef
    checkpoint: ObjectRef


def meeting_of(task: Task, batch: int, me: str, *, by_group: bool = False) -> Meeting:
    shares = tuple(
        Share(worker=name, sum_number=0, pieces=tuple(pieces))
        for name, pieces in task.parts.items()
    )
    message = ExchangeSums(
        batch=batch, attempt=0, round=0, policy=examples.policy(batch), committer=task.committer,
        shares=shares, max_seconds=60.0, hosts=(), update=0,
    )  # fmt: skip
    return Meeting.of(message, "digits", me, by_group=by_group)


async def train(
    device: FluidDevice, exchange: Exchange, groups: Sequence[GroupData], task: Task, me: str,
    store: ObjectStore, *, by_group: bool = False,
) -> list[Seen]:  # fmt: skip
    """Train batches as a member does; return what it has after each."""
    seen = []
    for batch in range(task.batches):
        device.begin()
        for piece in task.parts.get(me, ()):
            await device.train(groups[piece.group], piece)
        own: Sum = await device.own_sum() if me in task.parts else {}
        total = await exchange.total(meeting_of(task, batch, me, by_group=by_group), own)
        measure = await device.measure(total)
        await device.step(batch, total, measure)
        assert measure.norm is not None
        weights, checkpoint = await store_version(store, "digits", await device.weights())
        digest = await asyncio.to_thread(device.weights_digest)
        seen.append(
            Seen(
                checksum=await device.checksum(), digest=digest, sum_id=measure.sum_id,
                norm=measure.norm, weights=weights, checkpoint=checkpoint,
            )
        )  # fmt: skip
    return seen


async def lead(folder: Path, recipe: Recipe, store: ObjectStore) -> None:
    from tests.trainer.engine.ranked_program import groups_of

    group, shard = await asyncio.to_thread(load_group, recipe, store)
    layout = shard.engine.layout
    exchange: Exchange = (
        ShardExchange(store, layout, group) if shard.is_sharded else StoreExchange(store, layout)
    )
    start = json.loads((folder / "start.json").read_text())
    refs = [ObjectRef.model_validate(each) for each in start]
    if refs:
        await group.restore(*[await open_tensors(store, ref) for ref in refs])
    task = Task.model_validate_json((folder / "task.json").read_text())
    by_group = recipe.trainer.deterministic
    seen = await train(group, exchange, groups_of(recipe), task, GROUP, store, by_group=by_group)
    (folder / "seen.json").write_text(json.dumps([each.model_dump(mode="json") for each in seen]))
    group.end()


def be_a_group(folder: Path) -> None:
    from tests.trainer.engine.ranked_program import settings_in, store_in

    if this_rank():
        follow(settings_in(folder), make_follower)
        return
    asyncio.run(lead(folder, load_recipe(folder / "recipe.json"), store_in(folder)))


def card_of(recipe: Recipe, store: ObjectStore) -> tuple[EngineMember, Exchange, Any]:
    """Return a member with all weights in this process."""
    from shared.diffusion.policy import load_policy

    loaded = load_policy(recipe, {"transformer"}, trains=True)
    device = EngineMember(recipe, loaded)
    return device, StoreExchange(store, device.engine.layout), loaded
