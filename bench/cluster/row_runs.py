"""Measures rows with real services, by turns."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from bench.cluster.case import Case
from bench.cluster.forecasts import about
from bench.cluster.measured import MeasuredRun, measure
from bench.cluster.output import show_case
from bench.cluster.results import case_result
from bench.cluster.rows import ROWS, Row
from bench.cluster.session import opened, run
from bench.runner.rounds import by_turns
from bench.stored import write_result

START_S = 12.0
"""Rough seconds that a run takes to start and to end."""
SLOWER = 1.1
"""An emulated batch over its best."""


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
        batch = SLOWER * row.batch_seconds
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
        path = results / f"{row.name}.json"
        write_result(path, {**about(row), **asdict(result)})
        show_case(result, console)
        console.print(f"written: {path}")


def chosen_rows(names: Sequence[str]) -> Iterator[Row]:
    """Yields the rows whose names begin so; all, if there are none."""
    for row in ROWS:
        if not names or any(row.name.startswith(each) for each in names):
            yield row
