"""One host of members: a process with its members, which share a connection to the bus."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from bench.cluster.build import Emulation, Named, member
from bench.cluster.emulated_exchange import EmulatedExchange, HostExchange
from bench.cluster.host_bus import HostBus
from bench.cluster.members import EmulatedMember
from bench.cluster.stores import PublishingStore
from services.scheduler.costs.fluid import exchange_seconds
from services.trainer.fluid.member import MemberApp
from shared.bus.connection import open_connection
from shared.devices.conditions import EncodedConditions
from shared.process.settings import ServiceSettings
from shared.process.worker import Worker, WorkerContext
from shared.recipe.recipe import Recipe
from shared.run.run_recipe import wait_for_recipe
from shared.store import CacheSettings, ObjectStore, open_store
from shared.store.host_cache import host_cache


class MemberHost:
    def __init__(self, emulation: Emulation, devices: list[Named]) -> None:
        self._emulation = emulation
        self._joined = asyncio.Event()
        self.members: dict[str, EmulatedMember] = {
            each.name: member(emulation, each, self._joined.wait) for each in devices
        }
        self._devices = devices

    async def run(
        self,
        settings: ServiceSettings,
        all_joined: Callable[[ObjectStore], Awaitable[None]],
        encoded: Callable[[ObjectStore], EncodedConditions | None],
        cached: CacheSettings | None = None,
    ) -> None:
        """Run all members, which make the first version once ``all_joined`` returns.

        Args:
            cached: where the host keeps what it has read, if all bytes are read.
        """
        async with contextlib.AsyncExitStack() as stack:
            cache = None
            if cached is not None:
                opened = host_cache(cached, redis_url="", run=settings.run)
                cache = await stack.enter_async_context(opened)
            backend = open_store(settings.store).backend
            store = PublishingStore(backend, lines=self._emulation.lines(), cache=cache)
            await self._run(settings, store, all_joined, encoded)

    async def _run(
        self,
        settings: ServiceSettings,
        store: PublishingStore,
        all_joined: Callable[[ObjectStore], Awaitable[None]],
        encoded: Callable[[ObjectStore], EncodedConditions | None],
    ) -> None:
        recipe = await wait_for_recipe(store, settings.run)
        exchange = await self._exchange(settings)
        url = settings.nats_url.get_secret_value()
        connected = HostBus.connect(url, run=settings.run, name=settings.worker)
        async with connected as bus, asyncio.TaskGroup() as tasks:
            for device in self._devices:
                generates = self._emulation.setting.schedule.trainer_generates
                registered = self._emulation.registered(
                    device.kind, "trainer", concurrency=int(generates)
                )
                worker = Worker("trainer", device.name, "waiting_for_rollout", registered)
                exchange.here.add(worker.address)
                context = WorkerContext(bus, store, worker)
                app = self._app(device, context, exchange, recipe, encoded(store))
                tasks.create_task(app.run())
            await all_joined(store)
            self._joined.set()

    def _app(
        self,
        device: Named,
        context: WorkerContext,
        exchange: HostExchange,
        recipe: Recipe,
        encoded: EncodedConditions | None,
    ) -> MemberApp:
        emulated = self.members[device.name]
        return MemberApp(
            emulated, emulated.generating, EmulatedExchange(exchange, emulated.held), recipe,
            context, encoded=encoded,
        )  # fmt: skip

    async def _exchange(self, settings: ServiceSettings) -> HostExchange:
        profile, scale = self._emulation.profile, self._emulation.setting.scale
        client = await open_connection(settings.nats_url.get_secret_value(), settings.worker)
        exchange = HostExchange(
            client, f"bench.{settings.run}.sums", profile.shape,
            lambda members: exchange_seconds(profile, members) / scale,
        )  # fmt: skip
        await exchange.open()
        return exchange
