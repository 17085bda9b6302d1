"""Simulates the candidates that are forecast best, and then what is near the best of them."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from digenrl.planning.scheduler_load import scheduler_seconds
from services.scheduler.core.tag.forecast import Forecast
from services.scheduler.core.unissued import fragment_sizes
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.split import Split, present
from services.scheduler.sim.measured import SimulationResult
from services.scheduler.sim.profiled import num_warm_up_batches, simulate
from shared.recipe.schedule import RunSchedule

SEARCH_CPU_S = 1.6
"""Seconds that a core of the scheduler would be busy with all that is simulated; its devices take
as much again, or twice as much."""
SHARE_FOR_NEIGHBOURS = 0.5
MAX_SIMULATED = 16
PRUNE_FACTOR = 1.1
"""Forecast over the best simulated: more than forecasts err."""
SIZES_PER_SPLIT = 2
BATCHES_STRICT, BATCHES_AHEAD, BATCHES_IN_PAIRS = 2, 3, 4
"""Measured batches of a simulation. One-step asynchrony with help goes in pairs: in one batch lent
devices help, in the next there is nothing left to help with."""
MAX_RELATIVE_SECONDS = 0.998
"""A neighbour is taken if its step takes less than this share of the best one's."""
SEED = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    split: Split
    size: int
    schedule: RunSchedule
    """Schedule that leaves open what the recipe leaves open."""
    forecast: Forecast
    chosen: RunSchedule
    """Schedule with its fragment size and the help that is forecast best."""
    scheduler_seconds: float
    """For how long a core of the scheduler is busy with a step, which is not simulated."""

    @property
    def seconds(self) -> float:
        """Seconds of a step: as forecast, or what the scheduler takes if that is more."""
        return max(self.forecast.seconds, self.scheduler_seconds)

    @property
    def name(self) -> str:
        return f"{self.chosen.mode} {self.split} {self.size} {self.chosen.tag}"


@dataclass(frozen=True, slots=True)
class SearchResult:
    candidate: Candidate
    schedule: RunSchedule
    simulated: SimulationResult

    @property
    def seconds(self) -> float:
        """Seconds of a step: as simulated, or what the scheduler takes if that is more."""
        return max(self.simulated.step_seconds, self.candidate.scheduler_seconds)


Variation = Callable[[Candidate, Split, int, int | None], Candidate | None]
"""(candidate, split, fragment size, groups of TAG or None for those forecast best) -> the same with
these; None if there is no such recipe."""


def search(
    profile: Profile, candidates: list[Candidate], like: Variation, effort: float, *, tags: bool
) -> list[SearchResult]:
    """Return what was simulated, the best first.

    ``tags``: whether the trainer's help is to be chosen.
    """
    results: list[SearchResult] = []
    names: set[str] = set()

    def simulated(candidate: Candidate) -> SearchResult:
        names.add(candidate.name)
        each = SearchResult(candidate, candidate.chosen, run(profile, candidate, candidate.chosen))
        results.append(each)
        return each

    left = effort - _best_forecasts(
        profile, candidates, simulated, effort * (1 - SHARE_FOR_NEIGHBOURS)
    )
    best = min(results, key=_seconds)
    while True:
        better = None
        for variation in _near(profile, best.candidate, tags):
            near = like(best.candidate, *variation)
            if near is None or near.name in names or _effort(profile, near) > left:
                continue
            if near.scheduler_seconds >= MAX_RELATIVE_SECONDS * best.seconds:  # no step takes less
                continue
            left -= _effort(profile, near)
            each = simulated(near)
            if each.seconds < MAX_RELATIVE_SECONDS * best.seconds:
                better = each
                break
        if better is None:
            return sorted(results, key=_seconds)
        best = better


def run(profile: Profile, candidate: Candidate, schedule: RunSchedule) -> SimulationResult:
    """Simulate a candidate by a schedule."""
    warm_up, batches = _batches(candidate)
    return simulate(
        profile,
        rollout=candidate.split.rollout,
        trainer=candidate.split.trainer,
        schedule=schedule,
        warm_up=warm_up,
        batches=batches,
        seed=SEED,
    )


def _seconds(result: SearchResult) -> float:
    return result.seconds


def _best_forecasts(
    profile: Profile,
    candidates: list[Candidate],
    simulated: Callable[[Candidate], SearchResult],
    effort: float,
) -> float:
    """Simulate the best candidates, until the effort is spent or others cannot be as good; return
    the effort that it took."""
    counts: Counter[str] = Counter()
    least, spent = math.inf, 0.0
    for candidate in candidates:
        if sum(counts.values()) >= MAX_SIMULATED or candidate.seconds > least * PRUNE_FACTOR:
            break
        cost = _effort(profile, candidate)
        name = f"{candidate.schedule.mode} {candidate.split} {bool(candidate.forecast.groups)}"
        too_much = spent + cost > effort and math.isfinite(least)
        is_no_better = candidate.scheduler_seconds >= least
        if counts[name] >= SIZES_PER_SPLIT or too_much or is_no_better:
            continue
        counts[name] += 1
        spent += cost
        least = min(least, simulated(candidate).seconds)
    return spent


def _near(
    profile: Profile, candidate: Candidate, tags: bool
) -> Iterator[tuple[Split, int, int | None]]:
    """Yield what differs from a candidate by one step: in the size of fragments, in the split, in
    the help by the trainer."""
    size, split = candidate.size, candidate.split
    if candidate.schedule.fixed_fragment is None:
        sizes = fragment_sizes(profile.shape.group_size)
        place = sizes.index(size)
        for other in (*sizes[place + 1 : place + 2], *reversed(sizes[max(0, place - 1) : place])):
            yield split, other, None
    ranks = profile.variant.ranks
    for moved in () if candidate.schedule.members_generate else _moved(split, ranks):
        yield moved, size, None
    if tags and candidate.schedule.mode == "disaggregated":
        for groups in (0, profile.shape.groups):
            yield split, size, groups


def _moved(split: Split, ranks: int) -> Iterator[Split]:
    """Yield the split with one or two devices or shard groups of a kind more on either side."""
    for kind in split.devices:
        have = split.rollout.get(kind, 0), split.trainer.get(kind, 0)
        for step in (ranks, -ranks, 2 * ranks, -2 * ranks):
            rollout = {**split.rollout, kind: have[0] + step}
            trainer = {**split.trainer, kind: have[1] - step}
            if rollout[kind] >= 0 and trainer[kind] >= 0:
                moved = Split(present(rollout), present(trainer))
                if moved.rollout and moved.trainer:
                    yield moved


def _effort(profile: Profile, candidate: Candidate) -> float:
    """Return seconds that a core of the scheduler would be busy with what is simulated."""
    each = scheduler_seconds(profile, candidate.split, candidate.chosen)
    return sum(_batches(candidate)) * each


def _batches(candidate: Candidate) -> tuple[int, int]:
    """Return the number of batches until one is like the next, and of those that are measured; one
    is enough where the scheduler's own work decides."""
    schedule = candidate.chosen
    if candidate.scheduler_seconds >= candidate.forecast.seconds:
        return 0, 1
    if not schedule.staleness_limit:
        return 1, BATCHES_STRICT
    in_pairs = schedule.mode == "disaggregated"
    return num_warm_up_batches(schedule), BATCHES_IN_PAIRS if in_pairs else BATCHES_AHEAD
