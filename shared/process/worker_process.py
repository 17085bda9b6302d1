"""Runs a worker as a process: probes from the start, the run's recipe, then its work.

It ends with its run, with status 0, so that its device is free; with ``--stay`` it waits for the
run to be resumed.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import structlog

from shared.bus.bus import Bus
from shared.cancellation import stop
from shared.errors import RanksLost, UserError
from shared.limits import COMMIT_POLL_S
from shared.messages import subjects
from shared.messages.contracts import PolicyPublished
from shared.messages.workers import Activity, Device
from shared.models.catalogue import check_weights
from shared.process.libraries import record_versions
from shared.process.otlp import tracing
from shared.process.service import Health, serve, worker_app
from shared.process.settings import ServiceSettings
from shared.process.watchdog import WARNING_SHARE, Watchdog
from shared.process.worker import Worker, WorkerContext, patiently
from shared.recipe.recipe import Recipe
from shared.run.files import check_files
from shared.run.layout import numbers_in
from shared.run.run_recipe import read_recipe, wait_for_recipe
from shared.store import ObjectStore, open_store
from shared.store.host_cache import host_cache

HOST_KEYS = {
    "rollout": ("model.folder", "model.adapter"),
    "encoder": ("model.folder", "data.prompts"),
    "reward": ("reward.scorers.",),
    "trainer": ("model.folder", "model.adapter"),
}
"""Recipe keys, or their beginnings, that name what a service reads on its host."""


WorkerService = Literal["rollout", "encoder", "reward", "trainer"]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """Holds what the work of a worker begins with."""

    service: WorkerService
    settings: ServiceSettings
    recipe: Recipe
    store: ObjectStore
    health: Health
    url: str
    """Address of its probes."""

    @asynccontextmanager
    async def sharing(self) -> AsyncIterator["WorkerProcess"]:
        """Yields this process with a store that fetches what all of its host read once for all, if
        the host has a cache."""
        settings = self.settings
        redis_url = settings.redis_url.get_secret_value()
        async with host_cache(
            settings.cache, redis_url=redis_url, run=settings.run, ca=settings.ca
        ) as cache:
            yield replace(self, store=replace(self.store, cache=cache))

    @asynccontextmanager
    async def connect(self, idle: Activity, device: Device) -> AsyncIterator[WorkerContext]:
        """Connects to the bus. ``idle``: what this worker waits for when it is not busy."""
        name, site = self.settings.worker, self.settings.site
        worker = Worker(self.service, name, idle, device=device, url=self.url, site=site)
        slot = self.recipe.schedule.slot_deadline_s
        worker.progress.hard_s = self.settings.hang_s
        worker.progress.slot_s = None if slot == "auto" else 2 * slot
        self.health.hangs = partial(worker.progress.hangs, WARNING_SHARE)
        Watchdog(worker.progress).start()
        async with self.settings.connect_bus() as bus:
            yield WorkerContext(bus, self.store, worker)

    async def refuse_or_go_on(self, context: WorkerContext) -> None:
        """A device that cannot hold the model is never used: it reports the reason until it is
        stopped."""
        worker = context.worker
        reason = worker.device.refusal
        if reason is None:
            return
        log.error("refused", reason=reason)
        worker.activity = "refused"
        await worker.report(context.bus)

    async def run(self, work: Coroutine[Any, Any, None], context: WorkerContext) -> bool:
        """Do ``work``, which is ready, until the run is finished; then stop it and return True."""
        self.health.is_ready()
        log.info("ready", device=context.worker.device.kind, gpu=context.worker.device.gpu)
        if self.settings.stay:
            await work
            return False
        working, finishing = (
            asyncio.create_task(each)
            for each in (work, until_finished(context.bus, self.store, self.recipe))
        )
        try:
            await asyncio.wait({working, finishing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            errors = await stop(working, finishing)
        for error in errors:
            if error is not None:
                raise error
        log.info("run_finished", hint="--stay keeps a worker for when the run is resumed")
        return True


async def until_finished(bus: Bus, store: ObjectStore, recipe: Recipe) -> None:
    """Return when the run has made all its optimizer steps, also those that it is given later."""
    steps = recipe.run.steps
    subject = subjects.event_subject(bus.run, "policy_published")
    async for received in bus.follow(subjects.EVT, [subject]):
        event = received.message
        while isinstance(event, PolicyPublished) and event.policy.version >= steps:
            # A run that is resumed may have more, and whoever may publish could announce anything.
            stored = await patiently(lambda: read_recipe(store, bus.run), "store_unavailable")
            steps = 0 if stored is None else stored.run.steps
            committed = partial(numbers_in, store, bus.run, "commits")
            if max(await patiently(committed, "store_unavailable"), default=0) >= steps:
                return
            await asyncio.sleep(COMMIT_POLL_S)


@contextmanager
def one_user_error() -> Iterator[None]:
    """Raise the UserError, or RanksLost, that has ended one of several tasks, alone; anything else
    as it is."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException | None = group.subgroup((UserError, RanksLost))
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is None:
            raise
        raise error from None


def prepare_libraries(recipe: Recipe, *, threads: int, on_cpu: bool = False) -> None:
    """Set the environment variables that the numerical libraries read when they are imported.

    Args:
        on_cpu: leave the GPUs alone, even if the recipe's other processes take them.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if on_cpu or recipe.model.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


async def run_worker(
    service: WorkerService,
    settings: ServiceSettings,
    work: Callable[[WorkerProcess], Awaitable[None]],
) -> None:
    """Serve probes while ``work`` runs; end with it, or after a stop signal."""
    listener, health = settings.listen(settings.host, settings.port), Health()
    access = settings.access(settings.run)
    settings.say_store()

    async def begin() -> None:
        store = open_store(settings.store)
        recipe = await wait_for_recipe(store, settings.run, place=settings.store_place)
        stores = service in ("trainer", "reward")
        await check_files(store, recipe, HOST_KEYS[service], needed=True, stores=stores)
        await record_versions(store, settings.run, service)
        prepare_libraries(
            recipe,
            threads=getattr(recipe, service).threads,
            on_cpu=service == "encoder" and recipe.encoder.device == "cpu",
        )
        if service != "reward":
            check_weights(recipe.model.folder)
        log.info("loading", model=str(recipe.model.folder))
        with one_user_error():
            await work(WorkerProcess(service, settings, recipe, store, health, listener.url))

    app = worker_app(service, health)
    with tracing(settings, service):
        await serve(
            app, begin(), listener=listener, access=access, allowed_hosts=settings.allowed_hosts
        )
