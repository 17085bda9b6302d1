"""Objects that an image has to show, in the form of GenEval's prompts, and how many of them it
shows.

The conditions are defined by GenEval (Ghosh et al. 2023, evaluate_images.py): a minimum number of
objects of a class, all in a colour, each in a direction from each object of an earlier entry; and a
maximum number of objects of a class. GenEval counts an image as right or wrong; the score here is
the share of the conditions that hold.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

INCLUDE, EXCLUDE = "include", "exclude"
"""Metadata of a prompt: lists, or the JSON of lists as texts."""
COLOURS = (
    "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white",
)  # fmt: skip
Direction = Literal["left of", "right of", "above", "below"]
MAX_OVERLAP = 0.1
"""Share of two boxes' widths and heights by which their middles may overlap, in no direction."""
MIN_DIRECTION_SHARE = 0.5
"""Least share of the distance between two middles that lies in a direction."""


class WantedObjects(BaseModel):
    """Some objects that an image has to show, or must not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(alias="class", min_length=1, max_length=100)]
    count: Annotated[int, Field(ge=1, le=100)] = 1
    color: Literal[COLOURS] | None = None  # type: ignore[valid-type]
    position: tuple[Direction, Annotated[int, Field(ge=0)]] | None = None
    """Direction, and the earlier entry that it is seen from, counted from 0."""


@dataclass(frozen=True, slots=True)
class Requirements:
    include: tuple[WantedObjects, ...]
    exclude: tuple[WantedObjects, ...] = ()


@dataclass(frozen=True, slots=True)
class DetectedObject:
    """Describes an object that a detector has found."""

    name: str
    score: float
    box: tuple[float, float, float, float]
    """Left, top, right, bottom, in pixels."""
    colour: str | None = None
    """The most likely of `COLOURS`, if the prompt names a colour."""


_LIST = TypeAdapter(tuple[WantedObjects, ...])


def parse_requirements(metadata: Mapping[str, object]) -> Requirements:
    """Read what a prompt's metadata ask for.

    Raises:
        ValueError: one line that names the metadata and what is wrong.
    """
    if INCLUDE not in metadata:
        raise ValueError(
            f"metadata.{INCLUDE}: missing; list the objects to show, as "
            '[{"class": "cat", "count": 2}]'
        )
    include = _read(INCLUDE, metadata[INCLUDE])
    for number, each in enumerate(include):
        if each.position is not None and each.position[1] >= number:
            raise ValueError(
                f"metadata.{INCLUDE}: entry {number}: position is seen from entry "
                f"{each.position[1]}, which has to be an earlier one"
            )
    if not include:
        raise ValueError(f"metadata.{INCLUDE}: is empty; name an object")
    return Requirements(include, _read(EXCLUDE, metadata.get(EXCLUDE, "[]")))


def _read(key: str, text: object) -> tuple[WantedObjects, ...]:
    try:
        plain: Any = json.loads(text) if isinstance(text, str) else text
        return _LIST.validate_python(plain)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise ValueError(f"metadata.{key}: entry {where}: {fault['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"metadata.{key}: is no JSON list, as a text ({error})") from error


def share_met(wanted: Requirements, objects: Sequence[DetectedObject]) -> float:
    """Return the share, from 0 to 1, of the conditions that the objects of an image meet."""
    results = [*_included(wanted.include, objects), *_left_out(wanted.exclude, objects)]
    return math.fsum(results) / len(results)


def _included(
    include: Sequence[WantedObjects], objects: Sequence[DetectedObject]
) -> Iterator[bool]:
    groups: list[Sequence[DetectedObject] | None] = []
    for each in include:
        best = _most_certain(each.name, objects)[: each.count]
        results = [len(best) >= each.count]
        if each.color is not None:
            in_colour = sum(one.colour == each.color for one in best)
            results.append(in_colour >= each.count)
        if each.position is not None:
            direction, other = each.position
            results.append(all(results) and _all_stand(best, direction, groups[other]))
        groups.append(best if all(results) else None)
        yield from results


def _left_out(
    exclude: Sequence[WantedObjects], objects: Sequence[DetectedObject]
) -> Iterator[bool]:
    for each in exclude:
        yield len(_most_certain(each.name, objects)) < each.count


def _most_certain(name: str, objects: Sequence[DetectedObject]) -> list[DetectedObject]:
    """Return the objects of a class, the surest first."""
    return sorted((one for one in objects if one.name == name), key=lambda one: -one.score)


def _all_stand(
    objects: Sequence[DetectedObject], direction: Direction, others: Sequence[DetectedObject] | None
) -> bool:
    if others is None:
        return False
    return all(direction in directions(one.box, other.box) for one in objects for other in others)


Box = tuple[float, float, float, float]


def directions(box: Box, other: Box) -> set[Direction]:
    """Return the directions in which a box is seen from another (GenEval's relative_position)."""
    offsets, revised = [], []
    for low, high in ((0, 2), (1, 3)):
        offset = (box[low] + box[high] - other[low] - other[high]) / 2
        sizes = abs(box[high] - box[low]) + abs(other[high] - other[low])
        offsets.append(offset)
        revised.append(math.copysign(max(abs(offset) - MAX_OVERLAP * sizes, 0), offset))
    if max(map(abs, revised)) < 1e-3:
        return set()
    right, down = (each / math.hypot(*offsets) for each in revised)
    shares: dict[Direction, float] = {
        "left of": -right, "right of": right, "above": -down, "below": down,
    }  # fmt: skip
    return {name for name, share in shares.items() if share > MIN_DIRECTION_SHARE}
