"""What each technique is worth on a given split: each on top of those before."""

from dataclasses import dataclass

from bench.simulation.figures import DetailedResult, simulate
from digenrl.planning.planner import with_help
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.split import Split
from services.scheduler.sim.forecast import forecast, fragment_sizes
from shared.recipe.schedule import RunSchedule

SEQUENTIAL = RunSchedule(mode="sequential", tag=0, tsp_steps=1)
GAP = SEQUENTIAL.changed(mode="disaggregated")
TSP = GAP.changed(tsp_steps="auto")
TAG = TSP.changed(tag="auto")
ONE_STEP = TAG.changed(max_staleness=1)
TECHNIQUES = {
    "sequential": SEQUENTIAL,
    "+ GAP": GAP,
    "+ TSP": TSP,
    "+ TAG": TAG,
    "+ one-step": ONE_STEP,
}


@dataclass(frozen=True, slots=True)
class Technique:
    name: str
    schedule: RunSchedule
    simulated: DetailedResult


def compare(
    profile: Profile,
    split: Split,
    *,
    fragment_size: int | None = None,
    batches: int = 8,
    seed: int | None = 0,
) -> list[Technique]:
    """Simulates one technique after the other, the sequential mode first.

    Without a fragment size, each row has the one that is forecast best.
    """
    rows = []
    for name, technique in TECHNIQUES.items():
        schedule = _best(profile, split, technique.changed(fragment_size=fragment_size or "auto"))
        simulated = simulate(
            profile,
            rollout=split.rollout,
            trainer=split.trainer,
            schedule=schedule,
            batches=batches,
            seed=seed,
        )
        rows.append(Technique(name, schedule, simulated))
    return rows


def _best(profile: Profile, split: Split, schedule: RunSchedule) -> RunSchedule:
    """Return the schedule with the fragment size and the help that are forecast best."""
    sizes = fragment_sizes(profile, schedule)
    forecasts = {size: forecast(profile, split, size, schedule) for size in sizes}
    size = min(sizes, key=lambda size: forecasts[size].seconds)
    sized = schedule.changed(fragment_size=size)
    return with_help(profile, split, sized, forecasts[size].groups)
