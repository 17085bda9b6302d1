"""A recipe: everything that defines a run, as one TOML file.

Read and checked before anything is started; the resolved recipe is stored with the run, where
every service takes it from. docs/recipe-keys.md describes each key.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from shared.errors import UserError
from shared.learning.algorithms import ALGORITHMS, DEFAULT, Method
from shared.models.catalogue import pipeline_sigmas
from shared.recipe.adapter import agreed, recipe_adapter
from shared.recipe.checks import check_tables
from shared.recipe.files import RecipeLayer, check_excluded, merged, read_layers, without_evaluated
from shared.recipe.options import put_options
from shared.recipe.recipe_errors import describe
from shared.recipe.rewards import Evaluation, Reward
from shared.recipe.sampling import WINDOW_KEYS, SigmaGrid
from shared.recipe.tables import Tables

NO_OPTIONS: Mapping[str, Any] = {}


class Recipe(Tables):
    """A recipe whose tables go together, with what its algorithm implies."""

    @model_validator(mode="before")
    @classmethod
    def _implied_by_the_algorithm(cls, plain: Any) -> Any:
        return with_implied(plain) if isinstance(plain, Mapping) else plain

    @model_validator(mode="after")
    def _tables_go_together(self) -> Self:
        check_tables(self)
        return self


def load_recipe(path: Path, options: Mapping[str, Any] = NO_OPTIONS) -> Recipe:
    """Read, check and resolve a recipe: TOML, or the JSON of one that is resolved already.

    Args:
        options: values by the dotted names of keys, over the values of the file.

    Raises:
        UserError: one line that names the file, the key and the remedy.
    """
    return resolve(path, read_layers(path), options)


def resolve(path: Path, layers: Sequence[RecipeLayer], options: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a file's layers and options; raises UserError as `load_recipe` does."""
    plain = merged(layers)
    if path.suffix != ".json":  # a run keeps what it evaluates where its files have moved
        plain = without_evaluated(plain, options)
    plain = put_options(plain, options)
    if path.suffix != ".json":  # the recipe of a run has both
        check_excluded(plain)
    try:
        return _resolved(Recipe.model_validate(plain), path.resolve().parent)
    except ValidationError as error:
        faults = describe(error, Recipe, plain)
        lines = [f"--{x}" if x.split(":")[0] in options else f"{path}: {x}" for x in faults]
        raise UserError("\n".join(lines)) from error


def override(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return the recipe with some keys changed ("run.steps": 5); None leaves a key as it is.

    Raises:
        UserError: if a value is not one that the key takes.
    """
    plain = recipe.model_dump()
    for key, value in changes.items():
        if value is not None:
            table, field = key.split(".")
            plain[table][field] = value
    try:
        return Recipe.model_validate(plain)
    except ValidationError as error:
        raise UserError("\n".join(describe(error, Recipe))) from error


def _resolved(recipe: Recipe, base: Path) -> Recipe:
    """Return the recipe with absolute paths, and a model's own sigmas as numbers if it is here."""

    def with_scorers(table: Reward | Evaluation) -> Any:
        return table.model_copy(update={"scorers": tuple(each.at(base) for each in table.scorers)})

    evaluation = recipe.evaluation.located(base)
    absolute = recipe.model_copy(
        update={
            "model": recipe.model.located(base),
            "data": recipe.data.located(base),
            "reward": with_scorers(recipe.reward),
            "evaluation": with_scorers(evaluation),
        }
    )
    return with_adapter(with_folder(absolute, absolute.model.folder))


def with_adapter(recipe: Recipe) -> Recipe:
    """Return the recipe with rank, alpha and targets of its adapter, if it has one that is here.

    Raises:
        UserError: if the adapter does not fit the model, or `model.lora` differs.
    """
    adapter = recipe_adapter(recipe)
    if adapter is None:
        return recipe
    lora = agreed(recipe.model.lora, adapter)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"lora": lora})})


