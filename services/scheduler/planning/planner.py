"""The best split of given devices, with fragment size and help: forecast all, simulate the best.

A forecast takes a fraction of a millisecond and errs by a few per cent; so every split and fragment
size is forecast, and the best are run through the simulator, which is the scheduler's own core in
virtual time, until an effort is spent that does not depend on the machine. Equal inputs give equal
plans.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

from services.scheduler.costs.colocated import Baseline, colocated_seconds
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import Profile, Role, fits, holds_fragments
from services.scheduler.planning.forecast import NEGLIGIBLE_GAIN, Forecast, forecast
from services.scheduler.planning.runnable import why_not
from services.scheduler.planning.splits import Devices, Split, excluded, splits, words
from services.scheduler.sim.measured import Simulated
from services.scheduler.sim.profiled import has_independent_devices, simulate, warm_up_of
from shared.errors import UserError
from shared.messages.contracts import MAX_FRAGMENTS_PER_GROUP
from shared.recipe.schedule import RunSchedule

BASELINES: tuple[Baseline, ...] = ("2026-06", "batched", "tuned")
EFFORT = 200_000
"""Simulated fragments, each weighted with what it costs: about 1.5 s on a core of 2024."""
MAX_SIMULATED = 16
HOPELESS = 1.1
"""Forecast over the best simulated: more than forecasts err."""
SIZES_PER_SPLIT = 2
"""Number of best fragment sizes that are simulated for each split."""
BATCHES_STRICT, BATCHES_ONE_STEP = 3, 6
"""Measured batches of a simulation. One-step asynchrony with help goes in pairs: in one batch the
trainer helps, in the next there is nothing left to help with."""
HELPERS_COST = 4
"""Effort of a device that may compute gradients, over one that only generates."""
SEED = 0


@dataclass(frozen=True)
class Choice:
    """A split and how to run it, as simulated."""

    split: Split
    schedule: RunSchedule
    """Schedule of the run, which fixes its fragment size and limits the groups that the trainer
    generates."""
    forecast_seconds: float
    simulated: Simulated
    colocated: Mapping[Baseline, float]

    @property
    def step_seconds(self) -> float:
        return self.simulated.step_seconds

    @property
    def helped_groups(self) -> float:
        """Mean number of groups of a batch that the trainer generates."""
        measured = self.simulated.tag
        return sum(batch.groups_generated for batch in measured) / max(1, len(measured))

    def gain(self, baseline: Baseline) -> float:
        """Over all devices colocated: 1.2 if those take 20 % longer."""
        return self.colocated[baseline] / self.step_seconds


@dataclass(frozen=True)
class Planned:
    profile: Profile
    devices: Devices
    excluded: Mapping[str, str]
    """Kinds that cannot hold the model, and why."""
    floor_seconds: float
    colocated: Mapping[Baseline, float]
    choices: tuple[Choice, ...]
    """The best first."""
    num_forecast: int
    """Splits and fragment sizes that were looked at."""
    host_gpus: int | None = None
    """Where it counts that a trainer's devices are of one host: how many that has. All choices can
    then be said by a recipe."""

    @cached_property
    def best(self) -> Choice:
        return self.choices[0]


@dataclass(frozen=True, slots=True)
class _Candidate:
    split: Split
    size: int
    schedule: RunSchedule
    forecast: Forecast


def plan_split(
    profile: Profile,
    devices: Devices,
    schedule: RunSchedule,
    *,
    effort: float = EFFORT,
    host_gpus: int | None = None,
) -> Planned:
    """Rank splits of these devices. What ``schedule`` leaves open is chosen: ``fragment_size``
    None, ``tag`` "auto".

    ``host_gpus``: GPUs of a host; what no recipe can say of such hosts is left out. None: devices
    go together wherever they are, as the bounds and the emulated cluster have it.

    Raises:
        UserError: a kind that the profile does not know, or too few devices for two roles.
    """
    left_out = excluded(profile, devices)
    candidates = _candidates(profile, devices, schedule, host_gpus)
    if not candidates:
        raise UserError(_why_none(profile, devices, schedule, host_gpus))
    choices = sorted(
        _simulated(profile, devices, candidates, effort),
        key=lambda choice: choice.step_seconds,
    )
    best = _without_needless_help(profile, choices[0], schedule)
    return Planned(
        profile=profile,
        devices=devices,
        excluded=left_out,
        floor_seconds=floor_seconds(profile, devices),
        colocated=best.colocated,
        choices=(best, *choices[1:]),
        num_forecast=len({(str(each.split), each.size) for each in candidates}),
        host_gpus=host_gpus,
    )


def fragment_sizes(profile: Profile, schedule: RunSchedule) -> list[int]:
    """Divisors of the group that one training message can name, or the one that is wanted."""
    if schedule.fixed_fragment is not None:
        return [schedule.fixed_fragment]
    group = profile.shape.group_size
    fewest = -(-group // MAX_FRAGMENTS_PER_GROUP)
    return [size for size in range(fewest, group + 1) if group % size == 0]


def _splits(profile: Profile, devices: Devices, schedule: RunSchedule) -> list[Split]:
    """All that are worth a look; colocated, every device that can is the trainer's."""
    if schedule.mode != "colocated":
        return splits(profile, devices)
    able = {kind: n for kind, n in devices.items() if n and fits(profile, kind, "trainer") is None}
    return [Split({}, able)] if able else []


