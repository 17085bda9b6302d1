"""A case: one workload on one set of devices, in several modes that are run by turns."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.cluster.measured import MeasuredRun, measure
from bench.cluster.modes import Chosen
from bench.cluster.results import CaseResult, case_result
from bench.cluster.session import EmulatedRun, run
from bench.cluster.setting import Setting
from bench.runner.rounds import by_turns
from bench.runner.session import Session
from services.scheduler.costs.profile import Profile
from shared.recipe.recipe import load_recipe

WARM_UP_STRICT, WARM_UP_ONE_STEP = 1, 4
"""Batches. On-policy only the first one differs: workers are still joining."""
Note = Callable[[str, int, int], None]
"""(mode, round, batches that are committed)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    profile: Profile
    devices: dict[str, int]
    scale: float
    modes: tuple[Chosen, ...]
    rounds: int
    batches: int
    """Batches of each run that are measured."""
    one_step_batches: int
    """The same with one-step asynchrony, where the stock takes some batches to balance."""
    recipe: Path | None = None
    """The row's recipe, if it is one."""
    streamed: tuple[str, ...] = ()
    """Kinds of device whose workers stream the network."""

    def length(self, mode: Chosen) -> tuple[int, int]:
        """Returns the batches of the warm-up, and the last one that is measured."""
        if not mode.schedule.max_staleness:
            return WARM_UP_STRICT, WARM_UP_STRICT + self.batches
        return WARM_UP_ONE_STEP, WARM_UP_ONE_STEP + self.one_step_batches

    @property
    def num_batches(self) -> int:
        """Number of batches of all runs."""
        return self.rounds * sum(self.length(mode)[1] for mode in self.modes)

    def setting(self, mode: Chosen, seed: int) -> Setting:
        _, last = self.length(mode)
        following = 1 if mode.schedule.max_staleness else 0  # the last one measured is no tail
        return Setting(
            run=f"{self.profile.name}-{mode.name}".replace(".", "-"),
            profile=self.profile.name,
            rollout=dict(mode.split.rollout),
            trainer=dict(mode.split.trainer),
            scale=self.scale,
            steps=last + following,
            seed=seed,
            schedule=mode.schedule,
            encoders=self._encoders,
            recipe=self.recipe,
            streamed=self.streamed,
        )

    @property
    def _encoders(self) -> int:
        return 0 if self.recipe is None else load_recipe(self.recipe).encoder.workers


@dataclass(frozen=True, slots=True)
class Finished:
    result: CaseResult
    runs: dict[str, EmulatedRun]
    """The last run of each mode."""


async def run_case(session: Session, case: Case, note: Note) -> Finished:
    runs: dict[str, EmulatedRun] = {}

    async def measured(mode: Chosen, number: int) -> MeasuredRun:
        warm_up, last = case.length(mode)

        def committed(version: int) -> None:
            note(mode.name, number, version)

        record = await run(session, case.setting(mode, number), warm_up, last, committed)
        runs[mode.name] = record
        return measure(record, warm_up, last)

    found = await by_turns(case.modes, case.rounds, measured)
    return Finished(case_result(case.profile, case.devices, case.scale, found), runs)
