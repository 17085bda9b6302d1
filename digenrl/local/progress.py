"""The progress of a run, as `digenrl up` notes it in the run's folder."""

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from digenrl.local.runs import RECIPE_JSON, in_progress

STATE_JSON = "state.json"
"""File in a run's folder."""
GOING, ENDS = ("waiting", "running", "paused"), ("finished", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class Progress:
    state: str = "interrupted"
    """Phase of the run, or "reporting" from the last step until its report is made."""
    step: int = 0
    """Optimizer steps committed."""
    steps: int | None = None
    """Optimizer steps that the recipe asks for."""
    reward: float | None = None
    """Mean reward of the newest committed batch."""

    @classmethod
    def of(cls, run: dict[str, Any]) -> "Progress":
        """Return the progress of a run as the scheduler's API shows it."""
        state = "reporting" if run["phase"] == "finished" else run["phase"]
        return cls(state, run["step"], run["steps"], run["reward_mean"])

    def __str__(self) -> str:
        return f"{self.state} at step {self.step}{f' of {self.steps}' if self.steps else ''}"

    def write(self, folder: Path) -> None:
        """Note it if it has changed, at once and whole: this process may be killed."""
        path, text = folder / STATE_JSON, json.dumps(asdict(self))
        if not path.exists() or path.read_text() != text:
            fresh = path.with_suffix(".new")
            fresh.write_text(text)
            fresh.replace(path)


def progress_of(folder: Path) -> Progress:
    """Return the progress of a run; "interrupted" if it has neither ended nor goes on."""
    try:
        noted = Progress(**json.loads((folder / STATE_JSON).read_text()))
    except (OSError, ValueError, TypeError):
        noted = Progress()
    if noted.state in ENDS or in_progress(folder):
        return noted
    return Progress("interrupted", noted.step, noted.steps, noted.reward)


def resume_hint(folder: Path) -> str:
    """Say how the run in ``folder`` goes on by its own recipe."""
    words = ["digenrl", "up", str(folder / RECIPE_JSON), "--run", str(folder), "--resume"]
    return f"`{shlex.join(words)}` goes on with it"
