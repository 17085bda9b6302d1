"""Lists what recipes may name on this host: scorers and model families, ours and of packages."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint

from services.reward import kinds
from shared.errors import UserError
from shared.models import plugins
from shared.models.families import FAMILIES

OURS = "digenrl"


@dataclass(frozen=True, slots=True)
class AvailableType:
    name: str
    package: str
    """Name and version of the package that brings it."""
    note: str
    """Its requirements or results, or why it cannot be used."""


def listed_rewards() -> list[AvailableType]:
    """Return all types of scorers."""

    def note(type: str) -> str:
        kind = kinds.kind_named(type)
        needs = f"needs {kind.needs}" if kind.needs else ""
        return ", ".join(filter(None, [needs, f"scores {kind.takes}"]))

    return _listed(list(kinds.KINDS), plugins.brought(kinds.GROUP), note)


def listed_families() -> list[AvailableType]:
    """Return all model families."""

    def note(pipeline: str) -> str:
        spec = plugins.family_named(pipeline)
        assert spec is not None
        output = "videos" if spec.makes_videos else "images"
        return f"makes {output}" + (" from an image and a text" if spec.takes_image else "")

    return _listed(list(FAMILIES), plugins.brought(), note)


def shown(listed: Sequence[AvailableType], *, as_json: bool) -> str:
    if as_json:
        return json.dumps([asdict(each) for each in listed], indent=1)
    names, packages = (
        max(len(getattr(each, field)) for each in listed) for field in ("name", "package")
    )
    lines = (f"{e.name:{names}}  {e.package:{packages}}  {e.note}".rstrip() for e in listed)
    return "\n".join(lines)


def _listed(
    ours: Sequence[str], packages: Mapping[str, EntryPoint], note: Callable[[str], str]
) -> list[AvailableType]:
    types = [AvailableType(name, OURS, note(name)) for name in sorted(ours)]
    for name, point in sorted(packages.items()):
        package = plugins.package_name(point)
        if name in ours:
            types.append(AvailableType(name, package, "not used: the name is one of ours"))
            continue
        try:
            types.append(AvailableType(name, package, note(name)))
        except UserError as error:
            types.append(AvailableType(name, package, f"cannot be used: {error}"))
    return types
