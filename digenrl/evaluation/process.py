"""Starts the evaluator of a run."""

from typing import TYPE_CHECKING

from digenrl.evaluation.progress import Progress, routes
from shared.process.service import Health, serve, worker_app
from shared.process.settings import ServiceSettings
from shared.process.worker_process import prepare_libraries
from shared.recipe.recipe import Recipe
from shared.run.files import check_files
from shared.run.run_recipe import FILES, needed_recipe, wait_for_recipe
from shared.store import ObjectStore, open_store

if TYPE_CHECKING:
    from digenrl.evaluation.follower import Follower


async def follow_run(settings: ServiceSettings, *, every: int | None) -> None:
    """Evaluate versions during the run, and answer probes; end with the run or on a signal."""
    listener = settings.listen(settings.host, settings.port)
    access = settings.access(settings.run)
    health, progress = Health(), Progress()
    app = worker_app("evaluation", health)
    app.include_router(routes(progress))

    async def work() -> None:
        store = open_store(settings.store)
        recipe = await wait_for_recipe(store, settings.run, place=settings.store_place)
        follower = await _prepared(store, recipe, settings, progress, every)
        health.is_ready()
        await follower.follow(stay=settings.stay)

    await serve(app, work(), listener=listener, access=access, allowed_hosts=settings.allowed_hosts)


async def catch_up(settings: ServiceSettings, *, every: int | None) -> None:
    """Evaluate all versions that are due and committed now.

    Raises:
        UserError: if the store holds no such run.
    """
    store = open_store(settings.store)
    recipe = await needed_recipe(store, settings.run)
    await (await _prepared(store, recipe, settings, Progress(), every)).catch_up()


async def _prepared(
    store: ObjectStore, recipe: Recipe, settings: ServiceSettings, progress: Progress,
    every: int | None,
) -> "Follower":  # fmt: skip
    """Check the recipe's files, and return the evaluator."""
    await check_files(store, recipe, FILES, needed=False, stores=False)
    prepare_libraries(recipe, threads=recipe.evaluation.threads)
    from digenrl.evaluation.follower import Follower  # torch: the probes answer first

    return Follower(
        store, settings.run, progress, worker=settings.worker, every=every,
        memory=settings.rollout_memory,
    )  # fmt: skip
