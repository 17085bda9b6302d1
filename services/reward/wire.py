"""Scoring over HTTP: what `POST /score` takes and gives, as msgpack (docs/rewards.md)."""

import math
from typing import Any, Literal, Self, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.reward import limits
from shared.errors import ContractError
from shared.messages.records import is_empty

MSGPACK = "application/msgpack"
DTYPES = {"uint8": np.uint8, "float32": np.float32}

Array = npt.NDArray[Any]
T = TypeVar("T", bound="Wire")


class Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Pixels(Wire):
    """An image (C, H, W), uint8."""

    shape: tuple[int, int, int]
    data: bytes

    def array(self) -> Array:
        """Returns the pixels; raises ContractError if they do not fit the shape."""
        if min(self.shape) < 1 or math.prod(self.shape) != len(self.data):
            raise ContractError(
                f"source_images: {len(self.data)} bytes are no image of shape {list(self.shape)}"
            )
        return np.frombuffer(self.data, np.uint8).reshape(self.shape)


class WireSample(Wire):
    """One sample."""

    id: str = Field(min_length=1, max_length=200)
    """Name of the item, which its result has too."""
    dtype: Literal["uint8", "float32"] = "uint8"
    """uint8: pixels; float32: latents."""
    shape: tuple[int, ...] = Field(min_length=3, max_length=4)
    """(C, H, W), or (F, C, H, W) of a video."""
    data: bytes
    """Little-endian, rows last."""
    metadata: dict[str, Any] = {}
    """Metadata of its prompt."""
    source_images: tuple[Pixels, ...] = Field(default=(), max_length=8, exclude_if=is_empty)
    """The source images of an edit; left out without any."""

    def array(self) -> Array:
        """Returns the data in their shape; raises ContractError if they do not fit it."""
        kind = np.dtype(DTYPES[self.dtype]).newbyteorder("<")
        if min(self.shape) < 1 or math.prod(self.shape) * kind.itemsize != len(self.data):
            raise ContractError(
                f"data: {len(self.data)} bytes are no {self.dtype} of shape {list(self.shape)}"
            )
        return np.frombuffer(self.data, kind).reshape(self.shape)


class ScoreRequest(Wire):
    items: tuple[WireSample, ...] = Field(min_length=1, max_length=limits.MAX_ITEMS)

    @model_validator(mode="after")
    def _ids_differ(self) -> Self:
        if len({item.id for item in self.items}) < len(self.items):
            raise ValueError("items: an id is used twice")
        return self


class WireFault(Wire):
    type: Literal["bad-item", "scoring"]
    """bad-item: it would fail again. scoring: the scorer failed."""
    detail: str


class WireResult(Wire):
    id: str
    score: float | None = Field(default=None, allow_inf_nan=False)
    error: WireFault | None = None

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if (self.score is None) == (self.error is None):
            raise ValueError("a result has a score or an error")
        return self


class ScoreResponse(Wire):
    results: tuple[WireResult, ...]


def encode(message: Wire) -> bytes:
    packed: bytes = msgpack.packb(message.model_dump())
    return packed


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a message; raises ContractError, which names the field, if it is invalid."""
    try:
        return kind.model_validate(msgpack.unpackb(body))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ContractError(f"{where}: {first['msg']}".removeprefix(": ")) from error
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ContractError(f"the body is not {MSGPACK}: {error}") from error
