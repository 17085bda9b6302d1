"""Each technique on top of those before, on 32 H100 as four hosts of 8: forecasts of the simulator.

Every rung is the best without the techniques of later ones: the planner chooses split and fragment
size. No rung but the last is measured with services.
"""

from typing import Any

from bench.cluster.modes import MODES, Chosen, predicted
from bench.cluster.rows import Row
from bench.cluster.shipped import shipped
from digenrl.planning.planner import plan_split
from digenrl.planning.runnable import HOST_GPUS, as_toml, recipe_keys
from services.scheduler.costs.floor import floor_seconds

RUNGS = ("sequential", "gap", "tsp", "tag", "one-step")
"""All generated and then trained; groups as they come (GAP); steps of a sample on several
devices (TSP); members lent (TAG); one step ahead."""
FLUID = "fluid"
MODES_OF_LADDER = (*RUNGS, FLUID)
POOL = "32"


def rung(workload: str, name: str) -> dict[str, Any]:
    """Returns a rung of a workload, and the seconds that it takes."""
    row = Row(workload, POOL, "on-policy")
    if name == FLUID:
        fluid = Chosen(FLUID, row.split, row.recipe.run_schedule)
        keys = {"schedule.mode": FLUID, "trainer.devices": row.recipe.trainer.devices}
        return _figures(row, fluid, as_toml(keys))
    costs = shipped(row.profile, row.devices)
    best = plan_split(costs, row.devices, MODES[name], host_gpus=HOST_GPUS).best
    keys = recipe_keys(best.split, best.schedule)
    return _figures(row, Chosen(name, best.split, best.schedule), as_toml(keys))


def _figures(row: Row, mode: Chosen, keys: str) -> dict[str, Any]:
    seconds = predicted(row.profile, mode).step_seconds
    return {
        "workload": row.profile.name,
        "mode": mode.name,
        "split": str(mode.split),
        "keys": keys,
        "step_seconds": round(seconds, 3),
        "utilisation": round(floor_seconds(row.profile, row.devices) / seconds, 4),
    }
