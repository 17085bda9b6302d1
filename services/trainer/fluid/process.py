"""Starts a member: loads one network that generates and trains, and connects it to the others."""

import asyncio
import socket
from functools import partial
from urllib.parse import urlsplit

import structlog

from services.trainer.engine.world import num_ranks
from services.trainer.fluid.device import EngineMember
from services.trainer.fluid.exchange import Exchange
from services.trainer.fluid.group_exchange import GroupExchange
from services.trainer.fluid.links import Message, join
from services.trainer.fluid.member import MemberApp
from services.trainer.fluid.near_exchange import NearExchange
from services.trainer.fluid.shard import Shard, model_parts
from services.trainer.fluid.shard_exchange import ShardExchange
from services.trainer.fluid.shard_fragments import GroupGenerator, RankFragments
from services.trainer.fluid.shard_group import ShardGroup
from services.trainer.fluid.store_exchange import StoreExchange
from services.trainer.fluid.sums import SumLayout
from shared.devices.conditions import encoded_conditions
from shared.devices.protocols import FragmentGeneration, GeneratingDevice
from shared.diffusion.generation import Generator, LocalGenerator
from shared.diffusion.loading.device import this_device
from shared.diffusion.policy import load_policy
from shared.diffusion.training.rows import check_stored
from shared.errors import ContractError, RanksLost
from shared.messages.contracts import GenerateFragment
from shared.models.memory import ModelPart
from shared.process.service import end_soon
from shared.process.worker_process import WorkerProcess
from shared.recipe.recipe import Recipe, override
from shared.store import ObjectStore

log = structlog.get_logger()


async def be_a_member(process: WorkerProcess) -> None:
    """Generate, train and step until the run is finished; as the first of several ranks, train and
    step together with them."""
    if num_ranks() > 1:
        await _lead_a_group(process)
        return
    settings, recipe = process.settings, as_whole(process.recipe)
    generates = recipe.run_schedule.trainer_generates
    parts: set[ModelPart] = set(recipe.generating_parts) if generates else {"transformer"}
    device = this_device(
        recipe, parts, trains=True, concurrency=int(generates), memory_gib=settings.memory_gib
    )
    async with (
        process.sharing() as sharing,
        sharing.connect("waiting_for_rollout", device) as context,
    ):
        await process.refuse_or_go_on(context)
        loaded = await asyncio.to_thread(load_policy, recipe, parts, trains=True)
        member = EngineMember(recipe, loaded)
        broker = settings.nats_url.get_secret_value()
        exchange = make_exchange(recipe, sharing.store, member.engine.layout, broker)
        encoded = await encoded_conditions(process.store, recipe)
        generator: GeneratingDevice = NoGenerator()
        if generates:
            generator = LocalGenerator(Generator(recipe, loaded))
        app = MemberApp(
            member, generator, exchange, recipe, context,
            encoded=encoded, check=partial(check_stored, recipe),
        )  # fmt: skip
        await process.run(app.run(), context)


class NoGenerator:
    """Stands in the place of the generator of a member that is given no fragments."""

    def weights_digest(self) -> str:
        return ""

    async def begin(
        self, task: GenerateFragment, conditions: bytes | None = None, source: bytes | None = None
    ) -> FragmentGeneration:
        raise ContractError("this member does not generate")

    async def conditions(
        self, prompt: str, source: bytes | None = None, negative: str | None = None
    ) -> bytes:
        raise ContractError("this member does not generate")


def as_whole(recipe: Recipe) -> Recipe:
    """Return the recipe of a process that holds all weights, even if other devices shard them."""
    return override(recipe, {"trainer.shard_devices": 1})


async def _lead_a_group(process: WorkerProcess) -> None:
    settings, recipe = process.settings, as_shared(process.recipe, num_ranks())
    generates = recipe.run_schedule.trainer_generates
    device = this_device(
        recipe, model_parts(recipe, 0), trains=True, concurrency=int(generates),
        memory_gib=settings.memory_gib,
    ).model_copy(update={"ranks": num_ranks()})  # fmt: skip
    async with (
        process.sharing() as sharing,
        sharing.connect("waiting_for_rollout", device) as context,
    ):
        await process.refuse_or_go_on(context)
        group, shard = await asyncio.to_thread(load_group, recipe, sharing.store)
        exchange = (
            ShardExchange(sharing.store, shard.engine.layout, group)
            if shard.is_sharded
            else make_exchange(
                recipe, sharing.store, shard.engine.layout, settings.nats_url.get_secret_value()
            )
        )  # fmt: skip
        generator: GeneratingDevice = NoGenerator()
        try:
            if generates:
                generator = GroupGenerator(group, RankFragments(shard))
            app = MemberApp(
                group, generator, exchange, recipe, context,
                encoded=await encoded_conditions(process.store, recipe),
                check=partial(check_stored, recipe),
            )  # fmt: skip
            finished = await process.run(app.run(), context)
        except* RanksLost:
            end_soon()  # a thread of this process waits for the other ranks
            raise
        if finished:
            await asyncio.to_thread(group.end)


def as_shared(recipe: Recipe, ranks: int) -> Recipe:
    """Return the recipe as the ranks of one group follow it.

    Raises:
        UserError: if these cannot share the weights.
    """
    return override(recipe, {"trainer.shard_devices": ranks, "trainer.devices": ranks})


def load_group(recipe: Recipe, store: ObjectStore) -> tuple[ShardGroup, Shard]:
    """Meet the other ranks, send them the recipe, and load this rank's weights."""
    links = join()
    for each in links:
        each.training.send(Message("begin", blobs=(recipe.model_dump_json().encode(),)))
    shard = Shard(recipe, store)
    return ShardGroup(shard, links), shard


def make_exchange(recipe: Recipe, store: ObjectStore, layout: SumLayout, broker: str) -> Exchange:
    """Return the transport that the recipe names. The default is a process group on GPUs, whose
    links are much faster than any store's; processes on CPUs have a store at hand, and gloo would
    be one more port for each. But for NCCL, which does so itself, members of a host add up their
    sums first."""
    chosen = recipe.trainer.exchange
    if chosen == "auto":
        is_group = layout.device.type == "cuda" and recipe.exchange.up == "exact"
        chosen = "group" if is_group else "store"
    by_nccl = chosen == "group" and layout.device.type == "cuda"
    log.info("exchange", by=chosen, numbers=layout.size)
    exchange: Exchange = (
        StoreExchange(store, layout)
        if chosen == "store"
        else GroupExchange(store, layout, own_address(broker))
    )
    return NearExchange(exchange, store, layout, on_host=not by_nccl)


def own_address(broker: str) -> str:
    """Return this host's address on the broker's network: the route is looked up, and nothing is
    sent."""
    parts = urlsplit(broker)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname or "127.0.0.1", parts.port or 4222))
            address: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return address
