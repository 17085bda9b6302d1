"""`digenrl check`: whether a recipe can run, and what it takes on devices that one may have."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from digenrl.local.preflight import check_inputs, check_rest, versions_bytes
from digenrl.planning.forecast import Forecast, as_plain, forecast, lines
from services.scheduler.planning.runnable import HOST_GPUS
from shared.errors import UserError
from shared.recipe.implied import implied_values
from shared.recipe.recipe import Recipe, load_recipe


@dataclass(frozen=True)
class Checked:
    """A recipe that can run."""

    path: Path
    recipe: Recipe
    elsewhere: bool
    """Whether the model and the rewards are on other hosts, and were not looked for here."""
    forecast: Forecast | None
    """On the devices that were given."""

    @cached_property
    def lines(self) -> list[str]:
        """What there is to say."""
        return list(_said(self))

    @property
    def as_json(self) -> str:
        return json.dumps({
            "recipe": str(self.path),
            "ok": True,
            "said": self.lines,
            "implied": [
                {"key": each.key, "implied": each.implied, "value": each.value}
                for each in implied_values(self.recipe)
            ],
            "forecast": None if self.forecast is None else as_plain(self.forecast),
        }, indent=2)  # fmt: skip


def check(
    path: Path,
    devices: str | None = None,
    profile: str | None = None,
    *,
    host_gpus: int = HOST_GPUS,
    elsewhere: bool = False,
    timing: bool = True,
) -> Checked:
    """Look at everything that a run would stumble over at its start.

    Args:
        devices: as ``h100=8,a100=16``; without any, nothing is forecast.
        profile: its name; by default the one that is named like the model.
        host_gpus: of each host.
        elsewhere: do not look for the model and the rewards here.
        timing: forecast seconds, and look for a faster split; without it, memory only.

    Raises:
        UserError: the first thing that is wrong, and its remedy.
    """
    recipe = load_recipe(path)
    if elsewhere:
        check_rest(recipe, elsewhere=True)
    else:
        check_here(recipe)
        check_inputs(recipe)
    found = None
    if devices is not None:
        found = forecast(recipe, devices, profile, host_gpus=host_gpus, timing=timing)
    return Checked(path, recipe, elsewhere, found)


def failed_as_json(path: Path, error: UserError) -> str:
    return json.dumps({"recipe": str(path), "ok": False, "error": str(error)}, indent=2)


def check_here(recipe: Recipe) -> None:
    """Raises UserError, which says how to get on, if the model's folder is not on this host."""
    folder = recipe.model.folder
    if not folder.is_dir():
        raise UserError(
            f"model.folder: {folder} is not here; put the model there as a diffusers folder (an "
            "id of a hub is not read), or check the rest with --elsewhere"
        )


def _said(checked: Checked) -> Iterator[str]:
    recipe, batch = checked.recipe, checked.recipe.batch
    yield (
        f"{checked.path}: {recipe.run.steps} steps of {batch.groups} groups x {batch.group_size} "
        f"samples in fragments of {recipe.schedule.fragment_size}"
    )
    if not checked.elsewhere:
        gib = versions_bytes(recipe) / (1 << 30)
        yield f"the object store holds up to {gib:.1f} GiB of weights and checkpoints at once"
    if checked.elsewhere:
        yield "the model and the rewards were not looked for: they are on other hosts"
    if checked.forecast is not None:
        yield from lines(checked.forecast)
    for each in implied_values(recipe):
        has = f"; the recipe sets {json.dumps(each.value)}" if each.is_overridden else ""
        yield f"{recipe.algorithm.name} implies {each.key} = {json.dumps(each.implied)}{has}"
