"""The bench from beginning to end: checks, runs, tables, files."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.stored import write_result
from bench.two_devices.compare import PartResult
from bench.two_devices.modes import COLOCATED, FAST_ALONE, ONE_STEP, SEQUENTIAL, Part
from bench.two_devices.output import as_plain, show_part
from bench.two_devices.placement import Placement, this_machine
from bench.two_devices.session import open_session
from bench.two_devices.shapes import GROUPS, NETWORK, QUICK_GROUPS, SHAPES, ensure_model
from bench.two_devices.study import Study, plan_study, run_study
from digenrl.local.preflight import check_inputs
from shared.recipe.recipe import load_recipe

QUICK_MODES: Mapping[Part, tuple[str, ...]] = {
    "equal": (COLOCATED, SEQUENTIAL, ONE_STEP),
    "slowed": (FAST_ALONE, ONE_STEP),
    "trainer-bound": (COLOCATED, ONE_STEP),
}
"""The ends of each ladder."""
QUICK_BATCHES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    recipe: Path
    parts: tuple[Part, ...]
    modes: tuple[str, ...]
    """Empty: all."""
    rounds: int
    batches: int
    slowdown: float
    quick: bool


def measure(
    wanted: Wanted, folder: Path, console: Console, *, json_file: Path | None, plots: Path | None
) -> None:
    """Raises UserError before anything is started, if something is missing."""
    placement = this_machine()
    model = ensure_model(folder, NETWORK, seed=0)
    studies = plan_all(wanted, model)
    for study in studies:
        check_inputs(study.recipe)
    results = asyncio.run(_run(studies, folder, placement, console))
    if json_file is not None:
        write_result(json_file, as_plain(results, about(studies, placement)))
    if plots is not None:
        from bench.two_devices.pictures import draw

        draw(results, plots)


def plan_all(wanted: Wanted, model: Path) -> list[Study]:
    quick, given = wanted.quick, load_recipe(wanted.recipe)
    return [
        plan_study(
            given,
            part,
            shape=SHAPES[part],
            groups=QUICK_GROUPS if quick else GROUPS,
            model=model,
            only=wanted.modes or (QUICK_MODES[part] if quick else None),
            rounds=1 if quick else wanted.rounds,
            batches=min(wanted.batches, QUICK_BATCHES) if quick else wanted.batches,
            slowdown=wanted.slowdown,
        )
        for part in wanted.parts
    ]


async def _run(
    studies: Sequence[Study], folder: Path, placement: Placement, console: Console
) -> list[PartResult]:
    def say(line: str) -> None:
        console.print(line, highlight=False)

    began, results = time.monotonic(), []
    say(placement.words)
    async with open_session(folder, placement) as session:
        for study in studies:
            say(f"{study.part}: {words(study)}")
            results.append(await run_study(session, study, say))
    for study, result in zip(studies, results, strict=True):
        show_part(result, console, group_size=study.recipe.batch.group_size)
    say(f"{time.monotonic() - began:.0f} s in all")
    return results


def words(study: Study) -> str:
    """What is set anew in the recipe, for all modes of a part; folders by their names only."""
    return ", ".join(
        f"{key} = {value.name if isinstance(value, Path) else value}"
        for key, value in study.changes.items()
    )


def about(studies: Sequence[Study], placement: Placement) -> dict[str, Any]:
    return {
        "placement": placement.words,
        "changes": {study.part: words(study) for study in studies},
        "slowdown": {study.part: study.slowdown for study in studies},
    }