def _candidates(
    profile: Profile, devices: Devices, schedule: RunSchedule, host_gpus: int | None
) -> list[_Candidate]:
    """Every split in every fragment size, the best forecast first.

    Where a switch takes time, help is lent more rarely than forecasts think, which take it for one
    block; so each candidate with help is followed by one without.
    """
    ways = [
        (split, size, way)
        for split in _splits(profile, devices, schedule)
        if (way := _said(profile, split, schedule, host_gpus)) is not None
        for size in fragment_sizes(profile, schedule)
        if _holds(profile, split, way, size)
    ]

    def ranked(**changes: Any) -> list[_Candidate]:
        found = [
            _Candidate(split, size, wanted, forecast(profile, split, size, wanted))
            for split, size, way in ways
            for wanted in [way.changed(**changes)]
        ]
        return sorted(found, key=lambda each: (each.forecast.seconds, -each.size))

    found = ranked()
    if schedule.fixed_tag is not None or not profile.variant.switch_seconds:
        return found
    helped = [candidate for candidate in found if candidate.forecast.groups]
    pairs = zip_longest(helped, ranked(tag=0))
    return [candidate for pair in pairs for candidate in pair if candidate is not None]


def _said(
    profile: Profile, split: Split, schedule: RunSchedule, host_gpus: int | None
) -> RunSchedule | None:
    """The schedule as a recipe can say it of this split: without help where the choice is open and
    its trainer cannot be lent. None if there is no such recipe."""
    ways = [schedule]
    if schedule.fixed_tag is None:
        ways.append(schedule.changed(tag=0))
    if host_gpus is None:
        return schedule
    return next(
        (way for way in ways if why_not(profile, split, way, host_gpus=host_gpus) is None), None
    )


def _holds(profile: Profile, split: Split, schedule: RunSchedule, size: int) -> bool:
    """Whether all devices that generate have memory for so many samples at a time."""
    roles: dict[Role, Devices] = {"rollout": split.rollout}
    if schedule.lends_trainer:
        roles["trainer"] = split.trainer
    return all(
        holds_fragments(profile, kind, role, size)
        for role, pool in roles.items()
        for kind, count in pool.items()
        if count
    )


