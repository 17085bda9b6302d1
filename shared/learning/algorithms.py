"""The algorithms that a recipe chooses by name: what each is made of, and what goes with what.

An algorithm is an objective (how a sample's advantage becomes a loss) and a way of sampling (which
steps are stochastic, and how). Its name stands for the values of its paper as well: a recipe gets
them where it says nothing. `docs/algorithms/` has a page for each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shared.learning.windows import Moves

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
