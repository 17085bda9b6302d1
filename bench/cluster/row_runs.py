"""Measures rows with real services, by turns; and forecasts them with the simulator alone."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.cluster.case import Case
from bench.cluster.ladder import ladder
from bench.cluster.measured import MeasuredRun, measure
from bench.cluster.modes import Chosen, predicted
from bench.cluster.output import show_case
from bench.cluster.request import WORKLOADS
from bench.cluster.results import case_result
from bench.cluster.rows import BATCH_SECONDS, ROWS, Row, Way, row_of
from bench.cluster.session import opened, run
from bench.runner.rounds import by_turns
from bench.stored import write_result
from services.scheduler.costs.colocated import colocated_seconds
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import load_profile

START_S = 12.0
"""Rough seconds that a run takes to start and to end."""
SLOWER = 1.1
"""An emulated batch over its best."""
FORECAST_BATCHES: dict[Way, tuple[int, int]] = {"on-policy": (2, 4), "one-step": (4, 20)}
"""Batches of the warm-up, and those that are simulated after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How much is measured of each row."""

    rounds: int = 3
    batches: int = 3
    one_step_batches: int = 20

    def case(self, row: Row) -> Case:
        return row.case(
            rounds=self.rounds, batches=self.batches, one_step_batches=self.one_step_batches
        )

    def seconds(self, row: Row) -> float:
        """Estimates how long a row takes."""
        case = self.case(row)
        batch = SLOWER * BATCH_SECONDS[row.way]
        return self.rounds * (START_S + batch * case.length(case.modes[0])[1])


async def run_rows(
    rows: Sequence[Row], length: Length, results: Path, folder: Path, console: Console
) -> None:
    """Measures rows over the same brokers, one round of all after the other, and writes what each
    has found."""
    cases = {row.name: length.case(row) for row in rows}
    async with opened(folder) as session:

        async def measured(row: Row, number: int) -> MeasuredRun:
            case = cases[row.name]
            warm_up, last = case.length(case.modes[0])
            setting = case.setting(case.modes[0], number)
            found = measure(
                await run(session, setting, warm_up, last, lambda _: None), warm_up, last
            )
            seconds = case.scale * found.step_seconds
            console.print(f"{row.name}, round {number + 1}: {seconds:.2f} s per batch")
            return found

        found = await by_turns(list(rows), length.rounds, measured)
    for row, each in found:
        case = cases[row.name]
        result = case_result(case.profile, case.devices, case.scale, [(case.modes[0], each)])
        show_case(result, console)
        write_result(results / f"{row.name}.json", {**_about(row), **asdict(result)})


def forecasts() -> list[dict[str, Any]]:
    """Simulates every row at full scale, on all cores."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return list(pool.map(_forecast, [row.name for row in ROWS]))


def ladders() -> list[dict[str, Any]]:
    """Simulates each technique on top of those before, for every workload."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return [rung for rungs in pool.map(ladder, WORKLOADS) for rung in rungs]


def _forecast(name: str) -> dict[str, Any]:
    row = row_of(name)
    profile, devices = row.profile, row.devices
    mode = Chosen(row.way, row.split, row.recipe.run_schedule)
    warm_up, batches = FORECAST_BATCHES[row.way]
    found = predicted(profile, mode, warm_up=warm_up, batches=batches)
    floor = floor_seconds(profile, devices)
    return {
        **_about(row),
        "split": str(row.split),
        "floor_seconds": round(floor, 3),
        "step_seconds": round(found.step_seconds, 3),
        "utilisation": round(floor / found.step_seconds, 4),
        **{
            f"over_{name.replace('-', '_')}": round(seconds / found.step_seconds, 3)
            for name, seconds in baselines(row).items()
        },
    }


def baselines(row: Row) -> dict[str, float]:
    """Returns the seconds of the models of colocated systems, which have no text encoders on their
    devices."""
    plain = load_profile(row.profile.name)
    return {name: colocated_seconds(plain, row.devices, name) for name in ("2026-06", "tuned")}


def _about(row: Row) -> dict[str, Any]:
    return {
        "row": row.name,
        "recipe": f"bench/recipes/{row.path.name}",
        "hosts": row.hosts,
        "way": row.way,
    }


def chosen_rows(names: Sequence[str]) -> Iterator[Row]:
    """Yields the rows whose names begin so; all, if there are none."""
    for row in ROWS:
        if not names or any(row.name.startswith(each) for each in names):
            yield row
