"""Whatever a plan may advise is a recipe that `digenrl check` accepts on those hosts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import gcd
from pathlib import Path
from typing import Literal

import pytest

from bench.cluster.session import opened, run
from bench.cluster.setting import BATCH_S, Setting
from digenrl.local.checking.check import check
from digenrl.planning.hosts import Hosts, parse_hosts
from digenrl.planning.placements import ModelPlacement, placements
from digenrl.planning.plan import accepts, advised_keys, costs_and_use
from digenrl.planning.planner import RecipeSupport, list_candidates, schedules_by_mode
from digenrl.planning.recipes import ahead_by
from digenrl.planning.runnable import as_toml
from digenrl.planning.search import Candidate
from digenrl.planning.symmetry import part_of
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import load_profile
from shared.errors import UserError
from shared.models.published import PUBLISHED
from shared.recipe.recipe import Recipe, load_recipe
from tests.paths import RECIPES

MODELS = ("sd35-medium", "flux1-dev", "wan2.1-14b", "hunyuanvideo", "qwen-image")
POOLS = (
    "h100x8", "h100x8*4", "h100x8*2+a100x8*2", "h100x8+l40sx8*2", "4090x4*2", "a100x8*8",
)  # fmt: skip
RUN = (
    ("flux1-dev", "h100x8"), ("wan2.1-14b", "h100x8*4"), ("flux1-dev", "h100x8*2+a100x8*2"),
    ("qwen-image", "h100x8+l40sx8*2"), ("hunyuanvideo", "a100x8*8"),
)  # fmt: skip
"""Each pool once, but that of 4090s: they hold SD3.5-M alone, which the emulated cluster does not
know."""
ALL = 10**6
MEMORY = "h100=2048,a100=2048,l40s=1024,4090=512"
"""GiB of the hosts of each kind."""


def recipe_of(model: str, keys: str, folder: Path) -> Path:
    """Write a recipe whose model has configuration files only."""
    path = folder / f"{model}.toml"
    path.write_text(
        f'base = "{RECIPES / model}.toml"\nmodel.folder = "{PUBLISHED / model}"\n{keys}'
    )
    return path


def rows_of(
    recipe: Recipe, model: str, pool: str, staleness: Literal[0, 1]
) -> list[tuple[Hosts, ModelPlacement, Candidate]]:
    """Everything that a plan for these hosts chooses from."""
    costs, use = costs_and_use(ahead_by(recipe, staleness), model)
    hosts = parse_hosts("--hosts", pool, costs, host_gpus=8)
    schedule = recipe.run_schedule.changed(max_staleness=staleness)
    found = []
    for placement in placements(costs, use, hosts.devices):
        part = part_of(placement.profile, hosts.devices)
        can_say = RecipeSupport(part, hosts.gpus, partial(accepts, recipe, hosts, placement))
        for each in list_candidates(part, schedules_by_mode(schedule, fluid=True), can_say):
            whole = part.whole_split(each.split)
            found.append((hosts, placement, replace(each, split=whole)))
    return found


def spread(rows: Sequence[tuple[Hosts, ModelPlacement, Candidate]], number: int) -> list[int]:
    """Places of the best row of each mode and of so many others."""
    first: dict[str, int] = {}
    for place, (_, _, each) in enumerate(rows):
        first.setdefault(each.chosen.mode, place)
    step = max(1, len(rows) // number)
    return sorted({*first.values(), *range(0, len(rows), step)})


def holds(model: str, pool: str) -> bool:
    """Whether each device of a pool holds a model: 4090s hold SD3.5-M alone, others in groups."""
    return "4090" not in pool or model == "sd35-medium"


def refused(
    model: str, pool: str, staleness: Literal[0, 1], number: int, folder: Path
) -> list[str]:
    """Rows that `digenrl check` refuses, and why."""
    path = recipe_of(model, "", folder)
    recipe = load_recipe(path)
    rows, found = rows_of(recipe, model, pool, staleness), []
    assert rows or not holds(model, pool)
    for place in spread(rows, number):
        _, placement, each = rows[place]
        keys = advised_keys(placement, each.split, each.chosen, recipe)
        said = as_toml(keys).replace(", ", "\n")
        typed = folder / "row.toml"
        typed.write_text(f'base = "{path}"\n{said}\n')
        streamed = ",".join(placement.environment(each.split)) or None
        try:
            check(
                typed, hosts=pool, host_memory=MEMORY, streamed=streamed, elsewhere=True,
                timing=False,
            )  # fmt: skip
        except UserError as error:
            found.append(f"{each.split} in {each.size}: {said}: {error}")
    return found


def test_a_sample_of_rows_is_accepted(tmp_path: Path) -> None:
    assert refused("qwen-image", "h100x8*2+a100x8*2", 0, 8, tmp_path) == []
    assert refused("hunyuanvideo", "h100x8+l40sx8*2", 1, 8, tmp_path) == []
    assert refused("sd35-medium", "4090x4*2", 0, 8, tmp_path) == []


def test_what_a_recipe_cannot_say_is_no_row(tmp_path: Path) -> None:
    """Both modes can have two updates of a batch."""
    path = recipe_of("flux1-dev", "[trainer]\nupdates = 2\n", tmp_path)
    recipe = load_recipe(path)
    rows = rows_of(recipe, "flux1-dev", "h100x8*2", 0)
    assert {each.chosen.mode for _, _, each in rows} == {"disaggregated", "fluid"}
    assert refused("flux1-dev", "h100x8*2", 0, 4, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("model", MODELS)
def test_every_row_of_a_plan_is_accepted(model: str, pool: str, tmp_path: Path) -> None:
    for staleness in (0, 1):
        assert refused(model, pool, staleness, ALL, tmp_path) == []


def test_all_weights_are_planned_in_groups_of_every_size_that_fits(tmp_path: Path) -> None:
    """Of four, they only train; a rank of eight holds the whole network as well."""
    path = recipe_of("flux1-dev", 'model.trained = "full"\n', tmp_path)
    rows = rows_of(load_recipe(path), "flux1-dev", "h100x8*4", 0)
    ways = {(placement.profile.variant.ranks, each.chosen.mode) for _, placement, each in rows}
    assert ways == {(4, "disaggregated"), (8, "disaggregated"), (8, "fluid")}
    assert all(each.chosen.tag == 0 for _, p, each in rows if p.profile.variant.ranks == 4)


@pytest.mark.night
@pytest.mark.run
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["fluid", "disaggregated"])
@pytest.mark.parametrize("model, pool", RUN)
async def test_the_best_rows_run_with_services(
    model: str, pool: str, mode: str, tmp_path: Path
) -> None:
    """One batch of the best row."""
    rows = rows_of(load_recipe(recipe_of(model, "", tmp_path)), model, pool, 0)
    hosts, placement, best = next(
        (hosts, placement, each) for hosts, placement, each in rows if each.chosen.mode == mode
    )
    profile = load_profile(model)
    setting = Setting(
        run="row", profile=model, rollout=dict(best.split.rollout),
        trainer=dict(best.split.trainer), steps=2,
        scale=max(1.0, floor_seconds(profile, hosts.devices) / BATCH_S),
        # The emulated batch is that of the profile, whose groups may be of another size.
        schedule=best.chosen.changed(fragment_size=gcd(best.size, profile.shape.group_size)),
        streamed=tuple(placement.environment(best.split)),
    )  # fmt: skip
    async with opened(tmp_path / "bench") as session:
        found = await run(session, setting, 1, 2, lambda _: None)
    assert len(found.commits) == 3
    everybody = {each.device for each in found.intervals}
    assert len(everybody) == sum(best.split.rollout.values()) + sum(best.split.trainer.values())
