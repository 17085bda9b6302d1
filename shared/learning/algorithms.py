"""The algorithms that a recipe chooses by name: what each is made of, and what goes with what.

An algorithm is an objective (how a sample's advantage becomes a loss) and a way of sampling (which
steps are stochastic, and how). Its name stands for the values of its paper as well: a recipe gets
them where it says nothing. `docs/algorithms/` has a page for each.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shared.learning.windows import Moves

if TYPE_CHECKING:
    from shared.recipe.recipe import Recipe

Name = Literal[
    "flow-grpo",
    "flow-grpo-fast",
    "cps",
    "dance-grpo",
    "mix-grpo",
    "grpo-guard",
    "diffusion-nft",
]
Objective = Literal["clipped", "guarded", "nft"]
Variant = Literal["flow", "dance", "cps"]
Starts = Literal["fixed", "half", "all"]

DEFAULT: Name = "flow-grpo"


@dataclass(frozen=True, slots=True)
class Method:
    objective: Objective
    variants: tuple[Variant, ...]
    """Of the stochastic step; the first is what a recipe gets that names none."""
    starts: Starts = "fixed"
    """Of windows, where the recipe names none. fixed: at step 0; half: in the first half of the
    steps; all: wherever they fit."""
    moves: Moves = "group"
    implies: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of a recipe, "table.key", and what is published for them."""


_POLICY_GRADIENT: tuple[Variant, ...] = ("flow", "dance", "cps")


def _published(noise_level: float, clip_range: float, **sampling: Any) -> dict[str, Any]:
    noise_and_clip = {"sampling.noise_level": noise_level, "algorithm.clip_range": clip_range}
    return noise_and_clip | {f"sampling.{key}": value for key, value in sampling.items()}


ALGORITHMS: Mapping[str, Method] = {
    "flow-grpo": Method("clipped", _POLICY_GRADIENT, implies=_published(0.7, 1e-4)),
    "flow-grpo-fast": Method(
        "clipped", _POLICY_GRADIENT, starts="half", implies=_published(0.8, 1e-5)
    ),
    "cps": Method("clipped", ("cps",), implies=_published(0.8, 1e-5)),
    "dance-grpo": Method("clipped", ("dance",), implies=_published(0.3, 1e-4)),
    "mix-grpo": Method(
        "clipped", _POLICY_GRADIENT, starts="all", moves="progressive",
        implies=_published(0.7, 1e-4, window_stride=1, roll_back=True),
    ),
    # The log-prob of cps has no scale that the ratio could be freed of.
    "grpo-guard": Method("guarded", ("flow", "dance"), implies=_published(0.7, 2e-6)),
    "diffusion-nft": Method("nft", _POLICY_GRADIENT),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ImpliedValue:
    """A key of a recipe of which its algorithm's name says something."""

    key: str
    implied: Any
    """What a recipe has that leaves the key out."""
    value: Any
    """What this recipe has."""

    @property
    def is_overridden(self) -> bool:
        return bool(self.implied != self.value)


def implied_values(recipe: "Recipe") -> list[ImpliedValue]:
    """What the algorithm's name stands for, beside what the recipe has."""
    name, sampling = recipe.algorithm.name, recipe.sampling.model_dump()
    tables = {"sampling": sampling, "algorithm": recipe.algorithm.model_dump()}
    return [
        ImpliedValue(key, value, tables[key.split(".")[0]][key.split(".")[1]])
        for key, value in _implied(ALGORITHMS[name], sampling)
    ]


def with_implied(plain: Mapping[str, Any]) -> dict[str, Any]:
    """An unchecked recipe with what its algorithm's name stands for where it says nothing."""
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
