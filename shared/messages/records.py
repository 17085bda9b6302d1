"""Base types of messages, and of the records of a run in its store."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.errors import UserError
from shared.limits import MAX_TEXT

_TOKEN = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
TOKEN_PATTERN = rf"^{_TOKEN}$"
"""Pattern for pydantic, whose regular expressions take ``$`` as the very end, unlike Python's."""
TOKEN_WORDS = "1 to 64 letters, digits, '-' and '_', starting with a letter or digit"

Count = Annotated[int, Field(ge=0, lt=2**63)]
"""Number from zero that fits the 64 bits of the wire."""
Token = Annotated[str, Field(pattern=TOKEN_PATTERN)]
"""A name that becomes part of subjects, keys and paths."""
HOME = "home"
"""Site of workers that name none."""
Site = Annotated[Token, Field(exclude_if=lambda site: site == HOME)]
"""Name of the hosts that have a fast network among them."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Level = Literal["exact", "int8", "int4"]
"""How many bits a number takes on its way: all, or rounded to 8 or 4."""
ChosenLevel = Literal[Level, "auto"]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def wire_name(name: str) -> Any:
    """Give a field another name on the wire than in Python: what is stored and sent never changes.

    For `Annotated`: ``loan_number: Annotated[Count, wire_name("generation")]``.
    """
    return Field(validation_alias=name, serialization_alias=name)


class Record(BaseModel):
    """Is immutable, strict and closed to unknown fields: a misspelt field fails at the sender."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_by_name=True, serialize_by_alias=True
    )


class Policy(Record):
    """Names a policy version and the weights that it stands for."""

    version: Count
    weights_digest: Digest


class ObjectRef(Record):
    """Names an object in the store, with the size and digest that its reader must find."""

    key: Annotated[str, Field(max_length=512)]
    sha256: Digest
    size: Count
    change: "WeightsChange | None" = Field(default=None, exclude_if=lambda value: value is None)
    """Change of these weights since another version, if the change is stored as well."""


class WeightsChange(Record):
    """Names the rounded change of weights: a device with the base adds it, and has the same bits
    as a device that reads the weights."""

    base: Digest
    """Digest of the weights that it is added to."""
    ref: ObjectRef


class ExchangeLevels(Record):
    """How what made a version was rounded on its way."""

    down: Level = "exact"
    """The change from the version before."""
    up: Level = "exact"
    """The sums of gradients, in the batch's last update."""


def is_none(value: object) -> bool:
    """Leave an absent value out of a record (`exclude_if`)."""
    return value is None


def is_empty(value: object) -> bool:
    """Leave an empty text or list, 0 and False out of a record (`exclude_if`)."""
    return not value


def token(value: str, *, field: str) -> str:
    """Return ``value`` if it may be part of a subject, key or path.

    Raises:
        UserError: naming ``field``, if it may not.
    """
    if re.fullmatch(_TOKEN, value) is None:
        raise UserError(f"{field}: {value!r} is not a name; use {TOKEN_WORDS}")
    return value
