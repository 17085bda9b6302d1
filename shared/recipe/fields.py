"""Base types of a recipe's tables."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

from shared.recipe.files import resolved

Positive = Annotated[int, Field(gt=0, le=2**31)]
NonNegative = Annotated[int, Field(ge=0, le=2**31)]
Sigma = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Table(BaseModel):
    # JSON, in which a recipe is stored, has no infinity.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    def absolute(self, base: Path, *keys: str) -> Self:
        """Return the table with the paths of these keys, relative to ``base``, made absolute."""
        paths = {key: getattr(self, key) for key in keys}
        return self.model_copy(
            update={key: path and resolved(path, base) for key, path in paths.items()}
        )


def check_unique(field: str, names: list[str]) -> None:
    """Raises ValueError, which names the field, if a name is there twice."""
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{field}: the name {twice[0]} is used twice")


def check_divides(part: int, whole: int, field: str, whole_name: str) -> None:
    """Raises ValueError, which names the nearest divisors, unless ``part`` divides ``whole``."""
    if whole % part == 0:
        return
    divisors = [value for value in range(1, whole + 1) if whole % value == 0]
    nearest = sorted(sorted(divisors, key=lambda value: abs(value - part))[:2])
    raise ValueError(
        f"{field}: {part} does not divide {whole_name} ({whole}); nearest that do: "
        + " and ".join(str(value) for value in nearest)
    )


def check_at_most(value: int | str, limit: int, field: str, whole_name: str) -> None:
    """Raises ValueError if a number is above the limit."""
    if isinstance(value, int) and value > limit:
        raise ValueError(f"{field}: {value} is more than {whole_name}; at most {limit}")
