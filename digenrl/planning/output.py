"""Prints plans: tables for people, JSON for programs."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from digenrl.planning.hosts import HostPlacement, commands, place, trains_where
from digenrl.planning.placements import PlacementAdvice
from digenrl.planning.plan import advised_keys
from digenrl.planning.planner import PlannedSplit
from digenrl.planning.runnable import HostGpus, as_toml
from digenrl.planning.work import sample_seconds, seconds_words
from services.scheduler.costs.devices import notes
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.split import Devices, words
from shared.recipe.schedule import RunSchedule

MIN_TABLE_WIDTH = 120
"""Width of the narrowest table in columns: wrapped lines can be read, cut ones cannot."""
MIN_REPORTED_SHARE = 0.5
"""Share of a step from which the scheduler's own seconds are reported."""
MAX_SHOWN_CHOICES = 5
"""Number of choices in the table; the JSON has all that were simulated."""


def wide_console() -> Console:
    console = Console()
    return Console(width=max(MIN_TABLE_WIDTH, console.width))


def show_plan(advice: PlacementAdvice, console: Console) -> None:
    planned = advice.planned
    show_head(planned.profile, planned.devices, planned.floor_seconds, console)
    for line in (*advice.reasons, *(f"left out: {each}" for each in advice.left_out)):
        console.print(line, highlight=False, soft_wrap=True)
    table = text_table("mode", "rollout", "trainer", "fragment", "TAG", "stale", "s/step", "util.")
    for choice in _shown(planned.choices):
        where = trains_where(_placed(advice, choice))
        table.add_row(
            choice.schedule.mode,
            words(choice.split.rollout),
            words(choice.split.trainer) + (where and f" ({where})"),
            str(choice.schedule.fixed_fragment or "auto"),
            _help_words(choice),
            str(choice.schedule.staleness_limit),
            seconds_words(choice.step_seconds),
            f"{choice.utilisation:.0%}",
        )
    console.print(table)
    for site in advice.sites:
        console.print(str(site), highlight=False, soft_wrap=True)
    console.print("to write into a recipe, in the same order:")
    for choice in _shown(planned.choices):
        text = as_toml(_keys(advice, choice)) + _environment(advice, choice)
        console.print(f"  {text}", highlight=False, soft_wrap=True)
    for hosts, command in alike_hosts(_commands(advice, planned.best)):
        console.print(f"on {hosts}: {command}", highlight=False, soft_wrap=True)
    looked, simulated = planned.num_forecast, len(planned.choices)
    part = (
        f" with a {planned.best.factor}th of devices and groups" if planned.best.factor > 1 else ""
    )
    console.print(f"{looked} ways forecast, the best {simulated} simulated{part}")
    busy = planned.best.scheduler_seconds
    if busy > MIN_REPORTED_SHARE * planned.best.step_seconds:
        console.print(
            f"the scheduler itself takes about {seconds_words(busy)} s of a core for such a step, "
            "which lasts no less; larger fragments or groups are fewer results"
        )


