"""Simulates one split of the devices, for ``digenrl sim``."""

from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from digenrl.planning.devices import parse_devices
from digenrl.planning.output import Comparison
from services.scheduler.costs.colocated import colocated_seconds
from services.scheduler.costs.profile import Profile, VariantName, load_profile
from services.scheduler.planning.lookahead import look_ahead
from services.scheduler.planning.planner import BASELINES
from services.scheduler.planning.recipes import with_staleness
from services.scheduler.planning.splits import Split
from services.scheduler.planning.techniques import Technique, compare
from services.scheduler.sim.profiled import simulate
from shared.errors import UserError
from shared.recipe.errors import describe
from shared.recipe.schedule import RunSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """Holds the options of ``digenrl sim`` as they were typed."""

    profile: str
    variant: VariantName
    rollout: str
    trainer: str
    mode: str
    staleness: Literal[0, 1]
    tag: str
    fragment_size: str
    tsp: bool
    batches: int
    seed: int


def simulated(request: SimRequest, *, comparing: bool) -> Comparison:
    """Simulate one configuration, or with ``comparing`` each technique in turn.

    Raises:
        UserError: names the option and the remedy.
    """
    profile = load_profile(request.profile, request.variant)
    split = Split(
        parse_devices("--rollout", request.rollout, profile),
        parse_devices("--trainer", request.trainer, profile),
    )
    schedule = _schedule_of(request, profile)
    if comparing:
        rows = compare(
            profile,
            split,
            fragment_size=schedule.fixed_fragment,
            batches=request.batches,
            seed=request.seed,
        )
    else:
        found = simulate(
            profile,
            rollout=split.rollout,
            trainer=split.trainer,
            schedule=schedule,
            batches=request.batches,
            seed=request.seed,
            look_ahead=look_ahead,
        )
        rows = [Technique(request.mode, schedule, found)]
    colocated = {each: colocated_seconds(profile, split.devices, each) for each in BASELINES}
    return Comparison(profile, split, colocated, tuple(rows))


def _schedule_of(request: SimRequest, profile: Profile) -> RunSchedule:
    size = _number("--fragment-size", request.fragment_size, ("auto",))
    group = profile.shape.group_size
    if size is not None and (size == 0 or group % size):
        sizes = ", ".join(str(n) for n in range(1, group + 1) if group % n == 0)
        raise UserError(f"--fragment-size: {size} does not divide the group; these do: {sizes}")
    groups = _number("--tag", request.tag, ("auto", "off"))
    if groups is not None and groups > profile.shape.groups:
        raise UserError(f"--tag: {groups} groups of {profile.shape.groups}; at most all of them")
    if request.batches < 1:
        raise UserError("--batches: at least 1")
    keys = {
        "mode": request.mode,
        "fragment_size": size or "auto",
        "tsp_steps": "auto" if request.tsp else 1,
        "tag": request.tag if groups is None else groups,
    }
    try:
        schedule = RunSchedule.model_validate(keys)
    except ValidationError as error:
        raise UserError(f"--{describe(error, RunSchedule)}") from error
    if schedule.mode == "colocated":
        raise UserError("--mode: colocated has no split; the output says what that takes")
    if profile.variant.sharded and schedule.lends_trainer:
        if schedule.fixed_tag:
            raise UserError("--tag: ranks that share their weights are not lent; use off")
        schedule = schedule.changed(tag=0)
    return with_staleness(schedule, request.staleness)


def _number(option: str, text: str, words: tuple[str, ...]) -> int | None:
    """Parse a number; returns None for one of ``words``."""
    if text in words:
        return None
    if not text.isdecimal():
        raise UserError(f"{option}: {text!r} is neither a number nor {' nor '.join(words)}")
    return int(text)
