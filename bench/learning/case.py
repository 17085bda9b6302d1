"""One case: a choice on a task with one seed, learned and judged along the way."""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.learning.choices import NOTHING, Choice
from bench.learning.task import Task
from shared.learning.algorithms import ALGORITHMS
from shared.recipe.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from digenrl.evaluation.records import Quality

EVERY = 2
"""Optimizer steps between two evaluations."""
TWICE = 2
JUDGED = {
    "reward": "reward", "proxy_accuracy": "proxy", "gold_accuracy": "gold",
    "gold_svm_accuracy": "svm", "gold_worst_digit": "worst", "gold_nn": "nn", "gold_div": "div",
}  # fmt: skip
"""Fields of `Quality` and their names in results."""


@dataclass(frozen=True, slots=True)
class Case:
    task: Task
    choice: Choice
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task.name}/{self.choice.name}/{self.seed}"

    @property
    def file(self) -> str:
        return f"{self.task.name}.{self.choice.name}.{self.seed}.json"

    def recipe(self) -> Recipe:
        """Raises UserError if the recipe does not know a key of the choice."""
        return recipe_of(self.task, self.choice, self.seed)


def recipe_of(task: Task, choice: Choice, seed: int) -> Recipe:
    """Reads the task's baseline with the changes of a choice."""
    tables = as_tables({**task.always, **changes_of(choice), "run.seed": seed})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.json"
        path.write_text(json.dumps({"base": str(task.recipe), **tables}))
        return load_recipe(path)


def changes_of(choice: Choice) -> dict[str, Any]:
    """Returns the keys that a choice changes. A choice of a named algorithm begins from what the
    name implies: it keeps no value that the baseline has for another algorithm, unless it sets that
    value itself."""
    name = choice.changes.get("algorithm.name")
    return {**(ALGORITHMS[name].implies if name else {}), **choice.changes}


def as_tables(changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns keys of a recipe, "table.key", as the tables of a file."""
    tables: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        table, field = key.split(".")
        tables.setdefault(table, {})[field] = value
    return tables


def learn(case: Case) -> dict[str, Any]:
    """Runs a case; returns its result: every evaluation with what it had cost until then."""
    from bench.learning.loop import Learning

    recipe = case.recipe()
    learning, judged = Learning(recipe), judge(case.task)
    evaluations: list[dict[str, Any]] = []

    def evaluate(version: int) -> None:
        quality = judged(learning.weights()) if version else _base_quality(case.task)
        average = learning.average()
        evaluations.append({
            "version": version,
            "samples": version * recipe.batch.groups * recipe.batch.group_size,
            "units": dict(learning.work.units),
            "seconds": {name: round(s, 3) for name, s in learning.work.seconds.items()},
            **figures_of(case.task, quality),
            **({} if average is None else {"average": figures_of(case.task, judged(average))}),
        })  # fmt: skip

    evaluate(0)
    steps = []
    for version, metrics in enumerate(learning.steps(case.choice.steps), 1):
        steps.append({name: _rounded(metrics[name]) for name in case.choice.kept})
        if version % EVERY == 0 or version == case.choice.steps:
            evaluate(version)
            if case.choice.stops and _is_learned(evaluations, case.task.goals[-1]):
                break
    return {
        "task": case.task.name,
        "choice": case.choice.name,
        "seed": case.seed,
        "changes": changes_of(case.choice),
        "wanted_steps": case.choice.steps,
        "stops": case.choice.stops,
        "evaluations": evaluations,
        "steps": steps,
    }


def figures_of(task: Task, quality: "Quality") -> dict[str, float | None]:
    judged = {name: _rounded(getattr(quality, field)) for field, name in JUDGED.items()}
    return {"height": _rounded(task.height(quality)), **judged}


@cache
def judge(task: Task) -> "Callable[[bytes], Quality]":
    """Returns what judges packed weights on the task's fixed noise; loaded once per process."""
    from digenrl.evaluation.samples import Judges, PromptSampler
    from shared.diffusion.sampling.tensors import unpack

    recipe = recipe_of(task, NOTHING, seed=0)
    sampler, judges = PromptSampler(recipe), Judges(recipe)
    return lambda weights: judges.quality(sampler.sample(unpack(weights)))


@cache
def _base_quality(task: Task) -> "Quality":
    """Returns the figures of the model before training, the same whatever the choice and seed."""
    from bench.learning.loop import Learning

    return judge(task)(Learning(recipe_of(task, NOTHING, seed=0)).weights())


def _is_learned(evaluations: list[dict[str, Any]], goal: float) -> bool:
    newest = evaluations[-TWICE:]
    return len(newest) == TWICE and all(each["height"] >= goal for each in newest)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def settings(case: Case) -> dict[str, Any]:
    """Returns what a stored result must agree with for the case to be done."""
    return {"changes": changes_of(case.choice), "wanted_steps": case.choice.steps}
