"""Which runs are made, in which order: rounds over the modes, so that all see the same machine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.two_devices.compare import PartResult, RunFigures, figures_of, summarise
from bench.two_devices.modes import Mode, Part, modes_of
from bench.two_devices.run import measured_run
from bench.two_devices.session import Session
from bench.two_devices.shapes import Shape, shape_changes
from shared.errors import UserError
from shared.recipe.recipe import Recipe, override

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One part of the bench."""

    part: Part
    recipe: Recipe
    """As given, with what is the same in all modes set anew."""
    changes: Mapping[str, Any]
    """What that was."""
    modes: tuple[Mode, ...]
    rounds: int
    batches: int
    """Of every run that are measured."""
    slowdown: float
    """Of the rollout device; 1 is none."""

    def measured_batches(self, mode: Mode) -> int:
        return min(self.batches, mode.most_batches or self.batches)

    @property
    def samples(self) -> int:
        return self.recipe.batch.groups * self.recipe.batch.group_size


def plan_study(
    given: Recipe,
    part: Part,
    *,
    shape: Shape,
    groups: int,
    model: Path,
    only: Sequence[str] | None,
    rounds: int,
    batches: int,
    slowdown: float,
) -> Study:
    """``only``: names of modes; of those that the part does not have, nothing.

    Raises:
        UserError: if the part has none of them, or the recipe cannot take the shape.
    """
    changes = shape_changes(shape, groups, model)
    recipe = override(given, changes)
    known = modes_of(part, window=shape.window, group_size=recipe.batch.group_size)
    modes = tuple(mode for mode in known if only is None or mode.name in only)
    if not modes:
        names = ", ".join(mode.name for mode in known)
        raise UserError(f"--mode: part {part} has none of these; known are: {names}")
    return Study(
        part=part,
        recipe=recipe,
        changes=changes,
        modes=modes,
        rounds=rounds,
        batches=batches,
        slowdown=slowdown if part == "slowed" else 1.0,
    )


def recipe_of(study: Study, mode: Mode, number: int) -> Recipe:
    """Of one run: warm-up, the measured batches, and one that is begun beside the last of them."""
    own = {
        "run.name": f"{study.part}-{mode.slug}-{number}",
        "run.steps": mode.warm_up + study.measured_batches(mode) + 1,
    }
    return override(study.recipe, {**mode.changes, **own})


async def run_study(session: Session, study: Study, say: Say) -> PartResult:
    figures: dict[str, list[RunFigures]] = {mode.name: [] for mode in study.modes}
    for number in range(study.rounds):
        # There and back: what the machine does slowly over time hits all modes alike.
        for mode in study.modes if number % 2 == 0 else reversed(study.modes):
            recipe = recipe_of(study, mode, number)
            record = await measured_run(
                session, recipe, warm_up=mode.warm_up, slowdown=study.slowdown
            )
            found = figures_of(record, group_size=recipe.batch.group_size)
            figures[mode.name].append(found)
            say(_line(study, mode, number, found))
    measured = [(mode, figures[mode.name]) for mode in study.modes]
    return summarise(study.part, measured, samples=study.samples, slowdown=study.slowdown)


def _line(study: Study, mode: Mode, number: int, found: RunFigures) -> str:
    batches = " ".join(f"{seconds:.2f}" for seconds in found.batches)
    return (
        f"{study.part} {number + 1}/{study.rounds}  {mode.name:<18} {found.step:.3f} s per batch "
        f"({batches})"
    )
