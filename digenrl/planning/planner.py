"""The best split of given devices, with fragment size and help: forecast all, simulate the best.

A forecast takes a fraction of a millisecond and errs by a few per cent; so every split and fragment
size is forecast, and the best are run through the simulator, which is the scheduler's own core in
virtual time; then what is near the best of them (`planning.search`). Very many devices are planned
by a part of them (`planning.symmetry`). Equal inputs give equal plans.
"""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from digenrl.planning.runnable import HostGpus, too_small, why_not
from digenrl.planning.scheduler_load import scheduler_seconds
from digenrl.planning.search import SEARCH_CPU_S, Candidate, SearchResult, run, search
from digenrl.planning.splits import excluded, fluid_splits, splits
from digenrl.planning.symmetry import RepresentativePart, part_of
from services.scheduler.core.tag.forecast import NEGLIGIBLE_GAIN
from services.scheduler.costs.capacity import fits, holds_fragments, training_role
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import Profile, Role
from services.scheduler.costs.split import Devices, Split, present, words
from services.scheduler.sim.forecast import forecast, fragment_sizes
from services.scheduler.sim.measured import SimulationResult
from shared.errors import UserError
from shared.recipe.schedule import RunSchedule

AcceptsCandidate = Callable[[Split, RunSchedule], bool]
"""(split of all devices, schedule) -> whether the recipe that is planned for takes its keys."""


