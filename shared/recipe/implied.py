"""Values that an algorithm's name implies where a recipe says nothing."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shared.learning.algorithms import ALGORITHMS, DEFAULT, Method
from shared.recipe.tables import Tables


@dataclass(frozen=True, slots=True)
class ImpliedValue:
    """Names a key of a recipe that the algorithm's name implies."""

    key: str
    implied: Any
    """Value in a recipe that leaves the key out."""
    value: Any
    """Value in this recipe."""

    @property
    def is_overridden(self) -> bool:
        return bool(self.implied != self.value)


def implied_values(recipe: Tables) -> list[ImpliedValue]:
    """Return what the algorithm's name stands for, beside what the recipe has."""
    name, sampling = recipe.algorithm.name, recipe.sampling.model_dump()
    tables = {"sampling": sampling, "algorithm": recipe.algorithm.model_dump()}
    return [
        ImpliedValue(key, value, tables[key.split(".")[0]][key.split(".")[1]])
        for key, value in _implied(ALGORITHMS[name], sampling)
    ]


def with_implied(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return an unchecked recipe with what its algorithm's name implies where it says nothing."""
    tables = dict(plain)
    table, sampling = tables.get("algorithm", {}), tables.get("sampling")
    name = table.get("name", DEFAULT) if isinstance(table, Mapping) else None
    if not (isinstance(name, str) and name in ALGORITHMS and isinstance(sampling, Mapping)):
        return tables
    said = {"sampling": dict(sampling), "algorithm": dict(table)}
    for key, value in _implied(ALGORITHMS[name], sampling):
        of, own = key.split(".")
        said[of].setdefault(own, value)
    return tables | said


def _implied(method: Method, sampling: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """ "table.key" and its value."""
    yield "sampling.variant", method.variants[0]
    yield "sampling.windows", method.moves
    steps, window = sampling.get("steps", 10), sampling.get("window")
    if isinstance(steps, int) and isinstance(window, int) and method.starts != "fixed":
        last = (steps // 2 if method.starts == "half" else steps - 1) - window
        yield "sampling.first_window_starts", (0, max(0, last))
    if sampling.get("windows", method.moves) == "random":
        yield "sampling.window_batches", 1
    yield from method.implies.items()