def _why_none(
    profile: Profile, devices: Devices, schedule: RunSchedule, host_gpus: int | None
) -> str:
    given = [kind for kind, count in devices.items() if count]
    roles: tuple[Role, Role] = ("rollout", "trainer")
    reasons = [fits(profile, kind, role) for kind in given for role in roles]
    known = list(dict.fromkeys(reason for reason in reasons if reason is not None))
    looked_at = _splits(profile, devices, schedule)
    if looked_at and host_gpus is not None:
        reason = why_not(profile, looked_at[0], schedule, host_gpus=host_gpus)
        return f"no recipe says a split of {words(devices)}: {reason or 'fragments do not fit'}"
    if not known:
        return "one device cannot be split into rollout and trainer; give at least two"
    return f"no split of {words(devices)} can both generate and train: {'; '.join(known)}"


def _simulated(
    profile: Profile,
    devices: Devices,
    candidates: list[_Candidate],
    effort: float,
) -> Iterator[Choice]:
    """The best candidates, until the effort is spent or forecasts are hopeless."""
    colocated = {each: colocated_seconds(profile, devices, each) for each in BASELINES}
    seen: Counter[str] = Counter()
    least = math.inf
    for candidate in candidates:
        if sum(seen.values()) >= MAX_SIMULATED:
            return
        sized = candidate.schedule.changed(fragment_size=candidate.size)
        chosen = with_help(profile, candidate.split, sized, candidate.forecast.groups)
        cost = _effort(profile, candidate.split, chosen)
        name = f"{candidate.split} {bool(candidate.forecast.groups)}"
        hopeless = candidate.forecast.seconds > least * HOPELESS
        too_much = cost > effort and math.isfinite(least)
        if hopeless or too_much or seen[name] >= SIZES_PER_SPLIT:
            continue
        seen[name] += 1
        effort -= cost
        simulated = _run(profile, candidate.split, chosen)
        least = min(least, simulated.step_seconds)
        yield Choice(
            split=candidate.split,
            schedule=chosen,
            forecast_seconds=candidate.forecast.seconds,
            simulated=simulated,
            colocated=colocated,
        )


def with_help(profile: Profile, split: Split, schedule: RunSchedule, groups: int) -> RunSchedule:
    """Give the trainer as many groups as are forecast best, if the schedule leaves it open."""
    if schedule.fixed_tag is not None:
        return schedule
    together = not has_independent_devices(profile, split.trainer, schedule)
    if schedule.staleness_limit and together and not profile.variant.switch_seconds:
        # A switch costs nothing and work is never short: it helps whenever it waits.
        groups = profile.shape.groups
    return schedule.changed(tag=groups)


def _effort(profile: Profile, split: Split, schedule: RunSchedule) -> float:
    """A fragment costs more the more devices could take it."""
    fragments = profile.shape.samples / (schedule.fixed_fragment or 1)
    devices = sum(split.rollout.values()) + sum(split.trainer.values())
    each = 20 + devices * (HELPERS_COST if schedule.gradient_help else 1)
    return (warm_up_of(schedule) + _batches(schedule)) * fragments * each


def _batches(schedule: RunSchedule) -> int:
    return BATCHES_ONE_STEP if schedule.staleness_limit else BATCHES_STRICT


def _run(profile: Profile, split: Split, schedule: RunSchedule) -> Simulated:
    return simulate(
        profile,
        rollout=split.rollout,
        trainer=split.trainer,
        schedule=schedule,
        batches=_batches(schedule),
        seed=SEED,
        causes=False,
    )


def _without_needless_help(profile: Profile, best: Choice, schedule: RunSchedule) -> Choice:
    """The same split without help, if the trainer found little to do and that is as good."""
    if schedule.fixed_tag is not None or not best.schedule.lends_trainer or best.helped_groups >= 1:
        return best
    chosen = best.schedule.changed(tag=0)
    off = replace(best, schedule=chosen, simulated=_run(profile, best.split, chosen))
    return off if off.step_seconds <= best.step_seconds * (1 + NEGLIGIBLE_GAIN) else best
