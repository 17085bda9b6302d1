"""Starts the scheduler: waits until it is this one's turn to command, opens its connections and
passes them down."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from services.scheduler.core.fluid.cutting import most_pieces
from services.scheduler.core.state import Plan, first_state
from services.scheduler.costs.recipes import batch_shape
from services.scheduler.shell.api import create_app
from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.garbage_collection import settle_heap
from services.scheduler.shell.goal import make_goal
from services.scheduler.shell.lease import Lease
from services.scheduler.shell.metrics import RUN
from services.scheduler.shell.staleness import settle_staleness
from services.scheduler.shell.standby import standby_app
from services.scheduler.shell.views import run_figures
from shared.errors import LeaseLost
from shared.limits import MAX_FRAGMENTS_PER_GROUP
from shared.messages.volume import BatchVolume, prompt_bytes
from shared.process.http_access import Access, AuditedChange
from shared.process.otlp import tracing
from shared.process.service import Health, Listener, serve
from shared.process.settings import ServiceSettings
from shared.process.store_check import PROBE, check_store
from shared.process.worker_process import one_user_error
from shared.recipe.recipe import Recipe
from shared.run.layout import file_key
from shared.run.log_entries import Request
from shared.run.previews import PreviewRule
from shared.run.retention import retention_from
from shared.run.run_recipe import check_recipe, prompt_order, store_images
from shared.store import open_store


def plan_from_recipe(recipe: Recipe) -> Plan:
    shape = batch_shape(recipe)
    return Plan(
        shared_share=shape.shared_share,
        trained_steps=shape.trained_steps,
        merged_steps=shape.merged_steps,
        updates=recipe.trainer.updates,
        trained_samples=recipe.trained_samples,
        prompts=prompt_order(recipe),
        num_batches=recipe.run.steps,
        num_groups=recipe.batch.groups,
        group_size=recipe.batch.group_size,
        schedule=recipe.run_schedule,
        windows=recipe.sampling.moving_window,
        advantages=recipe.advantages,
        needs_encoder=bool(recipe.encoder.workers),
        seed=recipe.run.seed,
    )


def stream_needs(plan: Plan) -> dict[str, int]:
    """Return the most bytes that a run needs in each stream, by its name.

    With `schedule.fragment_size = "auto"` the number of devices decides how small fragments become,
    and it is unknown in advance: the maximum of a group is assumed.
    """
    fixed, size = plan.schedule.fixed_fragment, plan.group_size
    return BatchVolume(
        groups=plan.num_groups,
        group_size=size,
        fragments_per_group=size // fixed if fixed else min(size, MAX_FRAGMENTS_PER_GROUP),
        scorers=max(1, len(plan.advantages.weights)),
        prompt_bytes=prompt_bytes(plan.prompts.prompts, plan.num_groups),
        pieces=most_pieces(plan),
    ).needs()


@dataclass(slots=True)
class CurrentApp:
    """Is the ASGI application that answers at present: another one while this scheduler commands
    than while it stands by."""

    lease: Lease | None = None
    """The lease that this scheduler holds, or waits for."""
    standby: ASGIApp = field(init=False)
    app: ASGIApp = field(init=False)

    def commander(self) -> str:
        return "" if self.lease is None else self.lease.holder

    def turn_of(self, lease: Lease) -> Lease:
        self.lease = lease
        return lease

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


async def run(settings: ServiceSettings, recipe: Recipe, *, recipe_folder: Path) -> None:
    """Command the run when it is this scheduler's turn; ``recipe_folder``: of the recipe."""
    listener, health = settings.listen(settings.host, settings.port), Health()
    access = settings.access(settings.run)
    current = CurrentApp()
    current.app = current.standby = standby_app(health, current.commander, settings.trusted)

    async def take_turns() -> None:
        while True:
            try:
                await _command(settings, recipe, recipe_folder, health, listener, current, access)
            except* LeaseLost as lost:
                health.is_not_ready(f"standby: {lost.exceptions[0]}")

    settle_heap()
    with tracing(settings, "scheduler"):
        await serve(
            current, take_turns(),
            listener=listener, access=access, allowed_hosts=settings.allowed_hosts,
        )  # fmt: skip


async def _keep_request(scheduler: Scheduler, change: AuditedChange) -> None:
    """Append a request that changes something to the run's log."""
    caller = change.caller
    request = Request(
        caller=caller.name, role=caller.role, on_behalf=change.on_behalf,
        operation=change.operation, client=change.client, status=change.status,
    )  # fmt: skip
    await scheduler.run_log.request(request)


@asynccontextmanager
async def _tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """Yield a group of tasks, which raises UserError without its group."""
    with one_user_error():
        async with asyncio.TaskGroup() as tasks:
            yield tasks


async def _command(
    settings: ServiceSettings, recipe: Recipe, recipe_folder: Path, health: Health,
    listener: Listener, current: CurrentApp, access: Access,
) -> None:  # fmt: skip
    """Wait for the lease, then command the run for as long as it is held.

    Raises:
        LeaseLost: in a group.
    """
    store = open_store(settings.store)
    await check_store(
        settings.store, store, file_key(settings.run, PROBE), may_be_open=settings.open_brokers
    )
    # What needs no lease comes before it: whoever waits for a scheduler does not wait for this.
    recipe, staleness = await settle_staleness(store, recipe)
    plan, checked = plan_from_recipe(recipe), await check_recipe(store, recipe, recipe_folder)
    async with (
        settings.connect_bus() as bus,
        settings.connect_index() as index,
        current.turn_of(Lease(bus, store, health, listener.url)).held() as lease,
        _tasks() as tasks,
    ):
        tasks.create_task(lease.keep())
        recipe = await checked.put(store)
        await store_images(store, recipe)
        scheduler = Scheduler(
            plan, bus, store, replace(index, epoch=lease.epoch), health, state=first_state(plan),
            retention=retention_from(recipe), previews=PreviewRule.from_recipe(recipe),
            goal=make_goal(recipe, store), staleness=staleness, stream_needs=stream_needs(plan),
            lease=lease,
        )  # fmt: skip
        access.audit = partial(_keep_request, scheduler)
        current.app = create_app(scheduler, access)
        RUN.look = partial(run_figures, scheduler, time.monotonic())
        try:
            await scheduler.run()
        finally:
            current.app = current.standby  # closing takes time, and another one may command
            RUN.look = None
