"""What the emulated cluster shows of all workloads side by side, as Markdown tables.

Rows are workloads; a figure whose case or mode was not measured is a dash.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.typed import NOTES, typed

NAMES = {
    "qwen-image": "Qwen-Image",
    "flux1-dev": "FLUX.1-dev",
    "wan2.1-14b": "Wan2.1-14B",
    "hunyuanvideo": "HunyuanVideo",
}
"""Cost profile -> model, in the order of the rows."""
EQUAL, HALF = {"H100": 32}, {"H100": 16}
UNEQUAL = ("A100", "H20", "L40S")
STARVED, TRAINER_STARVED = "8 H100 : 24 H100", "24 H100 : 8 H100"
LADDER = ("sequential", "gap", "tsp", "tag", "one-step", "colocated")
MISSING = "–"

Result = Mapping[str, Any]
Mode = Mapping[str, Any]


def summary(results: Sequence[Result]) -> str:
    found = _Modes(results)
    return "\n".join([*_utilisation(found), *_ratios(found), *_ladder(found), "", NOTES])


class _Modes:
    """Modes by workload, devices and split."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._results = results

    def case(self, workload: str, devices: Mapping[str, int], split: str | None) -> Result | None:
        """Finds a case by the split that all its modes have, or None if each has its best."""
        for result in self._results:
            splits = {mode["split"] for mode in result["modes"]}
            given = splits.pop() if splits in ({STARVED}, {TRAINER_STARVED}) else None
            if (result["workload"], result["devices"], given) == (workload, devices, split):
                return result
        return None

    def mode(
        self, workload: str, devices: Mapping[str, int], name: str, split: str | None = None
    ) -> Mode | None:
        case = self.case(workload, devices, split)
        modes = [] if case is None else [mode for mode in case["modes"] if mode["mode"] == name]
        return modes[0] if modes else None


def _utilisation(found: _Modes) -> Iterator[str]:
    yield "### Utilisation\n"
    yield (
        "Work-conserving floor over measured step, LoRA; in brackets how far the step is from the "
        "simulator.\nOn-policy is GAP + TSP + TAG. The first four columns have the best split of "
        "each mode; 8:24 and 24:8 are\nrollout : trainer devices, far from it.\n"
    )
    columns: dict[str, tuple[Mapping[str, int], str, str | None]] = {
        "32 H100, on-policy": (EQUAL, "tag", None),
        "one-step": (EQUAL, "one-step", None),
        "16 H100, on-policy": (HALF, "tag", None),
        "one-step ": (HALF, "one-step", None),
        "8:24, TAG off": (EQUAL, "tsp", STARVED),
        "on, on-policy": (EQUAL, "tag", STARVED),
        "on, one-step": (EQUAL, "one-step", STARVED),
        "24:8 one-step, gradient help off": (EQUAL, "one-step", TRAINER_STARVED),
        "on": (EQUAL, "help", TRAINER_STARVED),
    }
    yield from _head(columns)
    for workload, name in NAMES.items():
        modes = [found.mode(workload, devices, m, s) for devices, m, s in columns.values()]
        yield _row(name, [_share(mode) + _mark(workload, mode) for mode in modes])


def _share(mode: Mode | None) -> str:
    return MISSING if mode is None else f"{mode['utilisation']:.3f} ({mode['deviation']:+.1%})"


def _mark(workload: str, mode: Mode | None) -> str:
    return "" if mode is None else typed(workload, mode).mark


def _ratios(found: _Modes) -> Iterator[str]:
    yield "\n### Against colocated systems\n"
    yield (
        "How many times longer they take on the same devices. `2026-06` and `tuned` are models, "
        "`ours` is our own\ncolocated mode, measured. The last three columns are 16 H100 and 16 of "
        "another kind.\n"
    )
    unequal = [f"+ 16 {kind}, one-step: 2026-06, tuned" for kind in UNEQUAL]
    equal = [f"32 H100, {name}: 2026-06, tuned, ours" for name in ("on-policy", "one-step")]
    yield from _head([*equal, *unequal])
    for workload, name in NAMES.items():
        equals = [found.mode(workload, EQUAL, mode) for mode in ("tag", "one-step")]
        others = [found.mode(workload, {"H100": 16, kind: 16}, "one-step") for kind in UNEQUAL]
        cells = [_over(mode, ours=True) + _mark(workload, mode) for mode in equals]
        cells += [_over(mode) + _mark(workload, mode) for mode in others]
        yield _row(name, cells)


def _over(mode: Mode | None, *, ours: bool = False) -> str:
    if mode is None:
        return MISSING
    keys = ("over_2026_06", "over_tuned", *(("over_colocated",) if ours else ()))
    return " / ".join(MISSING if mode[key] is None else f"{mode[key]:.2f}" for key in keys)


def _ladder(found: _Modes) -> Iterator[str]:
    yield "\n### Each technique on top of those before\n"
    yield (
        "Seconds per batch on 32 H100, best split of each, and the overhead in milliseconds per "
        "batch of the emulation\nand in per cent of a real batch.\n"
    )
    yield from _head([*(f"+ {m}" if m in LADDER[1:5] else m for m in LADDER), "floor"])
    for workload, name in NAMES.items():
        modes = [found.mode(workload, EQUAL, mode) for mode in LADDER]
        case = found.case(workload, EQUAL, None)
        floor = MISSING if case is None else f"{case['floor_seconds']:.1f}"
        yield _row(name, [*(_seconds(mode) + _mark(workload, mode) for mode in modes), floor])


def _seconds(mode: Mode | None) -> str:
    if mode is None:
        return MISSING
    return f"{mode['step_seconds']:.1f}; {mode['overhead_ms']:.0f} ms, {mode['overhead_share']:.2%}"


def _head(columns: Iterator[str] | Sequence[str] | Mapping[str, Any]) -> Iterator[str]:
    names = [column.strip() for column in columns]
    yield _row("", names)
    yield "|---" * (len(names) + 1) + "|"


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"
