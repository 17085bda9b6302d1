"""What the tables of a recipe are made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0, le=2**31)]
NonNegative = Annotated[int, Field(ge=0, le=2**31)]
Sigma = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def check_unique(field: str, names: list[str]) -> None:
    """Raises ValueError, which names the field, if a name is there twice."""
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{field}: the name {twice[0]} is used twice")
