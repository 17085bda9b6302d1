"""A fixed sweep of settings in the simulator, against which plans of many devices are held.

    python -m tests.planning.sweep 1024 --max-staleness 1

Fluid devices, and splits from one device that generates to nearly all, with TAG off and for all
groups; each with fragments of every size. Devices are in hosts of 8. Of more than 64 devices every
setting is simulated by a part first, and in full if that part is near the best: a part takes as
long as all within 1.5 %.

Prints the planned setting, and those that are simulated in full.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from digenrl.planning.planner import PlannedSplit, PlanResult, plan_split
from digenrl.planning.runnable import HOST_GPUS, why_not
from digenrl.planning.scheduler_load import scheduler_seconds
from digenrl.planning.symmetry import RepresentativePart, part_of
from services.scheduler.costs.profile import Profile, load_profile
from services.scheduler.costs.split import Split
from services.scheduler.sim.forecast import fragment_sizes
from services.scheduler.sim.profiled import simulate
from shared.recipe.schedule import RunSchedule

NEAR = 1.03
"""Settings that are forecast to take more than the best one, by this factor, are not simulated in
full."""


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """What is set of a run; numbers of devices and groups are those of all devices."""

    generate: int
    """Devices that generate; 0: all are fluid."""
    fragment_size: int
    tag: int = 0
    """Groups that the trainer generates at most."""

    def schedule(self, max_staleness: Literal[0, 1]) -> RunSchedule:
        schedule = RunSchedule(max_staleness=max_staleness)
        changed = {"tag": self.tag} if self.generate else {"mode": "fluid"}
        return schedule.changed(fragment_size=self.fragment_size, **changed)


@dataclass(frozen=True, slots=True)
class Case:
    """A number of H100 that train FLUX.1 with a group for each."""

    devices: int
    max_staleness: Literal[0, 1]

    @property
    def profile(self) -> Profile:
        profile = load_profile("flux1-dev")
        shape = profile.shape.model_copy(update={"groups": self.devices, "updates": 1})
        return profile.model_copy(update={"shape": shape})

    @property
    def part(self) -> RepresentativePart:
        return part_of(self.profile, {"H100": self.devices})

    def plan(self) -> PlanResult:
        schedule = RunSchedule(max_staleness=self.max_staleness)
        return plan_split(
            self.profile, {"H100": self.devices}, schedule, host_gpus=HOST_GPUS, fluid=True
        )

    def can_be(self, setting: Setting) -> bool:
        """Returns whether a recipe can say it of such hosts."""
        split, schedule = self.split(setting), setting.schedule(self.max_staleness)
        return why_not(self.profile, split, schedule) is None

    def split(self, setting: Setting) -> Split:
        return split_of(self.devices, setting.generate)

    def in_full(self, setting: Setting) -> float:
        """Returns the seconds of a step, all devices simulated."""
        schedule, split = setting.schedule(self.max_staleness), self.split(setting)
        own = scheduler_seconds(self.profile, split, schedule)
        return max(own, seconds(self.profile, split, schedule))

    def by_part(self, setting: Setting) -> float:
        """Returns the seconds of a step by a part of the devices and of the groups."""
        part = self.part
        generate = max(1, setting.generate // part.factor) if setting.generate else 0
        fewer = Setting(generate, setting.fragment_size, setting.tag // part.factor)
        split = split_of(part.devices["H100"], generate)
        schedule = fewer.schedule(self.max_staleness)
        own = scheduler_seconds(part.profile, split, schedule, part.factor)
        return max(own, seconds(part.profile, split, schedule))


def seconds(profile: Profile, split: Split, schedule: RunSchedule) -> float:
    return simulate(
        profile, rollout=split.rollout, trainer=split.trainer,
        schedule=schedule, batches=3 if schedule.staleness_limit else 1, seed=1,
    ).step_seconds  # fmt: skip


def split_of(devices: int, generate: int) -> Split:
    if not generate:
        return Split({}, {"H100": devices})
    return Split({"H100": generate}, {"H100": devices - generate})


def setting_of(choice: PlannedSplit) -> Setting:
    schedule = choice.schedule
    size = schedule.fixed_fragment
    assert size is not None
    if schedule.mode == "fluid":
        return Setting(0, size)
    return Setting(choice.split.rollout["H100"], size, schedule.fixed_tag or 0)


def settings(case: Case, num_splits: int) -> list[Setting]:
    """Returns the settings of the sweep."""
    splits = {max(1, case.devices * n // (num_splits + 1)) for n in range(num_splits + 1)}
    sizes = fragment_sizes(case.profile, RunSchedule())
    tags = (0, case.profile.shape.groups)
    found = [Setting(*each) for each in itertools.product(sorted(splits), sizes, tags)]
    found += [Setting(0, size) for size in sizes]
    return [setting for setting in found if case.can_be(setting)]


def simulated(case: Case, swept: Iterable[Setting]) -> dict[Setting, float]:
    """Returns what settings take in full; of many devices, those near the best by their part."""
    swept = list(swept)
    if case.part.factor > 1:
        forecast = {setting: case.by_part(setting) for setting in swept}
        most = NEAR * min(forecast.values())
        swept = sorted((s for s in swept if forecast[s] <= most), key=lambda s: forecast[s])
    return {setting: case.in_full(setting) for setting in swept}


def main(devices: int, max_staleness: Annotated[int, typer.Option(min=0, max=1)] = 0) -> None:
    case = Case(devices, 1 if max_staleness else 0)
    best = setting_of(case.plan().best)
    own, found = case.in_full(best), simulated(case, settings(case, num_splits=8))
    for setting, took in [(best, own), *found.items()]:
        typer.echo(f"{setting}: {took:.2f} s")
    typer.echo(f"planned over best: {own / min(own, *found.values()):.4f}")


if __name__ == "__main__":
    typer.run(main)
