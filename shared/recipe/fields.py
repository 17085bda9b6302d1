"""What the tables of a recipe are made of."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.recipe.files import resolved

Positive = Annotated[int, Field(gt=0, le=2**31)]
NonNegative = Annotated[int, Field(ge=0, le=2**31)]
Sigma = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Renamed:
    """A key, or some of its values, that earlier releases called otherwise."""

    key: str
    to: str
    values: tuple[tuple[Any, Any], ...]
    """Old and new value; any other keeps its name."""

    def refuse(self, table: Mapping[str, Any]) -> None:
        """Raises ValueError, which says the new name, if the table has the old one."""
        if self.key not in table:
            return
        old, new = table[self.key], self._renamed(table[self.key])
        if self.key != self.to or new != old:
            quoted, wanted = (json.dumps(value, default=str) for value in (old, new))
            raise ValueError(f"{self.key}: {quoted} is renamed to {self.to} = {wanted}")

    def apply(self, table: dict[str, Any]) -> None:
        """Give the key and its value their new names."""
        if self.key in table:
            value = table.pop(self.key)
            table.setdefault(self.to, self._renamed(value))

    def _renamed(self, value: Any) -> Any:
        return next((new for old, new in self.values if old == value), value)


class Table(BaseModel):
    # JSON, in which a recipe is stored, has no infinity.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    RENAMED: ClassVar[tuple[Renamed, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _no_old_names(cls, plain: Any) -> Any:
        if isinstance(plain, Mapping):
            for each in cls.RENAMED:
                each.refuse(plain)
        return plain

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
