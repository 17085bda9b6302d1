"""The rows of the emulated cluster as Markdown: measured where services were run, else forecast.

`python -m bench tables` writes them into docs/performance/tables.md, and between the marks of
docs/performance.md and docs/planning.md. A forecast is the simulator's, in italics.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cluster.forecasts import ELSEWHERE, ON_DEVICE, SLOWED
from bench.cluster.request import WORKLOADS
from bench.cluster.rows import ROWS, Row
from bench.stored import read_results

NAMES = {
    "qwen-image": "Qwen-Image",
    "flux": "FLUX.1-dev",
    "wan": "Wan2.1-14B",
    "hunyuan": "HunyuanVideo",
}
"""Workload -> model, in the order of the rows."""
EQUAL, UNEQUAL = ("32", "64"), ("16-a100-16", "16-h20-16", "16-l40s-16")
TITLES = {
    "32": "32 H100",
    "64": "64 H100",
    "16-a100-16": "16 H100 + 16 A100",
    "16-h20-16": "16 H100 + 16 H20",
    "16-l40s-16": "16 H100 + 16 L40S",
}
WAYS = tuple(dict.fromkeys(row.way for row in ROWS))
LADDER = {
    "sequential": "sequential",
    "gap": "+ GAP",
    "tsp": "+ TSP",
    "tag": "+ TAG",
    "one-step": "+ one step",
    "fluid": "fluid, on-policy",
}
MISSING = "–"
ALIKE = 0.015
"""Share by which a row's simulated step may have moved since it was measured: with other costs it
is forecast until it is measured again."""
FORECASTS = "forecasts.json"
BEGINNING = """# Rows of the emulated cluster

Written by `python -m bench tables` from `bench/results`: real services over emulated devices where
a row was measured, else *forecasts* of the simulator with the same costs, in italics. Each row is a
recipe in `bench/recipes` that `digenrl check` accepts on its hosts.
"""
MARK = "<!-- bench: {name} -->\n"
END = "<!-- bench: end -->"

Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figures:
    """What is known of a row."""

    row: Row
    forecast: Result | None
    result: Result | None
    """What was measured with services."""

    @property
    def mode(self) -> Result | None:
        return None if self.result is None else self.result["modes"][0]

    def figure(self, key: str, digits: int) -> str:
        """Writes a figure: measured, else forecast."""
        if self.mode is not None:
            return f"{self.mode[key]:.{digits}f}"
        return MISSING if self.forecast is None else f"*{self.forecast[key]:.{digits}f}*"


@dataclass(frozen=True, slots=True)
class Known:
    """All that is known, by the names of rows."""

    results: Mapping[str, Result]
    forecasts: Result

    def of(self, row: Row) -> Figures:
        forecast = next((f for f in self.forecasts["rows"] if f["row"] == row.name), None)
        result = self.results.get(row.name)
        return Figures(row, forecast, None if _is_outdated(result, forecast) else result)

    def with_host(self, row: Row, scored: str = ON_DEVICE) -> Result | None:
        """Returns the row's forecast with an H200's host; as charged where devices set the pace."""
        found = (f for f in self.forecasts["hosts"] if f["row"] == row.name)
        slowed = next((f for f in found if f["scored"] == scored), None)
        if slowed is None and scored == ON_DEVICE and row.workload not in SLOWED:
            return self.of(row).forecast
        return slowed


def _is_outdated(result: Result | None, forecast: Result | None) -> bool:
    """Whether the simulator would say another step today than it did when a row was measured."""
    if result is None or forecast is None:
        return False
    then = result["modes"][0]["simulated_seconds"]
    return bool(abs(forecast["step_seconds"] / then - 1) > ALIKE)


def known_of(folder: Path) -> Known:
    """Reads results and forecasts."""
    forecasts = json.loads((folder / FORECASTS).read_text())
    return Known({each["row"]: each for each in read_results(folder).values()}, forecasts)


def tables(known: Known) -> str:
    parts = [BEGINNING, utilisation(known), hosts(known), ratios(known), ladder(known)]
    parts.append("## Every row\n")
    return "\n".join([*parts, *every_row(known)]) + "\n"


def utilisation(known: Known) -> str:
    """Writes the rows of equal devices: the work-conserving floor over the step."""
    return _side_by_side("## Utilisation", known, EQUAL, "utilisation", 3)


def ratios(known: Known) -> str:
    """Writes how many times longer a tuned colocated system takes on the same devices."""
    return _side_by_side(
        "## Times faster than tuned colocated", known, (*EQUAL, *UNEQUAL), "over_tuned", 2
    )


def _side_by_side(title: str, known: Known, pools: Sequence[str], key: str, digits: int) -> str:
    columns = [(pool, way) for pool in pools for way in WAYS]
    head = [f"{TITLES[pool]}, {way}" for pool, way in columns]
    lines = [f"{title}\n", *_head(head)]
    for workload, name in NAMES.items():
        cells = [known.of(Row(workload, *column)).figure(key, digits) for column in columns]
        lines.append(_row(name, cells))
    return "\n".join(lines) + "\n"


def hosts(known: Known) -> str:
    """Writes the rows of equal devices with an H200's host: seconds per step, and utilisation."""
    columns = [(pool, way) for pool in EQUAL for way in WAYS]
    lines = [
        "## With an H200's host\n",
        *_head([f"{TITLES[pool]}, {way}" for pool, way in columns]),
    ]
    for workload, name in NAMES.items():
        for scored, words in {ON_DEVICE: "", ELSEWHERE: ", scored elsewhere"}.items():
            each = [known.with_host(Row(workload, *column), scored) for column in columns]
            cells = [f"*{f['step_seconds']:.1f}* s, *{f['utilisation']:.3f}*" for f in each if f]
            lines += [_row(f"{name}{words}", cells)] if cells else []
    return "\n".join(lines) + "\n"


