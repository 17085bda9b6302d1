"""The types of scorers that recipes name: ours, and those that installed packages bring.

A package brings one by an entry point of the group `digenrl.scorers`: its name is the type, and it
names a `ScorerKind`, or a class that is made without arguments and scores.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from shared.errors import UserError
from shared.models.brought import package_name
from shared.recipe.rewards import PYTHON

GROUP = "digenrl.scorers"
"""Entry points by which packages bring scorers."""


@dataclass(frozen=True, slots=True)
class ScorerKind:
    """Describes one type of scorer. To add one: CONTRIBUTING.md."""

    scorer: str
    """Import string, ``module:Class``. The scorer is constructed with the value named by ``needs``;
    a UserError begins with the wrong key of the recipe's table."""
    needs: Literal["folder", "url", "judge", "source"] | None = None
    """Keys of the recipe's table that the class takes: ``folder``; or ``url`` and ``remote``, or
    ``url`` and ``judge``, or ``source``, with ``patience``; or none."""
    files: tuple[str, ...] = ()
    """Files that the folder has to have, which are looked for before a run is started."""
    takes: Literal["images", "videos", "both"] = "images"
    extra: str = "reward"
    """Extra of pyproject.toml that installs the scorer's imports; empty without third-party
    imports."""


PACKAGES: Mapping[str, tuple[str, ...]] = {
    "reward": ("PIL", "safetensors", "torch"),
    "reward-models": ("torch", "transformers"),
    "ocr": ("onnxruntime", "rapidfuzz", "rapidocr"),
}
"""Packages that scorers import, by the extra that installs them."""
HEAD = "head.safetensors"
"""File of a Qwen2-VL's head."""


def _network(scorer: str, *files: str, takes: Literal["images", "videos"] = "images") -> ScorerKind:
    """Returns the kind of a scorer whose network transformers loads from a folder."""
    return ScorerKind(scorer, "folder", ("config.json", *files), takes, extra="reward-models")


def _video_align(scorer: str) -> ScorerKind:
    return _network(f"services.reward.scorers.video_align:{scorer}", HEAD, takes="videos")


KINDS: dict[str, ScorerKind] = {
    "aesthetic": _network("services.reward.scorers.aesthetic:Aesthetic", "aesthetic.safetensors"),
    "clip-score": _network("services.reward.scorers.clip:ClipScore"),
    "digit-edit": ScorerKind("services.reward.scorers.digits_edit:DigitEdit", needs="folder"),
    "digit-probability": ScorerKind(
        "services.reward.scorers.digits:DigitProbability", needs="folder"
    ),
    "hpsv2": _network("services.reward.scorers.clip:HpsV2"),
    "hpsv3": _network("services.reward.scorers.hpsv3:HpsV3", HEAD),
    "image-reward": _network(
        "services.reward.scorers.image_reward:ImageReward", "model.safetensors"
    ),
    "jpeg-incompressibility": ScorerKind("services.reward.scorers.jpeg:JpegIncompressibility"),
    "jpeg-compressibility": ScorerKind("services.reward.scorers.jpeg:JpegCompressibility"),
    "judge": ScorerKind("services.reward.scorers.judge:JudgeScorer", needs="judge"),
    "objects": _network("services.reward.scorers.objects:Objects"),
    "ocr": ScorerKind("services.reward.scorers.ocr:OcrText", extra="ocr"),
    "pick-score": _network("services.reward.scorers.clip:PickScore"),
    PYTHON: ScorerKind(
        "services.reward.scorers.python_file:PythonScorer", needs="source", takes="both"
    ),
    "remote": ScorerKind("services.reward.scorers.remote:RemoteScorer", needs="url", takes="both"),
    "temporal-consistency": ScorerKind(
        "services.reward.scorers.video:TemporalConsistency", takes="videos"
    ),
    "video-align": _video_align("VideoAlign"),
    "video-align-motion": _video_align("VideoMotion"),
    "video-align-quality": _video_align("VideoQuality"),
    "video-align-text": _video_align("VideoText"),
}
"""Our scorers, by the type that recipes name."""


@cache
def brought() -> Mapping[str, EntryPoint]:
    """Returns the entry points of installed packages, by the type that they name."""
    return {each.name: each for each in entry_points(group=GROUP)}


def kind_named(type: str, field: str = "reward.scorers") -> ScorerKind:
    """Returns the kind of a type.

    Raises:
        UserError: if there is no scorer of that name, or its package cannot be imported. It
            begins with ``field``.
    """
    if type in KINDS:
        return KINDS[type]
    if type not in brought():
        known = ", ".join(sorted({*KINDS, *brought()}))
        raise UserError(f"{field}.type: no scorer is called {type!r}; known are: {known}")
    return _loaded(brought()[type], field)


def may_load_a_network(type: str) -> bool:
    """Returns whether scorers of a type are given a GPU, if one is left."""
    kind = kind_named(type)
    return kind.extra in ("reward-models", "") or kind.needs == "source"


def _loaded(point: EntryPoint, field: str) -> ScorerKind:
    try:
        found: Any = point.load()
    except Exception as error:  # a package is anybody's code
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{field}.type: {point.name} of {package_name(point)} cannot be imported: {reason}"
        ) from error
    if isinstance(found, ScorerKind):
        return found
    if callable(getattr(found, "score", None)):
        return ScorerKind(point.value, extra="")
    raise UserError(
        f"{field}.type: {point.name} of {package_name(point)} is {point.value}, which is neither a "
        "Kind nor a class with a method score"
    )
