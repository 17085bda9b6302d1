"""The algorithms that a recipe chooses by name: what each is made of, and what goes with what.

An algorithm is an objective (how a sample's advantage becomes a loss) and a way of sampling (which
steps are stochastic, and how). `docs/algorithms/` has a page for each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shared.windows import Moves

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


@dataclass(frozen=True, slots=True)
class Method:
    objective: Objective
    variants: tuple[Variant, ...]
    """Of the stochastic step; the first is what a recipe gets that names none."""
    starts: Starts = "fixed"
    """Of windows, where the recipe names none. fixed: at step 0; half: in the first half of the
    steps; all: wherever they fit."""
    moves: Moves = "group"


_POLICY_GRADIENT: tuple[Variant, ...] = ("flow", "dance", "cps")

ALGORITHMS: Mapping[str, Method] = {
    "flow-grpo": Method("clipped", _POLICY_GRADIENT),
    "flow-grpo-fast": Method("clipped", _POLICY_GRADIENT, starts="half"),
    "cps": Method("clipped", ("cps",)),
    "dance-grpo": Method("clipped", ("dance",)),
    "mix-grpo": Method("clipped", _POLICY_GRADIENT, starts="all", moves="progressive"),
    # The log-prob of cps has no scale that the ratio could be freed of.
    "grpo-guard": Method("guarded", ("flow", "dance")),
    "diffusion-nft": Method("nft", _POLICY_GRADIENT),
}


def with_sampling(plain: Mapping[str, Any]) -> dict[str, Any]:
    """An unchecked recipe with what its algorithm implies of the sampling where it says nothing."""
    tables = dict(plain)
    table, sampling = tables.get("algorithm", {}), tables.get("sampling")
    name = table.get("name", "flow-grpo") if isinstance(table, Mapping) else None
    if isinstance(name, str) and name in ALGORITHMS and isinstance(sampling, Mapping):
        tables["sampling"] = {**_implied(ALGORITHMS[name], sampling), **sampling}
    return tables


def _implied(method: Method, sampling: Mapping[str, Any]) -> dict[str, Any]:
    implied: dict[str, Any] = {"variant": method.variants[0], "windows": method.moves}
    steps, window = sampling.get("steps", 10), sampling.get("window")
    if isinstance(steps, int) and isinstance(window, int) and method.starts != "fixed":
        last = (steps // 2 if method.starts == "half" else steps - 1) - window
        implied["first_window_starts"] = (0, max(0, last))
    return implied