def alike_hosts(commands: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield hosts and what is typed there: more than two with the same command together."""
    for command, alike in groupby(commands, key=lambda pair: pair[1]):
        hosts = [host for host, _ in alike]
        names = hosts if len(hosts) < 3 else [f"each of {hosts[0]} to {hosts[-1]}"]
        yield from ((name, command) for name in names)


def plan_fields(advice: PlacementAdvice) -> dict[str, Any]:
    """Return the content of a plan, for programs."""
    planned, placement = advice.planned, advice.placement
    return {
        **head_fields(planned.profile, planned.devices, planned.floor_seconds),
        "excluded": dict(planned.excluded),
        "left_out": list(advice.left_out),
        "reasons": list(advice.reasons),
        "sites": [site.fields() for site in advice.sites],
        "forecast": planned.num_forecast,
        "hosts": None if advice.hosts is None else str(advice.hosts),
        "host_gpus": _largest_host(planned.host_gpus),
        "seconds_per_sample": sample_seconds(planned.profile),
        "choices": [
            {
                **_choice(choice),
                "recipe": _keys(advice, choice),
                "environment": placement.environment(choice.split),
                "simulated_part": choice.factor,
                "placed": [
                    {"host": each.name, "kind": each.kind, "gpus": each.gpus,
                     "trains": each.trains, "generates": each.generates}
                    for each in _placed(advice, choice)
                ],
                "commands": dict(_commands(advice, choice)),
            }
            for choice in planned.choices
        ],
    }  # fmt: skip


def _shown(choices: Sequence[PlannedSplit]) -> list[PlannedSplit]:
    """Return the choices of the table: the best, and the best of each mode that was compared."""
    first = {choice.schedule.mode: choice for choice in reversed(choices)}
    missing = [c for c in first.values() if c not in choices[:MAX_SHOWN_CHOICES]]
    return [*choices[: MAX_SHOWN_CHOICES - len(missing)], *missing]


def show_head(profile: Profile, devices: Devices, floor: float, console: Console) -> None:
    """Print what is planned or simulated, and the bound that no split beats."""
    shape = profile.shape
    console.print(
        f"{profile.name}: {shape.groups} groups x {shape.group_size}, {shape.steps} steps, "
        f"{shape.trained_steps} trained, on {words(devices)}"
    )
    console.print(f"bound {seconds_words(floor)} s/step")
    for line in notes(profile.devices, devices):
        console.print(line, highlight=False, soft_wrap=True)


def text_table(*columns: str, wrap: bool = False) -> Table:
    """Make a table without lines, of these columns."""
    return Table(*(Column(name, no_wrap=not wrap) for name in columns), box=None, pad_edge=False)


def head_fields(profile: Profile, devices: Devices, floor: float) -> dict[str, Any]:
    """Return what is planned or simulated, for programs."""
    return {
        "profile": profile.name,
        "shape": profile.shape.model_dump(),
        "devices": dict(devices),
        "bound_seconds": finite(floor),
    }


def _choice(choice: PlannedSplit) -> dict[str, Any]:
    return {
        "rollout": dict(choice.split.rollout),
        "trainer": dict(choice.split.trainer),
        **schedule_fields(choice.schedule),
        "helped_groups": round(choice.helped_groups, 2),
        "step_seconds": round(choice.step_seconds, 3),
        "forecast_seconds": round(choice.forecast_seconds, 3),
        "scheduler_seconds": round(choice.scheduler_seconds, 3),
        "utilisation": round(choice.utilisation, 4),
    }


def _keys(advice: PlacementAdvice, choice: PlannedSplit) -> dict[str, Any]:
    return advised_keys(advice.placement, choice.split, choice.schedule, advice.recipe)


def _commands(advice: PlacementAdvice, choice: PlannedSplit) -> list[tuple[str, str]]:
    """Return host -> the command that starts what runs on it; nothing where hosts are unknown."""
    if advice.hosts is None:
        return []
    keys, recipe = _keys(advice, choice), advice.recipe
    if recipe is not None:
        keys.setdefault("encoder.workers", recipe.encoder.workers)
    return commands(
        _placed(advice, choice), keys, recipe="RECIPE",
        environment=advice.placement.environment(choice.split),
    )  # fmt: skip


def _placed(advice: PlacementAdvice, choice: PlannedSplit) -> list[HostPlacement]:
    """Return what runs where; nothing where hosts are unknown."""
    ranks = advice.planned.profile.variant.ranks
    return [] if advice.hosts is None else place(advice.hosts, choice.split, ranks)


def _largest_host(host_gpus: HostGpus | None) -> int | None:
    if host_gpus is None or isinstance(host_gpus, int):
        return host_gpus
    return max(host_gpus.values())


def _environment(advice: PlacementAdvice, choice: PlannedSplit) -> str:
    """Format the variables that workers on some kinds of device need."""
    return "".join(
        f"; in the environment of {kind} workers: {name}={value}"
        for kind, variables in advice.placement.environment(choice.split).items()
        for name, value in variables.items()
    )


def schedule_fields(schedule: RunSchedule) -> dict[str, Any]:
    """Return a schedule, for programs."""
    return {
        "mode": schedule.mode,
        "fragment_size": schedule.fixed_fragment or "auto",
        "tsp": schedule.tsp,
        "tag_groups": schedule.tag,
        "max_staleness": schedule.staleness_limit,
    }


def _help_words(choice: PlannedSplit) -> str:
    """Format the groups that the trainer generates on average and at most."""
    most = choice.schedule.fixed_tag
    return "off" if most == 0 else f"{choice.helped_groups:.0f}/{choice.schedule.tag}"


def finite(value: float) -> float | None:
    """Round seconds for JSON, which has no infinity."""
    return None if math.isinf(value) else round(value, 4)
