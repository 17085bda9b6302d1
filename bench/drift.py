"""How far new figures are from the committed ones, as ratios.

A row is compared with the committed row of the same settings; how often it was repeated does not
count. A row without such a partner is named.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.stored import RESULTS, TWO_DEVICES, read_results, read_two_devices

TOLERANCE = 0.05
"""Share by which a figure may differ before it is shown."""
SETTINGS = ("workload", "devices", "scale", "mode", "split", "fragment_size", "tag")
"""What has to be the same in both rows of the emulated cluster."""
FIGURES = ("step_seconds", "utilisation", "simulated_seconds", "over_colocated",
           "messages_per_batch", "cores")  # fmt: skip
GROUPS = "batch.groups"

Figures = Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Figures of one row of a result, and the settings that they depend on."""

    workload: str
    split: str
    mode: str
    settings: Mapping[str, str]
    figures: Figures

    @property
    def place(self) -> tuple[str, str, str]:
        return self.workload, self.split, self.mode


@dataclass(frozen=True, slots=True)
class Moved:
    row: Row
    figure: str
    committed: float
    new: float

    @property
    def ratio(self) -> float:
        return self.new / self.committed


@dataclass(frozen=True, slots=True)
class Drift:
    moved: list[Moved]
    num_compared: int
    """Number of rows with a partner."""
    alone: dict[tuple[str, str, str], str]
    """Row without a partner -> how the nearest committed row differs."""


def drift(new: list[Row], committed: list[Row]) -> Drift:
    """Compares every new row that has a partner, figure by figure."""
    moved: list[Moved] = []
    alone: dict[tuple[str, str, str], str] = {}
    for row in new:
        partner = next((each for each in committed if each.settings == row.settings), None)
        if partner is None:
            alone[row.place] = _difference(row, committed)
        else:
            moved += _moved(row, partner)
    return Drift(moved, len(new) - len(alone), alone)


def rows_of(folder: Path) -> list[Row]:
    """Reads the rows of all results in a folder."""
    cluster = (row for case in read_results(folder).values() for row in _cluster_rows(case))
    pair = read_two_devices(folder)
    return [*cluster, *(_two_device_rows(pair) if pair else ())]


def show_drift(folder: Path, console: Console) -> None:
    """Prints what moved between the committed results and those of ``folder``."""
    found = drift(rows_of(folder), rows_of(RESULTS))
    limit = f"{TOLERANCE:.0%}".replace("%", " %")
    if found.moved:
        table = Table(title=f"moved by more than {limit} from the committed results")
        for column in ("workload", "split", "mode", "figure", "committed", "new", "ratio"):
            table.add_column(column)
        for each in found.moved:
            table.add_row(
                *each.row.place, each.figure, f"{each.committed:.4g}", f"{each.new:.4g}",
                f"{each.ratio:.3f}",
            )  # fmt: skip
        console.print(table)
    else:
        console.print(f"nothing moved by more than {limit}; rows compared: {found.num_compared}")
    for place, difference in found.alone.items():
        console.print(f"not compared: {', '.join(place)}: {difference}", highlight=False)


def _moved(row: Row, partner: Row) -> Iterator[Moved]:
    for name, value in row.figures.items():
        before = partner.figures.get(name)
        if value and before and abs(value / before - 1) > TOLERANCE:
            yield Moved(row, name, before, value)


def _difference(row: Row, committed: list[Row]) -> str:
    same = [each for each in committed if (each.workload, each.mode) == (row.workload, row.mode)]
    if not same:
        return "no committed row of this mode"

    def differing(other: Row) -> list[str]:
        keys = sorted({*row.settings, *other.settings})
        return [key for key in keys if row.settings.get(key) != other.settings.get(key)]

    nearest = min(same, key=lambda other: len(differing(other)))
    return "committed with " + ", ".join(
        f"{key} = {nearest.settings.get(key)} (new: {row.settings.get(key)})"
        for key in differing(nearest)
    )


def _cluster_rows(case: Mapping[str, Any]) -> Iterator[Row]:
    for mode in case["modes"]:
        known = {**case, **mode}
        totals = {
            "messages_per_batch": sum(mode["messages"].values()), "cores": sum(mode["cpu"].values())
        }  # fmt: skip
        yield Row(
            workload=case["workload"],
            split=mode["split"],
            mode=mode["mode"],
            settings={key: str(known[key]) for key in SETTINGS},
            figures={key: ({**known, **totals})[key] for key in FIGURES},
        )


def _two_device_rows(result: Mapping[str, Any]) -> Iterator[Row]:
    for name, part in result["parts"].items():
        given = dict(each.split(" = ", 1) for each in result["changes"][name].split(", "))
        settings = {"part": name, "slowdown": str(result["slowdown"][name]), **given}
        for mode in part["modes"]:
            yield Row(
                workload=TWO_DEVICES,
                split=name,
                mode=mode["mode"],
                settings=settings | {"mode": mode["mode"]},
                figures={key: mode[key] for key in ("median_s", "of_the_bound", "over_alone")},
            )
        # A sample takes as long however many groups a batch has.
        speeds = {
            f"{device}: {task} s/sample": seconds
            for device, tasks in part["seconds_per_sample"].items()
            for task, seconds in tasks.items()
        }
        without = {key: value for key, value in settings.items() if key != GROUPS}
        yield Row(workload=TWO_DEVICES, split=name, mode="speeds", settings=without, figures=speeds)
