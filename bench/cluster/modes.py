"""The schedules that are compared: each technique on top of those before, and all of it undone."""

from dataclasses import dataclass

from bench.cluster.shipped import shipped
from bench.simulation.figures import DetailedResult, simulate
from digenrl.planning.planner import plan_split, with_help
from digenrl.planning.runnable import HOST_GPUS
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.split import Devices, Split
from services.scheduler.sim.forecast import forecast, fragment_sizes
from shared.recipe.schedule import RunSchedule

MODES = {
    "sequential": RunSchedule(mode="sequential", tag=0, tsp_steps=1),
    "gap": RunSchedule(tag=0, tsp_steps=1),
    "tsp": RunSchedule(tag=0),
    "tag": RunSchedule(tag="auto"),
    "one-step": RunSchedule(tag="auto", max_staleness=1),
    "colocated": RunSchedule(mode="colocated", tag=0),
}
"""Name of what is added last -> schedule: sequential, + GAP, + TSP, + TAG, + one-step asynchrony;
all devices generating and then training, in our own services."""
SIMULATED_BATCHES = 12
NEGLIGIBLE = 0.003
"""Share of a step that a choice may cost."""
MAX_FRAGMENTS = 6
"""Fragments of a group that spread a burst; more of them are a burden of messages instead."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A mode with its split and schedule."""

    name: str
    split: Split
    schedule: RunSchedule
    """Its schedule, with a fragment size."""


def chosen(
    name: str,
    schedule: RunSchedule,
    profile: Profile,
    devices: Devices,
    split: Split | None,
    *,
    by_controller: bool = False,
) -> Chosen:
    """Chooses what is left open of split, fragment size and help as the planner finds best.

    Only what a recipe can say is chosen. Colocated, all devices are the trainer's.
    ``by_controller``: the run's own controller decides how much to help.
    """
    if split is None or schedule.mode == "colocated":
        best = plan_split(profile, devices, schedule, host_gpus=HOST_GPUS).best
        split, found = best.split, best.schedule
    else:
        sizes = fragment_sizes(profile, schedule)
        sized = [_sized(profile, split, schedule, size) for size in sizes]
        found = min(sized, key=lambda each: _seconds(profile, split, each))
    if schedule.fixed_fragment is None:
        found = _in_smaller_fragments(profile, split, schedule, found)
    return Chosen(name, split, found.changed(tag=schedule.tag) if by_controller else found)


def _seconds(profile: Profile, split: Split, schedule: RunSchedule) -> float:
    """Forecasts the seconds per batch of a schedule that has a fragment size."""
    return forecast(profile, split, schedule.fixed_fragment or 1, schedule).seconds


def _sized(profile: Profile, split: Split, schedule: RunSchedule, size: int) -> RunSchedule:
    """Returns the schedule in fragments of this size, with the help forecast best for it."""
    sized = schedule.changed(fragment_size=size)
    return with_help(profile, split, sized, forecast(profile, split, size, schedule).groups)


def _in_smaller_fragments(
    profile: Profile, split: Split, schedule: RunSchedule, found: RunSchedule
) -> RunSchedule:
    """Makes fragments smaller if that costs next to nothing: devices then store in smaller bursts,
    which the simulator does not model."""
    most = predicted(profile, Chosen("", split, found)).step_seconds * (1 + NEGLIGIBLE)
    least = profile.shape.group_size / MAX_FRAGMENTS
    for size in sorted(fragment_sizes(profile, schedule), reverse=True):
        if least <= size < (found.fixed_fragment or 0):
            smaller = _sized(profile, split, schedule, size)
            if predicted(profile, Chosen("", split, smaller)).step_seconds > most:
                break
            found = smaller
    return found


def predicted(
    profile: Profile,
    mode: Chosen,
    *,
    seed: int = 0,
    warm_up: int | None = None,
    batches: int = SIMULATED_BATCHES,
) -> DetailedResult:
    """Simulates a mode at full scale, with the costs that the emulation has.

    With ``seed``, ``warm_up`` and ``batches`` of a run, its service times are those of that run.
    """
    return simulate(
        shipped(profile, mode.split.trainer),
        rollout=mode.split.rollout,
        trainer=mode.split.trainer,
        schedule=mode.schedule,
        batches=batches,
        warm_up=warm_up,
        seed=seed,
    )


def without_hand_over(profile: Profile) -> Profile:
    """Returns the costs with messages that take no time: what is more than that is overhead."""
    rollout = profile.rollout.model_copy(update={"handoff_seconds": 0.0})
    return profile.model_copy(update={"rollout": rollout})
