"""Starts the scheduler: connections are opened here and passed down."""

from pathlib import Path

from services.scheduler.core.state import LoanState, Plan, State
from services.scheduler.core.tag.controller import Controller
from services.scheduler.shell.api import create_app
from services.scheduler.shell.app import Scheduler
from shared.learning.prompts import PromptOrder, read_prompts
from shared.process.service import Health, listen, serve
from shared.process.settings import ServiceSettings
from shared.recipe.recipe import Recipe
from shared.run.retention import retention_of
from shared.run.run_recipe import store_recipe
from shared.store import open_store


def plan_of(recipe: Recipe) -> Plan:
    schedule, batch = recipe.schedule, recipe.batch
    in_order = recipe.trainer.deterministic
    whole = batch.group_size if in_order else None  # the same bytes need the same cuts
    early = 1.0 if schedule.early_fraction == "auto" else schedule.early_fraction
    staleness = schedule.staleness_limit
    deadline = schedule.slot_deadline_s
    return Plan(
        prompts=PromptOrder(read_prompts(recipe.data.prompts), recipe.run.seed),
        num_batches=recipe.run.steps,
        num_groups=batch.groups,
        group_size=batch.group_size,
        mode=schedule.mode,
        trains_in_order=in_order,
        fragment_size=whole if schedule.fragment_size == "auto" else schedule.fragment_size,
        max_staleness=staleness,
        early_groups=max(1, int(early * batch.groups)) if staleness else 0,
        windows=recipe.sampling.moving_window,
        advantages=recipe.advantages,
        seed=recipe.run.seed,
        slot_deadline=None if deadline == "auto" else deadline,
    )


def first_state(recipe: Recipe) -> State:
    """Before anything is read: what the recipe wants of TAG."""
    tag = recipe.schedule.tag if recipe.schedule.mode == "pipelined" else "off"
    if recipe.schedule.mode == "colocated":
        tag = recipe.batch.groups  # its share is all that it owns
    controller = Controller.of("fixed", tag) if isinstance(tag, int) else Controller.of(tag)
    return State(recovering=True, tag=LoanState(controller=controller))


async def run(settings: ServiceSettings, recipe: Recipe, *, beside: Path) -> None:
    """``beside`` is the folder of the recipe's file."""
    listener = listen(settings.host, settings.port)
    plan = plan_of(recipe)
    store = open_store(settings.store)
    recipe = await store_recipe(store, recipe, beside)
    async with settings.connect_bus() as bus, settings.connect_index() as index:
        scheduler = Scheduler(
            plan, bus, store, index, Health(),
            state=first_state(recipe), retention=retention_of(recipe),
        )  # fmt: skip
        app = create_app(scheduler)
        await serve(app, scheduler.run(), listener=listener, allowed_hosts=settings.allowed_hosts)
