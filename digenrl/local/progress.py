"""The progress of a run, as `digenrl up` notes it in the run's folder."""

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from digenrl.local.runs import in_progress

STATE_JSON = "state.json"
"""File in a run's folder."""
ACTIVE_STATES, FINAL_STATES = ("waiting", "running", "paused"), ("finished", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class RunProgress:
    state: str = "interrupted"
    """Phase of the run, or "reporting" from the last step until its report is made."""
    step: int = 0
    """Optimizer steps committed."""
    steps: int | None = None
    """Optimizer steps that the recipe asks for."""
    reward: float | None = None
    """Mean reward of the newest committed batch."""

    @classmethod
    def from_view(cls, run: dict[str, Any]) -> "RunProgress":
        """Return the progress of a run as the scheduler's API shows it."""
        state = "reporting" if run["phase"] == "finished" else run["phase"]
        return cls(state, run["step"], run["steps"], run["reward_mean"])

    def __str__(self) -> str:
        return f"{self.state} at step {self.step}{f' of {self.steps}' if self.steps else ''}"

    def write(self, folder: Path) -> None:
        """Note it at once and whole, as this process may be killed; not on a full disk."""
        fresh = folder / f"{STATE_JSON}.new"
        with contextlib.suppress(OSError):
            fresh.write_text(json.dumps(asdict(self)))
            fresh.replace(folder / STATE_JSON)


def read_progress(folder: Path) -> RunProgress:
    """Return the progress of a run; "interrupted" if it has neither ended nor is in progress."""
    try:
        noted = RunProgress(**json.loads((folder / STATE_JSON).read_text()))
    except (OSError, ValueError, TypeError):
        noted = RunProgress()
    if noted.state in FINAL_STATES or in_progress(folder):
        return noted
    return RunProgress("interrupted", noted.step, noted.steps, noted.reward)
