"""The types of scorers that recipes name: ours, and those that installed packages bring.

A package brings one by an entry point of the group `digenrl.scorers`: its name is the type, and it
names a `ScorerKind`, or a class that is made without arguments and scores.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

from services.reward.networks import Network
from services.reward.object_checks import parse_requirements
from services.reward.prompt_checks import PromptReader, wanted_digit, wanted_edit, wanted_text
from shared.errors import UserError
from shared.models.plugins import brought, imported, package_name
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
    prompt_readers: tuple[PromptReader, ...] = ()
    """Check before a run that prompts have what the scorer reads of them."""
    network: Network | None = None
    """Network in the folder, of which `digenrl plan` counts memory and operations."""
    hub: tuple[str, str] | None = None
    """Source of the folder for `digenrl fetch`, if the scorer is ours: a model with configuration,
    tokenizer and image processor, and the file of the weights, ORG/NAME/FILE; without one, the
    model is the whole folder."""


PACKAGES: Mapping[str, tuple[str, ...]] = {
    "reward": ("PIL", "safetensors"),
    "reward-models": ("torch", "transformers"),
    "ocr": ("onnxruntime", "rapidfuzz", "rapidocr"),
}
"""Packages that scorers import, by the extra that installs them."""
HEAD = "head.safetensors"
"""File of a Qwen2-VL's head."""


CLIP_L = Network(gib=1.59, image_gflop=162)
CLIP_L_HUB = "openai/clip-vit-large-patch14"
CLIP_H = Network(gib=3.67, image_gflop=336)
CLIP_H_HUB = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


def _network(
    scorer: str, network: Network, hub: tuple[str, str], *files: str,
    takes: Literal["images", "videos"] = "images", reads: tuple[PromptReader, ...] = (),
) -> ScorerKind:  # fmt: skip
    """Returns the kind of a scorer whose network transformers loads from a folder."""
    return ScorerKind(
        f"services.reward.scorers.{scorer}", "folder", ("config.json", *files), takes,
        "reward-models", reads, network, hub,
    )  # fmt: skip


def _video_align(scorer: str) -> ScorerKind:
    hub = "Qwen/Qwen2-VL-2B-Instruct", "KlingTeam/VideoReward/checkpoint-11352/model.pth"
    network = Network(gib=4.25, image_gflop=350, weight_bytes=2)
    return _network(f"video_align:{scorer}", network, hub, HEAD, takes="videos")


KINDS: dict[str, ScorerKind] = {
    "aesthetic": _network(
        "aesthetic:Aesthetic", CLIP_L,
        (CLIP_L_HUB, "trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth"),
        "aesthetic.safetensors",
    ),
    "clip-score": _network("clip:ClipScore", CLIP_L, (CLIP_L_HUB, "")),
    "digit-edit": ScorerKind(
        "services.reward.scorers.digits_edit:DigitEdit", needs="folder",
        prompt_readers=(wanted_edit, wanted_digit),
    ),
    "digit-probability": ScorerKind(
        "services.reward.scorers.digits:DigitProbability", needs="folder",
        prompt_readers=(wanted_digit,),
    ),
    "hpsv2": _network(
        "clip:HpsV2", CLIP_H, (CLIP_H_HUB, "xswu/HPSv2/HPS_v2.1_compressed.pt")
    ),
    "hpsv3": _network(
        "hpsv3:HpsV3", Network(gib=14.4, image_gflop=13_800, weight_bytes=2),
        ("Qwen/Qwen2-VL-7B-Instruct", "MizzenAI/HPSv3/HPSv3.safetensors"), HEAD,
    ),
    "image-reward": _network(
        "image_reward:ImageReward", Network(gib=1.66, image_gflop=130),
        ("google-bert/bert-base-uncased", "zai-org/ImageReward/ImageReward.pt"),
        "model.safetensors",
    ),
    "jpeg-incompressibility": ScorerKind("services.reward.scorers.jpeg:JpegIncompressibility"),
    "jpeg-compressibility": ScorerKind("services.reward.scorers.jpeg:JpegCompressibility"),
    "judge": ScorerKind("services.reward.scorers.judge:JudgeScorer", needs="judge"),
    "objects": _network(
        "objects:Objects", Network(gib=0.58, image_gflop=1100),
        ("google/owlv2-base-patch16-ensemble", ""), reads=(parse_requirements,),
    ),
    "ocr": ScorerKind(
        "services.reward.scorers.ocr:OcrText", extra="ocr", prompt_readers=(wanted_text,)
    ),
    "pick-score": _network(
        "clip:PickScore", CLIP_H, (CLIP_H_HUB, "yuvalkirstain/PickScore_v1/model.safetensors")
    ),
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
}  # fmt: skip
"""Our scorers, by the type that recipes name."""


def kind_named(type: str, field: str = "reward.scorers") -> ScorerKind:
    """Returns the kind of a type.

    Raises:
        UserError: if there is no scorer of that name, or its package cannot be imported. It
            begins with ``field``.
    """
    if type in KINDS:
        return KINDS[type]
    if type not in brought(GROUP):
        names = ", ".join(sorted({*KINDS, *brought(GROUP)}))
        raise UserError(f"{field}.type: no scorer is called {type!r}; known are: {names}")
    return _loaded(brought(GROUP)[type], field)


def may_load_a_network(type: str) -> bool:
    """Returns whether scorers of a type are given a GPU, if one is left."""
    kind = kind_named(type)
    return kind.extra in ("reward-models", "") or kind.needs == "source"


def scorer_network(type: str, folder: Path | None) -> Network | None:
    """Returns what a scorer's network takes, by the weights in its folder if they are here; None if
    the type names none."""
    network = kind_named(type).network
    return None if network is None else network.in_folder(folder)


def _loaded(point: EntryPoint, field: str) -> ScorerKind:
    loaded: Any = imported(point, f"{field}.type: {point.name}")
    if isinstance(loaded, ScorerKind):
        return loaded
    if callable(getattr(loaded, "score", None)):
        return ScorerKind(point.value, extra="")
    raise UserError(
        f"{field}.type: {point.name} of {package_name(point)} is {point.value}, which is neither a "
        "Kind nor a class with a method score"
    )
