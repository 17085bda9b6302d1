"""Starts the scheduler: connections are opened here and passed down."""

from services.scheduler.api import create_app
from services.scheduler.app import Scheduler
from services.scheduler.state import Plan
from shared.prompts import PromptOrder, read_prompts
from shared.recipe import Recipe
from shared.run_store import store_recipe
from shared.service import Health, serve
from shared.settings import ServiceSettings
from shared.store import open_store


def plan_of(recipe: Recipe) -> Plan:
    fragment = recipe.schedule.fragment_size
    return Plan(
        prompts=PromptOrder(read_prompts(recipe.data.prompts), recipe.run.seed),
        num_batches=recipe.run.steps,
        num_groups=recipe.batch.groups,
        group_size=recipe.batch.group_size,
        fragment_size=recipe.batch.group_size if fragment == "auto" else fragment,
        window_starts=recipe.sampling.first_window_starts,
        seed=recipe.run.seed,
    )


async def run(settings: ServiceSettings, recipe: Recipe) -> None:
    plan = plan_of(recipe)
    store = open_store(settings.store)
    await store_recipe(store, recipe)
    async with settings.connect_bus() as bus, settings.connect_index() as index:
        scheduler = Scheduler(plan, bus, store, index, Health())
        app = create_app(scheduler)
        await serve(app, scheduler.run(), host=settings.host, port=settings.port)