def with_folder(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with its model in ``folder``, whose own sigmas are then numbers."""
    sigmas, evaluation_sigmas = _sigmas(recipe, folder)
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update={"folder": folder}),
            "sampling": recipe.sampling.model_copy(update={"sigmas": sigmas}),
            "evaluation": recipe.evaluation.model_copy(update={"sigmas": evaluation_sigmas}),
        }
    )


def _sigmas(recipe: Recipe, folder: Path) -> tuple[SigmaGrid, SigmaGrid | None]:
    """Return the sigmas of sampling and evaluation; a model's own as numbers, if it is here."""
    sampling, evaluation, size = recipe.sampling, recipe.evaluation, recipe.model
    trained, evaluated = sampling.sigmas, evaluation.sigmas
    if not folder.is_dir():
        return trained, evaluated
    if (evaluated or trained) == "model":  # other steps and sizes have other numbers
        evaluated = pipeline_sigmas(
            folder,
            evaluation.steps or sampling.steps,
            height=evaluation.height or size.height,
            width=evaluation.width or size.width,
            frames=size.frames,
        )
    if trained == "model":
        trained = pipeline_sigmas(
            folder, sampling.steps, height=size.height, width=size.width, frames=size.frames
        )
    return trained, evaluated


@dataclass(frozen=True, slots=True)
class ImpliedValue:
    """Names a key of a recipe that the algorithm's name implies."""

    algorithm: str
    key: str
    implied: Any
    """Value in a recipe that leaves the key out."""
    value: Any
    """Value in this recipe."""

    @property
    def is_overridden(self) -> bool:
        return bool(self.implied != self.value)

    @property
    def line(self) -> str:
        implied, value = json.dumps(self.implied), json.dumps(self.value)
        if self.is_overridden:
            return f"{self.key} = {value} in place of {implied}, which {self.algorithm} implies"
        return f"{self.algorithm} implies {self.key} = {implied}"


def implied_values(recipe: Tables) -> list[ImpliedValue]:
    """Return the values of the algorithm's name, merged with the recipe's."""
    name, sampling = recipe.algorithm.name, recipe.sampling.model_dump()
    tables = {"sampling": sampling, "algorithm": recipe.algorithm.model_dump()}
    return [
        ImpliedValue(name, key, value, tables[key.split(".")[0]][key.split(".")[1]])
        for key, value in _implied(ALGORITHMS[name], sampling)
    ]


def with_implied(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return an unchecked recipe with its algorithm's values as defaults."""
    tables = dict(plain)
    table, sampling = tables.get("algorithm", {}), tables.get("sampling")
    name = table.get("name", DEFAULT) if isinstance(table, Mapping) else None
    if not (isinstance(name, str) and name in ALGORITHMS and isinstance(sampling, Mapping)):
        return tables
    values = {"sampling": dict(sampling), "algorithm": dict(table)}
    for key, value in _implied(ALGORITHMS[name], sampling):
        table_name, own = key.split(".")
        values[table_name].setdefault(own, value)
    return tables | values


def _implied(method: Method, sampling: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """ "table.key" and its value; without windows, no window keys."""
    trained = sampling.get("trained", method.implies.get("sampling.trained"))
    has_windows = trained != "random"
    yield "sampling.variant", method.variants[0]
    if has_windows:
        yield from _window_keys(method, sampling)
    for key, value in method.implies.items():
        if has_windows or key.removeprefix("sampling.") not in WINDOW_KEYS:
            yield key, value


def _window_keys(method: Method, sampling: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """ "table.key" and its value."""
    yield "sampling.windows", method.window_rule
    steps, window = sampling.get("steps", 10), sampling.get("window")
    if isinstance(steps, int) and isinstance(window, int) and method.starts != "fixed":
        last = (steps // 2 if method.starts == "half" else steps - 1) - window
        yield "sampling.first_window_starts", (0, max(0, last))
    if sampling.get("windows", method.window_rule) == "random":
        yield "sampling.window_batches", 1


def stored_recipe(data: bytes) -> Recipe:
    """Read the recipe of a run that this release has stored.

    Raises:
        ValueError: if another release has stored it, whose keys differ, or if it is no recipe.
    """
    recipe = Recipe.model_validate_json(data)
    if json.loads(recipe.model_dump_json()) != json.loads(data):
        raise ValueError("another release has stored this recipe")
    return recipe
