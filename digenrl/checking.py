"""`digenrl check`: whether a recipe can run, and what it takes on devices that one may have."""

from collections.abc import Iterator
from pathlib import Path

from digenrl.local.preflight import check_inputs, check_rest
from digenrl.planning import known_profiles, parse_devices
from services.scheduler.costs.profile import load_profile
from services.scheduler.planning.planner import plan_split
from services.scheduler.planning.recipes import profile_of, schedule_of, with_shape_of
from services.scheduler.planning.splits import words
from shared.recipe import Recipe, load_recipe


def check(path: Path, devices: str | None, profile: str | None) -> Iterator[str]:
    """What there is to say, a line at a time.

    Raises:
        UserError: the first thing that is wrong, and its remedy.
    """
    recipe = load_recipe(path)
    batch, folder = recipe.batch, recipe.model.folder
    if folder.exists():
        check_inputs(recipe)
    else:
        check_rest(recipe)
    yield (
        f"{path}: {recipe.run.steps} steps of {batch.groups} groups x {batch.group_size} samples "
        f"in fragments of {recipe.schedule.fragment_size}"
    )
    if not folder.exists():
        yield f"{folder} is not here: what the model's files say was not checked"
    if devices is not None:
        yield from _planned(recipe, devices, profile)


def _planned(recipe: Recipe, devices: str, profile: str | None) -> Iterator[str]:
    name = profile or profile_of(recipe, known_profiles())
    costs = with_shape_of(load_profile(name), recipe)
    kinds = parse_devices("--devices", devices, costs)
    planned = plan_split(costs, kinds, schedule_of(recipe))
    for reason in planned.excluded.values():
        yield f"left out: {reason}"
    best = planned.best
    generating = words(best.split.rollout) if best.split.rollout else "none of their own"
    yield (
        f"by the cost profile {name}: {best.step_seconds:.0f} s per step, devices "
        f"{best.simulated.utilisation:.0%} at work; generating {generating}, training "
        f"{words(best.split.trainer)}"
    )
    has = {kind: costs.devices[kind].memory_gib for kind in kinds}
    yield (
        f"memory: {costs.rollout.memory_gib:g} GiB to generate, {costs.variant.memory_gib:g} GiB "
        "to train; " + ", ".join(f"{kind} has {gib:g}" for kind, gib in has.items())
    )
