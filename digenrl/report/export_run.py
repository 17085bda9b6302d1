"""Exports the adapter of one version of a run from its object store alone."""

import asyncio
from pathlib import Path

from digenrl.evaluation.run import weights_to_use, with_weights_to_use
from digenrl.report.export import export_adapter
from digenrl.report.layouts import Layout
from shared.errors import IntegrityError, UserError
from shared.process.settings import ServiceSettings
from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord, commit_chain
from shared.run.run_recipe import needed_recipe
from shared.store import ObjectStore, open_store


async def export_run(
    run: str, out: Path, layout: Layout, version: int | None
) -> tuple[int, list[Path]]:
    """Write the adapter of a version, or of the newest, into ``out``; return the version and its
    files. Where the run averages, it is the average.

    Raises:
        UserError: if the store has no such run or version, or the run trains all weights.
    """
    store = open_store(ServiceSettings(run=run).store)
    recipe = await needed_recipe(store, run)
    if recipe.model.trained == "full":
        raise UserError(
            f"--run: {run} trains all weights, and has no adapter; `digenrl report` exports them"
        )
    record = await _version(store, recipe, version)
    try:
        weights = await weights_to_use(store, recipe, record)
    except IntegrityError as error:
        raise UserError(
            f"--version: the weights of version {record.policy.version} are not kept: {error}"
        ) from error
    await asyncio.to_thread(export_adapter, out, weights, recipe, layout)
    return record.policy.version, await asyncio.to_thread(lambda: sorted(out.iterdir()))


async def _version(store: ObjectStore, recipe: Recipe, version: int | None) -> CommitRecord:
    chain = await commit_chain(store, recipe.run.name)
    if not chain:
        raise UserError(f"--run: {recipe.run.name} has no version yet")
    if version is None:
        return (await with_weights_to_use(store, recipe, chain))[-1]
    found = next((each for each in chain if each.policy.version == version), None)
    if found is None:
        newest = chain[-1].policy.version
        raise UserError(f"--version: there is no version {version}; the newest is {newest}")
    return found
