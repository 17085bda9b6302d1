"""Writes to Weights & Biases: online, or with WANDB_MODE=offline to files for `wandb sync`.

Online, the service reports which steps it has. Offline, a file beside the runs stores the next
step.
"""

from pathlib import Path

import wandb

from shared.errors import UserError
from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord


class WeightsAndBiases:
    """Implements `digenrl.follow.steps.Writer` for the run with the id ``label``."""

    def __init__(self, project: str, label: str, recipe: Recipe) -> None:
        try:
            self._run = wandb.init(
                project=project,
                id=label,
                name=recipe.run.name,
                resume="allow",
                config=recipe.model_dump(mode="json"),
            )
        except wandb.Error as error:
            raise UserError(f"--wandb: {str(error).splitlines()[0]}") from error
        self._kept = Path(self._run.dir).parents[1] / f"{label}.next-step"
        self.next_step = max(1, self._kept_step() if self._run.offline else self._run.step)

    def write(self, record: CommitRecord) -> None:
        step = record.policy.version
        self._run.log(dict(record.metrics), step=step)
        self.next_step = step + 1
        if self._run.offline:
            self._kept.write_text(str(self.next_step))

    def close(self) -> None:
        self._run.finish()

    def _kept_step(self) -> int:
        return int(self._kept.read_text()) if self._kept.exists() else 1
