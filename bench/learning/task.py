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


def _small(quality: "Quality") -> float:
    """The reward with the judges in place of its scorer: accuracy, and 0.05 for each byte that a
    sample takes less as a JPEG file than `USUAL_BYTES`."""
    saved = USUAL_BYTES + quality.rewards["size"] * BYTES_PER_SCORE
    return _accuracy(quality) + PER_BYTE * saved


BYTES_PER_SCORE = 5e5
"""The scorer gives kilobytes over -500."""
PER_BYTE = 0.05
USUAL_BYTES = 393.0
"""Mean bytes of a sample of the base model."""


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
    title="Digits: the probability that a classifier gives the requested digit",
    height=_accuracy,
    goals=(0.90, 0.95),
    goal_words=("0.90", "0.95"),
)
SMALL_FILES = Task(
    name="small-files",
    recipe=HERE / "small-files.toml",
    always=IN_ONE_THREAD | EVALUATED,
    title="Small files: the requested digit, and 0.05 for each byte less as JPEG",
    height=_small,
    goals=(0.9, 1.0),
    goal_words=("0.9", "1.0"),
    keeps_accuracy=True,
)
TASKS = {task.name: task for task in (DIGITS, SMALL_FILES)}
