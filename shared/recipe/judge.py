"""The table of a recipe that says how a vision-language model is asked for a score."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, JsonValue, model_validator

from shared.recipe.table import Positive, Table

QUESTION = """\
This picture was made for the following description.

{prompt}

Judge how well the picture shows what the description asks for, and how well it is made. Answer \
with one number from 0 (it fails at both) to {highest} (perfect at both), and nothing else."""


class Judge(Table):
    model: Annotated[str, Field(min_length=1)]
    """As the endpoint calls it."""
    prompt: Annotated[str, Field(min_length=1)] = QUESTION
    """What is asked beside the image; {prompt} stands for the sample's, {highest} for the key."""
    highest: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    """The best number; the worst is 0. Scores are over it, from 0 to 1."""
    options: dict[str, JsonValue] = Field(default={"temperature": 0})
    """More of the request, as the endpoint knows it: max_tokens, seed, ..."""
    at_once: Annotated[Positive, Field(le=256)] = 8
    """Requests that a reward worker has under way."""
    key_env: Annotated[str, Field(min_length=1)] | None = None
    """Name of the environment variable that holds the API key. Without it and ``key_file``, none
    is sent."""
    key_file: Path | None = None
    """File that holds the API key and nothing else; relative to the recipe."""

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.key_env is not None and self.key_file is not None:
            raise ValueError("key_file: give key_env or key_file, not both")
        reserved = {"model", "messages", "stream"} & self.options.keys()
        if reserved:
            raise ValueError(f"options: {sorted(reserved)[0]} is not for options to say")
        return self