def ladder(known: Known) -> str:
    """Writes each technique on top of those before: forecasts."""
    rungs = {(each["workload"], each["mode"]): each for each in known.forecasts["ladder"]}
    lines = ["## Each technique on top of those before\n"]
    lines.append("Forecast seconds per batch on 32 H100, and the split.\n")
    lines += _head(list(LADDER.values()))
    for workload, name in NAMES.items():
        found = [rungs.get((WORKLOADS[workload], mode)) for mode in LADDER]
        cells = [
            MISSING if each is None else f"*{each['step_seconds']:.1f}* ({each['split']})"
            for each in found
        ]
        lines.append(_row(name, cells))
    return "\n".join(lines) + "\n"


def every_row(known: Known) -> Iterator[str]:
    """Writes a line for each row."""
    yield from _head(
        [
            "hosts", "generate : generate and train", "rows a pass", "s per step", "utilisation",
            "simulator", "with an H200's host", "2026-06", "tuned", "overhead",
        ]
    )  # fmt: skip
    for row in ROWS:
        found = known.of(row)
        cells = list(_cells(found, known.with_host(row)))
        yield _row(f"[{row.name}](../../bench/recipes/{row.path.name})", cells)


def _cells(found: Figures, with_host: Result | None) -> Iterator[str]:
    mode, forecast = found.mode, found.forecast
    yield f"`{found.row.hosts}`"
    yield MISSING if forecast is None else forecast["split"]
    rows = {} if forecast is None else forecast.get("pass_rows", {})
    yield ", ".join(f"{count} ({kind})" for kind, count in rows.items()) or MISSING
    yield found.figure("step_seconds", 1) + _spread(mode) + _balanced(mode)
    yield found.figure("utilisation", 3)
    yield MISSING if mode is None else f"{mode['simulated_seconds']:.1f} ({mode['deviation']:+.1%})"
    yield MISSING if with_host is None else f"*{with_host['step_seconds']:.1f}*"
    yield found.figure("over_2026_06", 2)
    yield found.figure("over_tuned", 2)
    overhead = "{overhead_ms:.0f} ms, {overhead_share:.2%}"
    yield MISSING if mode is None else overhead.format(**mode)


def _spread(mode: Result | None) -> str:
    if mode is None or mode["slowest"] - mode["fastest"] <= 0.001 * mode["step_seconds"]:
        return ""
    return f" ({mode['fastest']:.1f}–{mode['slowest']:.1f})"


def _balanced(mode: Result | None) -> str:
    if mode is None or mode["balanced_seconds"] == mode["step_seconds"]:
        return ""
    return f"; balanced {mode['balanced_seconds']:.1f}"


def summary(known: Known) -> str:
    """Writes the summary of docs/performance.md."""
    columns: list[tuple[str, str, str, str, int]] = [
        (f"utilisation, 32 H100, {way}", "32", way, "utilisation", 3) for way in WAYS
    ]
    columns += [
        (f"times faster than tuned colocated\\*, {TITLES[pool]}", pool, WAYS[0], "over_tuned", 2)
        for pool in UNEQUAL[:2]
    ]
    columns.append(("than colocated of June 2026\\*, 32 H100", "32", WAYS[0], "over_2026_06", 2))
    with_host = "s per step, 32 H100, on-policy, with an H200's host"
    lines = list(_head([*(title for title, *_ in columns), with_host]))
    for workload, name in NAMES.items():
        cells = [
            known.of(Row(workload, pool, way)).figure(key, digits)  # type: ignore[arg-type]
            for _, pool, way, key, digits in columns
        ]
        slowed = known.with_host(Row(workload, "32", WAYS[0]))
        cells.append(MISSING if slowed is None else f"*{slowed['step_seconds']:.1f}*")
        lines.append(_row(name, cells))
    return "\n".join(lines) + "\n"


def with_table(text: str, name: str, table: str) -> str:
    """Returns a page with a table between its marks."""
    begin = re.escape(MARK.format(name=name))
    return re.sub(f"({begin}).*?({END})", lambda found: found[1] + table + found[2], text,
                  flags=re.DOTALL)  # fmt: skip


def pages(root: Path, known: Known) -> dict[Path, str]:
    """Returns every page with tables, as it should be."""
    parts = {
        "docs/performance.md": {
            "summary": summary(known),
            "utilisation": _plain(utilisation(known)),
            "hosts": _plain(hosts(known)),
            "ratios": _plain(ratios(known)),
            "ladder": _plain(ladder(known)),
        },
        "docs/planning.md": {"utilisation": _plain(utilisation(known))},
    }
    found = {root / "docs/performance/tables.md": tables(known)}
    for page, tables_of in parts.items():
        text = (root / page).read_text()
        for name, table in tables_of.items():
            text = with_table(text, name, table)
        found[root / page] = text
    return found


def _plain(table: str) -> str:
    """Leaves out the title."""
    return table.split("\n\n", 1)[1]


def _head(columns: Sequence[str]) -> Iterator[str]:
    yield _row("", columns)
    yield "|---" * (len(columns) + 1) + "|"


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"