@dataclass(frozen=True)
class PlannedSplit:
    """A split and how to run it, as simulated."""

    split: Split
    schedule: RunSchedule
    """Schedule of the run, which fixes its fragment size and limits the groups that the trainer
    generates."""
    forecast_seconds: float
    simulated: SimulationResult
    factor: int = 1
    """How many times fewer devices and groups were simulated."""
    scheduler_seconds: float = 0.0
    """For how long a core of the scheduler is busy with a step, which is not simulated."""

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: as simulated, or what the scheduler takes if that is more."""
        return max(self.simulated.step_seconds, self.scheduler_seconds)

    @property
    def utilisation(self) -> float:
        return self.simulated.utilisation * self.simulated.step_seconds / self.step_seconds

    @property
    def helped_groups(self) -> float:
        """Mean number of groups of a batch that the trainer generates."""
        return self.simulated.helped_groups * self.factor


@dataclass(frozen=True)
class PlanResult:
    profile: Profile
    devices: Devices
    excluded: Mapping[str, str]
    """Kinds that cannot hold the model, and why."""
    floor_seconds: float
    choices: tuple[PlannedSplit, ...]
    """The best first."""
    num_forecast: int
    """Splits and fragment sizes that were looked at."""
    host_gpus: HostGpus | None = None
    """GPUs of a host; None if choices need not fit a recipe."""

    @cached_property
    def best(self) -> PlannedSplit:
        return self.choices[0]


def plan_split(
    profile: Profile,
    devices: Devices,
    schedule: RunSchedule,
    *,
    effort: float = SEARCH_CPU_S,
    host_gpus: HostGpus | None = None,
    accepts: AcceptsCandidate | None = None,
    fluid: bool = False,
) -> PlanResult:
    """Rank splits of these devices. Open values of ``schedule`` are chosen: ``fragment_size`` None,
    ``tag`` "auto".

    Args:
        host_gpus: GPUs of a host, if splits have to be expressible in a recipe for such hosts.
            None: devices combine without hosts, as in the bounds and the emulated cluster.
        accepts: whether the planned recipe can express it, too.
        fluid: compare the modes `fluid` and `disaggregated`, where the schedule has either.

    Raises:
        UserError: for an unknown kind, or too few devices to generate and train.
    """
    left_out = excluded(profile, devices)
    part = part_of(profile, devices)
    can_say = RecipeSupport(part, host_gpus, accepts)
    modes = schedules_by_mode(schedule, fluid=fluid)
    schedule = modes.get("disaggregated", schedule)
    candidates = list_candidates(part, modes, can_say)
    if not candidates:
        raise UserError(_why_none(profile, devices, schedule, host_gpus))

    like = partial(_like, part, modes, can_say)
    results = search(part.profile, candidates, like, effort, tags=schedule.fixed_tag is None)
    best = _without_needless_help(part.profile, results[0], schedule)
    return PlanResult(
        profile=profile, devices=devices, excluded=left_out, host_gpus=host_gpus,
        floor_seconds=floor_seconds(profile, devices),
        choices=tuple(_choice(part, each) for each in (best, *results[1:])),
        num_forecast=len({(str(each.split), each.size) for each in candidates}),
    )  # fmt: skip


def _like(
    part: RepresentativePart, modes: Mapping[str, RunSchedule], support: "RecipeSupport",
    near: Candidate, split: Split, size: int, tag: int | None,
) -> Candidate | None:  # fmt: skip
    """Return the candidate that differs from ``near`` by this, if a recipe can express it."""
    wanted = part.part_of(modes[near.schedule.mode])
    if tag is not None:
        wanted = near.schedule.changed(tag=tag)
    way = support.way(split, wanted)
    if (
        way is None
        or too_small(part.profile, split, way) is not None
        or not _holds(part.profile, split, way, size)
    ):
        return None
    return _candidate(part, split, size, way)


def schedules_by_mode(schedule: RunSchedule, *, fluid: bool) -> dict[str, RunSchedule]:
    """Return the schedules that are compared, by their mode."""
    compared = ("disaggregated", "fluid")
    if fluid and schedule.mode in compared:
        return {mode: schedule.changed(mode=mode) for mode in compared}
    return {schedule.mode: schedule}


def list_candidates(
    part: RepresentativePart, modes: Mapping[str, RunSchedule], can_say: "RecipeSupport"
) -> list[Candidate]:
    """Return everything that a plan may choose from, the best forecast first."""
    return list(heapq.merge(
        *(_candidates(part, each, can_say) for each in modes.values()),
        key=lambda each: each.seconds,
    ))  # fmt: skip


def _choice(part: RepresentativePart, result: SearchResult) -> PlannedSplit:
    candidate = result.candidate
    return PlannedSplit(
        split=part.whole_split(candidate.split),
        schedule=part.whole_schedule(result.schedule),
        forecast_seconds=candidate.forecast.seconds,
        simulated=result.simulated,
        factor=part.factor,
        scheduler_seconds=candidate.scheduler_seconds,
    )


def _splits(profile: Profile, devices: Devices, schedule: RunSchedule) -> list[Split]:
    """All that are worth a look; colocated, every device that can is a member."""
    if schedule.mode == "fluid":
        return fluid_splits(profile, devices)
    if schedule.mode != "colocated":
        return splits(profile, devices)
    able = [kind for kind in present(devices) if fits(profile, kind, "member") is None]
    ranks = profile.variant.ranks
    members = present({kind: devices[kind] // ranks * ranks for kind in able})
    return [Split({}, members)] if members else []


def _candidates(
    part: RepresentativePart, schedule: RunSchedule, can_say: "RecipeSupport"
) -> list[Candidate]:
    """Every split in every fragment size, the best forecast first."""
    profile = part.profile
    ways = [
        (split, size, part.part_of(way))
        for split in _splits(profile, part.devices, schedule)
        if (way := can_say.way(split, schedule)) is not None
        for size in fragment_sizes(profile, schedule)
        if _holds(profile, split, way, size)
    ]

    candidates = [_candidate(part, split, size, way) for split, size, way in ways]
    return sorted(candidates, key=lambda each: (each.seconds, -each.size))


def _candidate(
    part: RepresentativePart, split: Split, size: int, schedule: RunSchedule
) -> Candidate:
    """Forecast a split in one fragment size, with the help that is forecast best."""
    expected = forecast(part.profile, split, size, schedule)
    chosen = with_help(part.profile, split, schedule.changed(fragment_size=size), expected.groups)
    busy = scheduler_seconds(part.profile, split, chosen, part.factor)
    return Candidate(split, size, schedule, expected, chosen, busy)


@dataclass(frozen=True, slots=True)
class RecipeSupport:
    """Decides whether a recipe can express a plan."""

    part: RepresentativePart
    host_gpus: HostGpus | None
    accepts: AcceptsCandidate | None
    _known: dict[tuple[str, RunSchedule], RunSchedule | None] = field(default_factory=dict)

    def way(self, split: Split, schedule: RunSchedule) -> RunSchedule | None:
        """Return the schedule as a recipe can express it for this split: without TAG if the choice
        is open and no recipe can have TAG. None if there is no such recipe."""
        key = str(split), schedule
        if key not in self._known:
            ways = [schedule]
            if schedule.fixed_tag is None:
                ways.append(schedule.changed(tag=0))
            whole = self.part.whole_split(split)
            self._known[key] = next((way for way in ways if self._is_said(whole, way)), None)
        return self._known[key]

    def _is_said(self, split: Split, way: RunSchedule) -> bool:
        small = why_not if self.host_gpus is not None else too_small
        if small(self.part.profile, split, way) is not None:
            return False
        return self.accepts is None or self.accepts(split, way)


def _holds(profile: Profile, split: Split, schedule: RunSchedule, size: int) -> bool:
    """Whether all devices that generate have memory for this many samples at a time."""
    roles: dict[Role, Devices] = {"rollout": split.rollout}
    if schedule.trainer_generates:
        roles[training_role(schedule)] = split.trainer
    return all(
        holds_fragments(profile, kind, role, size)
        for role, pool in roles.items()
        for kind in present(pool)
    )


def _why_none(
    profile: Profile, devices: Devices, schedule: RunSchedule, host_gpus: HostGpus | None
) -> str:
    roles: tuple[Role, Role] = ("rollout", "trainer")
    reasons = [fits(profile, kind, role) for kind in present(devices) for role in roles]
    distinct = list(dict.fromkeys(reason for reason in reasons if reason is not None))
    splits = _splits(profile, devices, schedule)
    if splits and host_gpus is not None:
        reason = why_not(profile, splits[0], schedule)
        return f"no recipe says a split of {words(devices)}: {reason or 'fragments do not fit'}"
    if not distinct:
        return "one device cannot be split into rollout and trainer; give at least two"
    return f"no split of {words(devices)} can both generate and train: {'; '.join(distinct)}"


def with_help(profile: Profile, split: Split, schedule: RunSchedule, groups: int) -> RunSchedule:
    """Give the trainer as many groups as are forecast best, if the schedule leaves it open."""
    if schedule.fixed_tag is not None:
        return schedule
    if schedule.staleness_limit and sum(split.trainer.values()) == profile.variant.ranks:
        # A switch costs nothing and work is never short: it helps whenever it waits.
        groups = profile.shape.groups
    return schedule.changed(tag=groups)


def _without_needless_help(
    profile: Profile, best: SearchResult, schedule: RunSchedule
) -> SearchResult:
    """The same split without help, if the trainer found little to do and that is as good."""
    may_help = schedule.fixed_tag is None and best.schedule.trainer_generates
    if not may_help or best.simulated.helped_groups >= 1:
        return best
    chosen = best.schedule.changed(tag=0)
    off = replace(best, schedule=chosen, simulated=run(profile, best.candidate, chosen))
    return off if off.seconds <= best.seconds * (1 + NEGLIGIBLE_GAIN) else best
