"""Exports the adapter of one version of a run from its object store alone."""

import asyncio
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from torch import Tensor

from digenrl.evaluation.best import Best, best_version, ranked_versions
from digenrl.evaluation.run import weights_to_use
from digenrl.report.export import export_adapter
from digenrl.report.layouts import Layout
from shared.errors import IntegrityError, UserError
from shared.learning.prompts import read_rows
from shared.process.settings import ServiceSettings
from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord, commit_chain
from shared.run.layout import weights_folder
from shared.run.run_recipe import needed_recipe
from shared.store import ObjectStore, open_store

WantedVersion = int | Literal["best", "newest"]
"""Which version is exported: one of a number, the one that is best by its evaluation, or the
newest."""


@dataclass(frozen=True, slots=True)
class ExportedAdapter:
    """The exported version, its files and its figure."""

    version: int
    files: list[Path]
    figure: str
    """The comparison figure of versions with its name; or a text that there is no figure."""
    example: list[str]
    """As `example_prompt` returns it."""


async def read_version(
    store: ObjectStore, recipe: Recipe, version: WantedVersion
) -> tuple[int, dict[str, Tensor]]:
    """Return the number and the weights of a version. Where the run averages, they are the average.

    Raises:
        UserError: if the run has no such version, or its weights are not kept.
    """
    record = await _version(store, recipe, version)
    number = record.policy.version
    try:
        return number, await weights_to_use(store, recipe, record)
    except IntegrityError as error:
        raise UserError(
            f"--version: the weights of version {number} are not kept ({error}); "
            f"{await _kept(store, recipe)}run.keep_every and run.keep_best keep more"
        ) from error


async def export_run(
    run: str, out: Path, layout: Layout, version: WantedVersion
) -> ExportedAdapter:
    """Write the adapter of a version into ``out``.

    Raises:
        UserError: as `read_version` does, or if the run trains all weights.
    """
    store = open_store(ServiceSettings(run=run).store)
    recipe = await needed_recipe(store, run)
    if recipe.model.trained == "full":
        raise UserError(
            f"--run: {run} trains all weights, and has no adapter; `digenrl report {run}` exports "
            "them"
        )
    number, weights = await read_version(store, recipe, version)
    await asyncio.to_thread(export_adapter, out, weights, recipe, layout)
    return ExportedAdapter(
        number, await asyncio.to_thread(lambda: sorted(out.iterdir())),
        await _figure(store, recipe, number), await asyncio.to_thread(example_prompt, recipe),
    )  # fmt: skip


async def _figure(store: ObjectStore, recipe: Recipe, version: int) -> str:
    """Describe how good a version is, by the figure of the best one."""
    best = await best_version(store, recipe)
    if best is None or version not in best.figures:
        return "not evaluated"
    mark = ", the best" if version == best.version else f"; the best is version {best.version}"
    return f"{best.measure} {best.figures[version]:.3f}{mark}"


def example_prompt(recipe: Recipe) -> list[str]:
    """Return the words by which `digenrl generate` samples a prompt of the run."""
    try:
        rows = read_rows(recipe.data.prompts)
    except (UserError, OSError):  # not on this host
        return ["--prompt", "PROMPT"]
    prompt, image = next((row for row in rows if row[0].text.strip()), rows[0])
    return ["--prompt", prompt.text, *([] if image is None else ["--image", str(image)])]


async def _version(store: ObjectStore, recipe: Recipe, version: WantedVersion) -> CommitRecord:
    chain = await commit_chain(store, recipe.run.name)
    if not chain:
        raise UserError(f"--run: {recipe.run.name} has no version yet")
    if version == "best":
        version = await _best(store, recipe)
    if version == "newest":
        return chain[-1]
    record = next((each for each in chain if each.policy.version == version), None)
    if record is None:
        newest = chain[-1].policy.version
        raise UserError(f"--version: there is no version {version}; the newest is {newest}")
    return record


async def _best(store: ObjectStore, recipe: Recipe) -> int:
    """Return the version that is best by its evaluation.

    Raises:
        UserError: if none is evaluated, or none is better than the model before training.
    """
    run = recipe.run.name
    best = await best_version(store, recipe)
    if best is None:
        raise UserError(
            f"--version: no version of {run} is evaluated, so none is known to be the best. "
            "During the run, evaluation.every in its recipe evaluates (`digenrl up RECIPE --resume"
            f" --evaluation.every 10`); after it, `digenrl evaluate {run} --once --every 10`. Or "
            f"name a version: `digenrl versions {run}` has the reward of each batch"
        )
    if best.is_untrained:
        raise UserError(
            f"--version: no evaluated version of {run} is better than 0, the model before training "
            f"({best.measure} {best.figures[0]:.3f}), so the best has learned nothing yet; "
            f"{_best_trained(best)}`--version newest` takes the newest, and `--version 0` takes it "
            "all the same"
        )
    return best.version


def _best_trained(best: Best) -> str:
    """Describe which trained version is the best, within a sentence."""
    if best.trained is None:
        return ""
    figure = best.figures[best.trained]
    return f"`--version {best.trained}` takes the best that was trained ({figure:.3f}), "


async def _kept(store: ObjectStore, recipe: Recipe) -> str:
    """Describe which versions' weights are kept, and which is the best of them, within a
    sentence."""
    run = recipe.run.name
    keys = set(await store.keys(weights_folder(run)))
    kept = [
        record.policy.version for record in await commit_chain(store, run)
        if record.learned.ref.key in keys
    ]  # fmt: skip
    return kept_in_words(kept, await ranked_versions(store, recipe))


def kept_in_words(kept: list[int], ranked: list[int]) -> str:
    """Describe which versions are kept, and which of them is the best.

    Args:
        ranked: evaluated versions, the best first.

    >>> kept_in_words([0, 4, 5], [2, 5, 0])
    'stored versions: 0, 4 to 5; of these `--version 5` has the best evaluation; '
    """
    best = next((each for each in ranked if each in kept), None)
    text = f"stored versions: {_ranges(kept)}; " if kept else ""
    return text if best is None else f"{text}of these `--version {best}` has the best evaluation; "


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as a person writes them.

    >>> _ranges([0, 3, 4, 5, 9])
    '0, 3 to 5, 9'
    """
    ranges = []
    for _, run in groupby(enumerate(numbers), key=lambda each: each[1] - each[0]):
        members = [number for _, number in run]
        more = f" to {members[-1]}" if len(members) > 1 else ""
        ranges.append(f"{members[0]}{more}")
    return ", ".join(ranges)
