"""Starts the scheduler: opens its connections and passes them down."""

from pathlib import Path

from services.scheduler.core.state import Plan, first_state
from services.scheduler.planning.recipes import shape_of
from services.scheduler.shell.api import create_app
from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.goal import goal_of
from services.scheduler.shell.staleness import settle_staleness
from shared.messages.contracts import MAX_FRAGMENTS_PER_GROUP
from shared.messages.volume import BatchVolume, prompt_bytes
from shared.process.service import Health, listen, serve
from shared.process.settings import ServiceSettings
from shared.recipe.recipe import Recipe
from shared.run.retention import retention_of
from shared.run.run_recipe import prompt_order, store_recipe
from shared.store import open_store


def plan_of(recipe: Recipe) -> Plan:
    shape = shape_of(recipe)
    return Plan(
        shared_share=shape.shared_share,
        trained_steps=shape.trained_steps,
        merged_steps=shape.merged_steps,
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
    and nobody knows how many will join: counted are as many as a group may have.
    """
    fixed, size = plan.schedule.fixed_fragment, plan.group_size
    return BatchVolume(
        groups=plan.num_groups,
        group_size=size,
        fragments_per_group=size // fixed if fixed else min(size, MAX_FRAGMENTS_PER_GROUP),
        scorers=max(1, len(plan.advantages.weights)),
        prompt_bytes=prompt_bytes(plan.prompts.prompts, plan.num_groups),
    ).needs()


async def run(settings: ServiceSettings, recipe: Recipe, *, beside: Path) -> None:
    """``beside`` is the folder of the recipe's file."""
    listener = listen(settings.host, settings.port)
    store = open_store(settings.store)
    recipe, staleness = await settle_staleness(store, recipe)
    plan = plan_of(recipe)
    recipe = await store_recipe(store, recipe, beside)
    async with settings.connect_bus() as bus, settings.connect_index() as index:
        scheduler = Scheduler(
            plan, bus, store, index, Health(),
            state=first_state(plan), retention=retention_of(recipe), goal=goal_of(recipe, store),
            staleness=staleness, stream_needs=stream_needs(plan),
        )  # fmt: skip
        app = create_app(scheduler)
        await serve(app, scheduler.run(), listener=listener, allowed_hosts=settings.allowed_hosts)
