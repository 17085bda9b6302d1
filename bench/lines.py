"""Which line is enough for which model: a table in docs/far-apart.md.

`python -m bench lines` simulates what `digenrl plan RECIPE --devices h100=8 --site ...` does, for
each recipe and each rate, and stores the figures in bench/results/lines.json.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.stored import RESULTS
from digenrl.planning.plan import costs_and_use, plan
from digenrl.planning.sites import best_step, parse_sites
from shared.recipe.recipe import load_recipe

NAMES = {"sd35-medium": "SD3.5-M", "flux1-dev": "FLUX.1-dev", "qwen-image": "Qwen-Image"}
"""Recipe -> model."""
MBITS = (1000, 300, 100, 30, 10)
"""Rates of lines, the fastest first."""
WITHOUT = "without"
DEVICES, SITE = "h100=8", "lab:h100=8@{mbits}/{mbits},40ms"
ENOUGH = 0.8
"""Share of what a site brings behind the fastest line."""
PAGE = Path("docs/far-apart.md")
FILE = RESULTS / "lines.json"

Figures = Mapping[str, float]
"""Rate, or `WITHOUT`, -> seconds of a step."""


def simulated(name: str) -> dict[str, float]:
    """Returns the figures of a recipe."""
    recipe = load_recipe(Path(f"recipes/{name}.toml"))
    planned = plan(recipe, DEVICES, profile=None, staleness=None, host_gpus=8).planned
    costs, _ = costs_and_use(recipe, None)
    found = {WITHOUT: best_step(planned, recipe, []).step_seconds}
    for mbits in MBITS:
        sites = parse_sites([SITE.format(mbits=mbits)], costs)
        found[str(mbits)] = best_step(planned, recipe, sites).step_seconds
    return {name: round(seconds, 1) for name, seconds in found.items()}


def table(figures: Mapping[str, Figures]) -> str:
    """Writes seconds of a step by model and rate, and the slowest line that is enough."""
    heads = [f"{mbits:,} Mbit/s" for mbits in MBITS]
    rows = [["", "without the site", *heads, "enough"]]
    rows += [[NAMES[name], *_cells(each)] for name, each in figures.items()]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n"


def _cells(each: Figures) -> Iterator[str]:
    yield f"{each[WITHOUT]:.0f}"
    for mbits in MBITS:
        yield f"{each[str(mbits)]:.0f}"
    gains = {mbits: each[WITHOUT] - each[str(mbits)] for mbits in MBITS}
    enough = [mbits for mbits in MBITS if gains[mbits] >= ENOUGH * gains[MBITS[0]]]
    yield f"{min(enough):,} Mbit/s"


def read() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(FILE.read_text())
    return found


def write() -> None:
    """Simulates all recipes, and writes the figures and the table."""
    from bench.tables import with_table

    figures = {name: simulated(name) for name in NAMES}
    FILE.write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), "lines", table(figures)))
