"""Forecasts rows and ladders with the simulator alone, on all cores.

The simulator handles each message of a batch in Python, as the scheduler itself does: 1,200 of them
in a batch of 32 devices, twice as many on 64, and a row one step ahead takes 24 batches. All of it
takes minutes of all cores, so each part is kept as it is found, and need not be made again.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bench.cluster.ladder import MODES_OF_LADDER, rung
from bench.cluster.modes import Chosen, predicted
from bench.cluster.request import WORKLOADS
from bench.cluster.rows import ROWS, Row, Way, row_of
from bench.devices import H200_HOST
from bench.simulation.colocated import colocated_seconds
from digenrl.planning.encoding import waits_for_prompts
from services.scheduler.costs.capacity import pass_rows
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import Profile, load_profile
from services.scheduler.costs.split import present

FORECAST_BATCHES: dict[Way, tuple[int, int]] = {"on-policy": (2, 4), "one-step": (4, 20)}
"""Batches of the warm-up, and those that are simulated after it."""

Say = Callable[[str], None]


class Part(NamedTuple):
    """Names one forecast."""

    table: Literal["rows", "hosts", "ladder"]
    name: str
    """Name of the row, or of the workload whose ladder it is."""
    mode: str = ""
    """Name of the rung, or where a row with an H200's host is scored."""


ON_DEVICE, ELSEWHERE = "on the device", "elsewhere"
READER = "qwen-image"
"""Workload whose shipped recipe has a reward without a network, on the CPU."""
SLOWED = ("qwen-image", "flux")
"""Workloads whose smallest calls take an H200's host longer than an H100; all of the others' are
as charged."""
PARTS = [
    *(Part("rows", row.name) for row in ROWS),
    *(Part("hosts", row.name, ON_DEVICE) for row in ROWS if row.workload in SLOWED),
    *(Part("hosts", row.name, ELSEWHERE) for row in ROWS if row.workload == READER),
    *(Part("ladder", workload, mode) for workload in WORKLOADS for mode in MODES_OF_LADDER),
]


def forecasts(kept: Path, say: Say) -> dict[str, list[dict[str, Any]]]:
    """Makes every forecast that ``kept`` does not have, and adds it there; returns all of them.

    Args:
        kept: a file of lines, each a part and what was found.
        say: is told of each that is found.
    """
    found = dict(_read(kept))
    wanted = sorted((part for part in PARTS if part not in found), key=_length, reverse=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool, kept.open("a") as file:
        making = {pool.submit(forecast, part): part for part in wanted}
        for done in as_completed(making):
            part = making[done]
            found[part] = done.result()
            file.write(json.dumps([part, found[part]]) + "\n")
            file.flush()
            name = " ".join(filter(None, part[1:]))
            say(f"{len(found)} of {len(PARTS)}: {name}, {found[part]['step_seconds']} s")
    return {
        table: [found[part] for part in PARTS if part.table == table]
        for table in ("rows", "hosts", "ladder")
    }


def forecast(part: Part) -> dict[str, Any]:
    """Simulates one part at full scale."""
    if part.table == "ladder":
        return rung(part.name, part.mode)
    row = row_of(part.name)
    if part.table == "hosts":
        return {"row": row.name, "scored": part.mode, **_figures(row, _with_host(row, part.mode))}
    figures = _figures(row, row.profile)
    return {
        **about(row),
        "split": str(row.split),
        "pass_rows": {k: pass_rows(row.profile, k, "member") for k in present(row.split.trainer)},
        **figures,
        **{
            f"over_{name.replace('-', '_')}": round(seconds / figures["step_seconds"], 3)
            for name, seconds in baselines(row).items()
        },
    }


def _with_host(row: Row, scored: str) -> Profile:
    """Returns the row's costs on hosts like that of docs/gpu-day."""
    rollout = row.profile.rollout
    if scored == ELSEWHERE:
        rollout = rollout.model_copy(update={"reward_seconds": 0.0})
    return row.profile.model_copy(update={"host": H200_HOST, "rollout": rollout})


def _figures(row: Row, profile: Profile) -> dict[str, float]:
    """Simulates a row by these costs; a step has its share of what its run waits for encoders."""
    mode = Chosen(row.way, row.split, row.recipe.run_schedule)
    warm_up, batches = FORECAST_BATCHES[row.way]
    found = predicted(profile, mode, warm_up=warm_up, batches=batches)
    seconds = found.step_seconds + waits_for_prompts(row.recipe, profile) / row.recipe.run.steps
    floor = floor_seconds(profile, row.devices)
    return {
        "floor_seconds": round(floor, 3),
        "step_seconds": round(seconds, 3),
        "utilisation": round(floor / seconds, 4),
    }


def baselines(row: Row) -> dict[str, float]:
    """Returns the seconds of the models of colocated systems, which have no text encoders on their
    devices."""
    plain = load_profile(row.profile.name)
    return {name: colocated_seconds(plain, row.devices, name) for name in ("2026-06", "tuned")}


def about(row: Row) -> dict[str, Any]:
    """Returns what is known of a row before it is run."""
    return {
        "row": row.name,
        "recipe": f"bench/recipes/{row.path.name}",
        "hosts": row.hosts,
        "way": row.way,
    }


def _read(kept: Path) -> Iterator[tuple[Part, dict[str, Any]]]:
    for line in kept.read_text().splitlines() if kept.is_file() else ():
        part, found = json.loads(line)
        yield Part(*part), found


def _length(part: Part) -> int:
    """Returns roughly how long a part takes: the longest ones go first, so that all cores end
    together."""
    if part.table == "ladder":
        return 30
    row = row_of(part.name)
    return sum(row.devices.values()) * sum(FORECAST_BATCHES[row.way]) // 16
