"""The results of the emulated cluster as Markdown: all workloads side by side, and every case.

`python -m bench all` writes them, and `python -m bench tables` prints them again.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from bench.summary import summary
from bench.typed import counted, typed

HEAD = (
    "mode", "split", "fragment", "TAG", "s per step", "utilisation", "simulator",
    "2026-06", "tuned", "ours", "overhead", "a recipe says it",
)  # fmt: skip
BEGINNING = """# Measured on the emulated cluster

Written by `make bench` from `bench/results`. Real services, emulated devices.
"""
LEGEND = """
## Every case

- *s per step*: at full scale, median of the rounds; *utilisation*: work-conserving floor over it;
  *simulator*: how far the step is from what the simulator says of this configuration.
- *2026-06*, *tuned*: how many times longer the cost models of colocated systems take on all these
  devices; *ours*: the same of our own colocated mode, measured in the same case.
- *overhead*: milliseconds per batch more than the simulator's with messages that take no time, and
  its share of a real batch. It does not scale with the model.
- *a recipe says it*: whether a run of today can be this row, on hosts with 8 GPUs each; *as ranks*:
  with `trainer.ranks`, which the emulated cluster does not have.

"""


def tables(results: Sequence[dict[str, Any]]) -> str:
    lines = (line for result in results for line in _table(result))
    rows = [typed(result["workload"], mode) for result in results for mode in result["modes"]]
    return "\n".join([BEGINNING, summary(results), LEGEND + counted(rows), *lines]) + "\n"


def _table(result: dict[str, Any]) -> Iterator[str]:
    devices = " + ".join(f"{count} {kind}" for kind, count in result["devices"].items())
    yield f"\n### {result['workload']}, {devices}{_split_of(result)}\n"
    floor, old = result["floor_seconds"], result["colocated_2026_06"]
    yield (
        f"Floor {floor:.1f} s, colocated 2026-06 {old:.1f} s, tuned "
        f"{result['colocated_tuned']:.1f} s (models); scale {result['scale']:g}.\n"
    )
    yield "| " + " | ".join(HEAD) + " |"
    yield "|---" * len(HEAD) + "|"
    for mode in result["modes"]:
        yield "| " + " | ".join(_cells(result["workload"], mode)) + " |"


def _split_of(result: dict[str, Any]) -> str:
    """Names the split where every mode has the same."""
    found = {mode["split"] for mode in result["modes"]}
    return f", {found.pop()}" if len(found) == 1 else ""


def _cells(workload: str, mode: dict[str, Any]) -> list[str]:
    ours = mode["over_colocated"]
    spread = f" ({mode['fastest']:.1f}–{mode['slowest']:.1f})" if _varies(mode) else ""
    return [
        mode["mode"],
        mode["split"],
        str(mode["fragment_size"] or "auto"),
        str(mode["tag"] or "off"),
        f"{mode['step_seconds']:.1f}{spread}",
        f"{mode['utilisation']:.3f}",
        f"{mode['deviation']:+.1%}",
        f"{mode['over_2026_06']:.2f}",
        f"{mode['over_tuned']:.2f}",
        "" if ours is None else f"{ours:.2f}",
        f"{mode['overhead_ms']:.0f} ms, {mode['overhead_share']:.2%}",
        typed(workload, mode).words,
    ]


def _varies(mode: dict[str, Any]) -> bool:
    return bool(mode["slowest"] - mode["fastest"] > 0.001 * mode["step_seconds"])
