"""Model families of installed packages, by entry points of the group `digenrl.families`: the name
is the name of the pipeline's class, and the value is a `FamilySpec`.

A package may also bring a small random model of its family, for `python -m bench check-family`: an
entry point of the group `digenrl.tiny_models` of the same name, a function that saves it.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from shared.errors import UserError
from shared.models.families import FAMILIES, FamilySpec

FAMILY_GROUP, TINY_MODEL_GROUP = "digenrl.families", "digenrl.tiny_models"


@cache
def brought(group: str = FAMILY_GROUP) -> Mapping[str, EntryPoint]:
    """Returns the entry points of installed packages, by name."""
    return {each.name: each for each in entry_points(group=group)}


def known_pipelines() -> list[str]:
    """Returns the names of all pipelines that can be trained."""
    return sorted({*FAMILIES, *brought()})


def family_named(pipeline: str) -> FamilySpec | None:
    """Return the family of a pipeline; None if it is unknown.

    Raises:
        UserError: if the package that has one cannot be imported, or brings something else.
    """
    if pipeline in FAMILIES:
        return FAMILIES[pipeline]
    point = brought().get(pipeline)
    if point is None:
        return None
    spec = imported(point, f"model.folder: the family {pipeline}")
    if not isinstance(spec, FamilySpec) or spec.pipeline != pipeline:
        raise UserError(
            f"model.folder: {point.value} of {package_name(point)} is no FamilySpec of {pipeline}; "
            "name the entry point like its pipeline"
        )
    return spec


def imported(point: EntryPoint, what: str) -> object:
    """Return what an entry point names; raises UserError, which begins with ``what``."""
    try:
        return point.load()
    except Exception as error:  # a package is anybody's code
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{what} of {package_name(point)} cannot be imported: {reason}") from error


def package_name(point: EntryPoint) -> str:
    """Returns name and version of the package that brings it."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.module
