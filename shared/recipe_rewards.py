"""The tables of a recipe that say what samples are worth: to training, and to the evaluation."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from shared.contracts import Token
from shared.recipe_table import NonNegative, Positive, Table, check_unique


class Scorer(Table):
    name: Token
    type: Token
    """Which scorer; docs/rewards.md lists them."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    folder: Path | None = None
    """Where its weights are; relative to the recipe."""
    url: str | None = None
    """Of the server of a remote scorer."""
    patience: Annotated[float, Field(gt=0, le=3600)] = 120.0
    """Seconds that a remote scorer may be without an answer."""


class Reward(Table):
    workers: Positive = 1
    threads: Positive = 1
    scorers: tuple[Scorer, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        check_unique("scorers", [scorer.name for scorer in self.scorers])
        return self


class Evaluation(Table):
    """What `digenrl report` measures before and after, by ODE and at a fixed seed."""

    seed: NonNegative = 0
    samples_per_prompt: Positive = 4
    prompts: Path | None = None
    """Held out, read as `data.prompts` is; relative to the recipe. Without it, training's."""
    scorers: tuple[Scorer, ...] = ()
    """Gold rewards: measured before and after, and never trained on."""
    digits: Path | None = None
    """Folder of the held-out judges of handwritten digits, never used in training; relative to
    the recipe. Without it only the training rewards are compared."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        check_unique("scorers", [scorer.name for scorer in self.scorers])
        return self
