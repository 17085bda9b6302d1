"""Names for a package that brings a model family or scorers, by entry points of its distribution:

    [project.entry-points."digenrl.families"]
    OrchidPipeline = "digenrl_orchid.family:ORCHID"       # a FamilySpec, by its pipeline
    [project.entry-points."digenrl.scorers"]
    ink = "digenrl_orchid.scorers:INK"                    # a ScorerKind, or one with a method
        score
    [project.entry-points."digenrl.tiny_models"]
    OrchidPipeline = "digenrl_orchid.tiny:save"           # saves a small random model

These modules are imported in DigenRL's own processes. There they find the names of this module; a
process of another program cannot import them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.reward.kinds import ScorerKind
    from shared.diffusion.families.base import Family
    from shared.models.families import FAMILIES, FamilySpec

__all__ = ["FAMILIES", "Family", "FamilySpec", "ScorerKind"]
MODULES = {
    "FAMILIES": "shared.models.families",
    "Family": "shared.diffusion.families.base",
    "FamilySpec": "shared.models.families",
    "ScorerKind": "services.reward.kinds",
}


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return getattr(import_module(MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
