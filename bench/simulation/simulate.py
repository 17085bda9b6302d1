"""Simulates one split of the devices, for ``python -m bench sim``."""

from dataclasses import replace
from typing import Literal

from pydantic import ValidationError

from bench.devices import parse_devices
from bench.simulation.colocated import BASELINES, colocated_seconds
from bench.simulation.figures import simulate
from bench.simulation.output import Comparison
from bench.simulation.techniques import Technique, compare
from digenrl.planning.hosts import add_kinds
from digenrl.planning.plan import with_host
from digenrl.planning.recipes import with_staleness
from digenrl.trace.memory import usual, with_memory
from services.scheduler.costs.profile import Profile, VariantName, load_profile
from services.scheduler.costs.split import Split
from shared.errors import UserError
from shared.recipe.recipe_errors import describe
from shared.recipe.schedule import RunSchedule


def simulated(
    *,
    profile: str,
    variant: VariantName,
    shard_devices: int | None,
    rollout: str,
    trainer: str,
    schedule: RunSchedule,
    batches: int,
    seed: int,
    comparing: bool,
    launch_us: str | None = None,
) -> Comparison:
    """Simulate one configuration, or with ``comparing`` each technique in turn.

    Raises:
        UserError: names the option and the remedy.
    """
    costs = add_kinds(f"{rollout},{trainer}", load_profile(profile, variant))
    costs = with_host(costs, launch_us)
    if costs.memory is not None and variant == "full":
        ranks = shard_devices or costs.variant.ranks
        costs = with_memory(costs, replace(usual(costs.memory), rank=0, ranks=ranks))
    if schedule.mode == "fluid" and comparing:
        raise UserError("--compare: adds one technique after the other; leave out --mode fluid")
    alone = schedule.mode == "fluid" and rollout == "none"
    split = Split(
        {} if alone else parse_devices("--rollout", rollout, costs),
        parse_devices("--trainer", trainer, costs),
    )
    fitted = _fitted(schedule, costs)
    if batches < 1:
        raise UserError("--batches: at least 1")
    if comparing:
        size = fitted.fixed_fragment
        rows = compare(costs, split, fragment_size=size, batches=batches, seed=seed)
    else:
        found = simulate(
            costs,
            rollout=split.rollout,
            trainer=split.trainer,
            schedule=fitted,
            batches=batches,
            seed=seed,
        )
        rows = [Technique(fitted.mode, fitted, found)]
    colocated = {each: colocated_seconds(costs, split.devices, each) for each in BASELINES}
    return Comparison(costs, split, colocated, tuple(rows))


def typed_schedule(
    *, mode: str, staleness: Literal[0, 1] | None, tag: str, fragment_size: str, tsp: bool
) -> RunSchedule:
    """Return the schedule that these options say.

    Raises:
        UserError: names the option and the remedy.
    """
    keys = {
        "mode": mode,
        "fragment_size": _number("--fragment-size", fragment_size, ("auto",)),
        "tsp_steps": "auto" if tsp else 1,
        "tag": _number("--tag", tag, ("auto", "off")),
    }
    try:
        schedule = RunSchedule.model_validate(keys)
    except ValidationError as error:
        faults = (each.replace("_", "-") for each in describe(error, RunSchedule))
        raise UserError("\n".join(f"--{each}" for each in faults)) from error
    if schedule.mode == "colocated":
        raise UserError("--mode: colocated has no split; the output says what that takes")
    return with_staleness(schedule, staleness)


def _fitted(schedule: RunSchedule, profile: Profile) -> RunSchedule:
    """Return the schedule as the profile's batch and trainer take it."""
    size, group = schedule.fixed_fragment, profile.shape.group_size
    if size is not None and group % size:
        sizes = ", ".join(str(n) for n in range(1, group + 1) if group % n == 0)
        raise UserError(f"--fragment-size: {size} does not divide the group; these do: {sizes}")
    groups = schedule.fixed_tag or 0
    if groups > profile.shape.groups:
        raise UserError(f"--tag: {groups} groups of {profile.shape.groups}; at most all of them")
    return schedule


def _number(option: str, text: str, words: tuple[str, ...]) -> int | str:
    """Parse a number, or one of ``words``."""
    if text in words:
        return text
    if not text.isdecimal():
        raise UserError(f"{option}: {text!r} is neither a number nor {' nor '.join(words)}")
    return int(text)
