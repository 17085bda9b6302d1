"""What is learned in the bench: a baseline recipe, and what is judged on samples of fixed noise."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from digenrl.evaluation.records import Quality

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
    title: str
    """What it is, above its table."""
    height: "Callable[[Quality], float]"
    """What the learning curve shows of an evaluation; higher is better."""
    goals: tuple[float, ...]
    """Heights whose cost is told; the last is what is to be reached."""
    goal_words: tuple[str, ...]
    """Each goal as the table says it."""
    keeps_accuracy: bool = False
    """Whether accuracy is a guard, which may not fall below the base's, and not what is learned."""


def _accuracy(quality: "Quality") -> float:
    """The mean of two judges of other kinds, taught by the other half of the data."""
    assert quality.gold_accuracy is not None and quality.gold_svm_accuracy is not None
    return (quality.gold_accuracy + quality.gold_svm_accuracy) / 2


def _compression(quality: "Quality") -> float:
    """Minus the mean bytes of a sample as a JPEG file."""
    return quality.rewards["size"] * BYTES_PER_SCORE


BYTES_PER_SCORE = 5e5
"""The scorer gives kilobytes over -500."""


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
    title="Digits: the probability that a classifier gives the digit asked for",
    height=_accuracy,
    goals=(0.90, 0.95),
    goal_words=(".90", ".95"),
)
SMALL_FILES = Task(
    name="small-files",
    recipe=HERE / "small-files.toml",
    always=IN_ONE_THREAD | EVALUATED,
    title="Small files: few bytes as JPEG, and still the digit asked for",
    height=_compression,
    goals=(-390.0, -388.0),
    goal_words=("390 bytes", "388 bytes"),
    keeps_accuracy=True,
)
TASKS = {task.name: task for task in (DIGITS, SMALL_FILES)}
