"""Reads devices from the command line, and finds their fastest split for ``digenrl plan``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from digenrl.planning.hosts import (
    Hosts,
    add_kinds,
    check_host_memory,
    host_memory_line,
    parse_hosts,
)
from digenrl.planning.placements import ModelPlacement, PlacementAdvice, advise
from digenrl.planning.recipes import ahead_by, model_use, with_staleness
from digenrl.planning.runnable import recipe_keys
from digenrl.planning.sites import advise_sites, parse_sites
from digenrl.planning.work import work_line
from digenrl.trace.memory import FIGURES_BYTES, ModelUse, usual
from services.scheduler.costs.devices import kind_named
from services.scheduler.costs.host import parse_host_costs
from services.scheduler.costs.profile import Profile, VariantName, load_profile, profile_names
from services.scheduler.costs.recipes import recipe_costs
from services.scheduler.costs.split import Split
from services.scheduler.sim.staleness import decide_by_seconds
from services.scheduler.sim.staleness import line as staleness_line
from shared.errors import UserError
from shared.models.memory import num_weights
from shared.recipe.recipe import Recipe, override
from shared.recipe.schedule import RunSchedule

GIB = 2**30


def given_pool(devices: str | None, hosts: str | None) -> tuple[str, str] | None:
    """Return the option by which the pool is given, and its text; None if it is not.

    Raises:
        UserError: if both are given.
    """
    if devices is not None and hosts is not None:
        raise UserError("--hosts: give the pool by --hosts or by --devices, not by both")
    if hosts is not None:
        return "--hosts", hosts
    return None if devices is None else ("--devices", devices)


def parse_kinds(option: str, text: str, devices: Mapping[str, int]) -> tuple[str, ...]:
    """Parse ``4090,l40s`` into names of the devices.

    Raises:
        UserError: if one is not among them.
    """
    kinds = []
    for part in text.split(","):
        kind = kind_named(devices, part)
        if kind is None:
            raise UserError(f"{option}: {part.strip()!r} is not among {', '.join(devices)}")
        kinds.append(kind)
    return tuple(kinds)


def plan(
    recipe: Recipe | None, devices: str | None, *,
    profile: str | None, staleness: Literal[0, 1] | None, host_gpus: int,
    hosts: str | None = None, host_memory: str | None = None,
    variant: VariantName = "lora", launch_us: str | None = None, sites: Sequence[str] = (),
) -> PlacementAdvice:  # fmt: skip
    """Plan for hosts, which have ``host_gpus`` GPUs each where only devices are counted; only plans
    that a recipe can express count, with what small devices need to take part. The modes
    `fluid` and `disaggregated` are compared where the recipe can have both.

    Raises:
        UserError: names the option and the remedy.
    """
    pool = given_pool(devices, hosts)
    if pool is None:
        raise UserError("--hosts: name the GPUs, e.g. h100x8*4, or --devices h100=32")
    if recipe is None:
        costs, use = _profile_alone(profile, variant)
        schedule = with_staleness(RunSchedule(), staleness)
    else:
        schedule = with_staleness(recipe.run_schedule, staleness)
        costs, use = costs_and_use(ahead_by(recipe, staleness), profile)
    costs = with_host(add_kinds(" ".join([pool[1], *sites]), costs), launch_us)
    far = parse_sites(sites, costs)
    given = parse_hosts(*pool, costs, host_gpus=host_gpus, host_memory=host_memory)
    advised = partial(
        advise, costs, use, given.devices, host_gpus=given.gpus, fluid=True,
        accepts=partial(accepts, recipe, given),
    )  # fmt: skip
    if recipe is None:
        if far:
            raise UserError("--site: give a recipe, from which the bytes of a sample follow")
        return _placed(advised(schedule), given)
    if staleness is None and recipe.schedule.max_staleness == "auto":
        found = _with_decision(advised, schedule)
    else:
        found = advised(schedule)
    advice = advise_sites(found.planned, recipe, far) if far else ()
    found = _placed(replace(found, recipe=recipe, sites=advice), given)
    return replace(found, reasons=(work_line(costs, recipe), *found.reasons))


def _profile_alone(profile: str | None, variant: VariantName) -> tuple[Profile, ModelUse | None]:
    if profile is None:
        raise UserError("give a recipe, or --profile; known are " + ", ".join(profile_names()))
    costs = load_profile(profile, variant)
    use = None if costs.memory is None else usual(costs.memory)
    return costs, replace(use, rank=0) if use is not None and variant == "full" else use


def _placed(advice: PlacementAdvice, hosts: Hosts) -> PlacementAdvice:
    """Return the advice with where its devices are, and what it needs of their hosts."""
    line = host_memory_line(advice.planned.profile, hosts, advice.planned.best.split)
    return replace(
        advice, hosts=hosts, reasons=advice.reasons if line is None else (*advice.reasons, line)
    )


def advised_keys(
    placement: ModelPlacement, split: Split, schedule: RunSchedule, recipe: Recipe | None
) -> dict[str, Any]:
    """Return what to write into a recipe for a row of a plan."""
    keys = recipe_keys(split, schedule, recipe=recipe)
    return {**keys, **placement.recipe_keys(split, schedule)}


def accepts(
    recipe: Recipe | None,
    hosts: Hosts,
    placement: ModelPlacement,
    split: Split,
    schedule: RunSchedule,
) -> bool:
    """Whether the recipe with the keys of such a row is one, whose hosts hold what streams."""
    try:
        check_host_memory(placement.profile, hosts, split)
        if recipe is not None:
            override(recipe, advised_keys(placement, split, schedule, recipe))
    except UserError:
        return False
    return True


def _with_decision(
    advised: Callable[[RunSchedule], PlacementAdvice], schedule: RunSchedule
) -> PlacementAdvice:
    """Return the better of the two advices for "auto", with the reason."""
    if schedule.mode != "disaggregated":
        return advised(schedule)
    strict, ahead = (advised(schedule.changed(max_staleness=each)) for each in (0, 1))
    decision = decide_by_seconds(
        strict.planned.best.step_seconds,
        ahead.planned.best.step_seconds,
        by="the best plans with it and without",
    )
    chosen = ahead if decision.max_staleness else strict
    return replace(chosen, reasons=(*chosen.reasons, staleness_line(decision)))


def costs_and_use(
    recipe: Recipe, profile: str | None, *, fragment: int = 1
) -> tuple[Profile, ModelUse]:
    """Return the profile's costs for this recipe's batch, model and shape, and what memory depends
    on.

    ``fragment``: samples per fragment, which decide the memory.

    Raises:
        UserError: if there is no such profile.
    """
    costs = with_weights(recipe_costs(recipe, profile), recipe.model.folder)
    return costs, model_use(recipe, costs, fragment=fragment)


def with_host(profile: Profile, launch_us: str | None) -> Profile:
    """Return the profile with hosts that launch a kernel in this many microseconds, if given."""
    if launch_us is None:
        return profile
    return profile.model_copy(update={"host": parse_host_costs("--launch-us", launch_us)})


def with_weights(profile: Profile, folder: Path) -> Profile:
    """Return the profile with the sizes of the local model, if there is one."""
    if profile.memory is None or not (folder / "model_index.json").is_file():
        return profile
    sizes = {
        "network_gib": num_weights(folder, "transformer") * FIGURES_BYTES / GIB,
        "text_gib": num_weights(folder, "text") * FIGURES_BYTES / GIB,
        "decoder_gib": num_weights(folder, "decoder") * 4 / GIB,
    }
    known_sizes = {name: gib for name, gib in sizes.items() if gib}
    if "network_gib" in known_sizes:
        ratio = known_sizes["network_gib"] / profile.memory.network_gib
        known_sizes["streamed_gib"] = ratio * profile.memory.streamed_gib
        known_sizes["linear_gib"] = ratio * profile.memory.linear_gib
    return profile.model_copy(update={"memory": profile.memory.model_copy(update=known_sizes)})
