"""What is learned in the bench: a baseline recipe, and what is judged on samples of fixed noise."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

IN_ONE_THREAD = {
    "rollout.threads": 1,
    "trainer.threads": 1,
    "evaluation.threads": 1,
    "trainer.deterministic": True,
}
"""Two processes share two cores; chunks that are not measured give the same curve each time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    name: str
    recipe: Path
    """The baseline, as it stands."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the baseline that every choice has as well: how it is judged."""
    goals: tuple[float, ...]
    """Values of the learning curve whose cost is told; the last is what is to be reached."""
    title: str
    """What it is, above its table."""


EVALUATED = {
    "evaluation.samples_per_prompt": 10,
    "evaluation.steps": 10,
    "evaluation.sigmas": "linear",
}
"""400 samples by ten equal steps, whatever steps a choice trains with."""

DIGITS = Task(
    name="digits",
    recipe=HERE / "digits.toml",
    always=IN_ONE_THREAD | EVALUATED,
    goals=(0.90, 0.95),
    title="Digits: the probability that a classifier gives the digit asked for",
)
TASKS = {task.name: task for task in (DIGITS,)}
