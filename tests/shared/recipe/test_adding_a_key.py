"""A key of the recipe, and one of its schedule, are added to a copy of the product as CONTRIBUTING
says: a field, and the decision that reads it."""

from pathlib import Path

from tests.paths import DIGITS
from tests.product_copy import Edits, copy_product, run_in_copy

RECIPE_KEY: Edits = {
    "shared/recipe/tables.py": (
        (
            "    keep_every: Positive | None = None\n",
            "    keep_first: NonNegative = 0\n    keep_every: Positive | None = None\n",
        ),
    ),
    "shared/run/retention.py": (
        ("    keep_last: int = 3\n", "    keep_last: int = 3\n    keep_first: int = 0\n"),
        ("wanted = {0, ", "wanted = {0, *range(self.keep_first), "),
        ("return Retention(\n", "return Retention(\n        keep_first=recipe.run.keep_first,\n"),
    ),
}

SCHEDULE_KEY: Edits = {
    "shared/recipe/schedule.py": (
        (
            '    tsp_steps: Positive | Literal["auto"] = "auto"\n',
            '    smallest: Positive = 1\n    tsp_steps: Positive | Literal["auto"] = "auto"\n',
        ),
    ),
    "services/scheduler/core/unissued.py": (
        ("return max(_min_size(plan),", "return max(plan.schedule.smallest, _min_size(plan),"),
    ),
}
PROGRAM = """
from pathlib import Path
from services.scheduler.core.unissued import next_size
from services.scheduler.costs.profile import load_profile
from digenrl.planning.planner import plan_split
from services.scheduler.costs.recipes import batch_shape
from services.scheduler.shell.service import plan_from_recipe
from services.scheduler.sim.profiled import simulate, steady_plan
from shared.recipe.recipe import load_recipe
from shared.run.retention import retention_from

recipe = load_recipe(Path("recipe.toml"))
print(sorted(retention_from(recipe).kept(9)))
schedule = recipe.run_schedule
shape = batch_shape(recipe)
plans = plan_from_recipe(recipe), steady_plan(shape, batches=1, schedule=schedule)
sizes = [next_size(plan, full=8, samples=2, num_queues=8) for plan in plans]
pools = {"rollout": {"H100": 2}, "trainer": {"H100": 2}}
simulate(load_profile("flux1-dev"), **pools, schedule=schedule, batches=1)
best = plan_split(load_profile("flux1-dev"), {"H100": 4}, schedule, effort=0.01).best
print(sizes, best.schedule.smallest)
"""


def test_a_key_of_a_recipe_and_one_of_its_schedule_take_two_files_each(tmp_path: Path) -> None:
    copy_product(tmp_path, RECIPE_KEY, SCHEDULE_KEY)
    lines = '[run]\nkeep_first = 3\n[schedule]\nfragment_size = "auto"\nsmallest = 5'
    (tmp_path / "recipe.toml").write_text(f'base = "{DIGITS}"\n{lines}')
    assert run_in_copy(tmp_path, PROGRAM) == ["[0, 1, 2, 7, 8, 9]", "[5, 5] 5"]
