"""Writes to Weights & Biases: online, or with WANDB_MODE=offline to files for `wandb sync`.

Online, the service reports which steps it has. Offline, a separate file next to the runs stores the
next step. A step can be added to until the next one is written: pictures of an evaluation join the
step that was written last, and those that are finished after the last step are not shown.
"""

from io import BytesIO
from pathlib import Path

import wandb
from PIL import Image

from digenrl.follow.panels import FinishedEvaluation, Panel
from shared.errors import UserError
from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord

PANELS = 8
"""Most evaluations that are shown at one step: those that were finished last."""


class WeightsAndBiases:
    """Implements `digenrl.follow.steps.MetricWriter` for the run with the id ``label``."""

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
        self._panels = self._kept.with_suffix(".panels")
        self._shown = self._panels.read_text().splitlines() if self._panels.exists() else []
        self._has_open_row = False
        self._row: dict[str, list[wandb.Image]] = {}
        kept = int(self._kept.read_text()) if self._kept.exists() else 1
        self.next_step = max(1, kept if self._run.offline else self._run.step)

    def write(self, record: CommitRecord) -> None:
        step, self._has_open_row = record.policy.version, True
        self._row = {}
        self._run.log(dict(record.metrics), step=step)
        self.next_step = step + 1
        if self._run.offline:
            self._kept.write_text(str(self.next_step))

    def needs(self, finished: FinishedEvaluation) -> bool:
        return self._has_open_row and f"{finished.tag} {finished.record.version}" not in self._shown

    def show(self, finished: FinishedEvaluation, panel: Panel) -> None:
        """Add the picture of an evaluation to the newest step: the service takes no older one."""
        picture = Image.open(BytesIO(panel.png))
        caption = f"version {finished.record.version}: {panel.caption}"
        image = wandb.Image(picture, caption=caption)
        row = self._row.setdefault(finished.tag, [])
        row.append(image)
        self._run.log({finished.tag: row[-PANELS:]}, step=self.next_step - 1)
        self._shown.append(f"{finished.tag} {finished.record.version}")
        self._panels.write_text("\n".join(self._shown))

    def close(self) -> None:
        self._run.finish()
