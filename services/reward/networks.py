"""Costs of scorers' networks: memory, and operations of an image or a frame."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shared.errors import UserError
from shared.models.memory import read_header

WORK_GIB = 0.5
"""Memory of a batch of images, besides the weights."""


@dataclass(frozen=True, slots=True)
class Network:
    gib: float
    """Its weights."""
    image_gflop: float
    """Operations for one image, or for a frame of a video, in 1e9."""
    weight_bytes: int = 4
    """4 for float32, 2 for bfloat16."""

    @property
    def gpu_speed(self) -> float:
        """Operations per second of a GPU, over those in float32: assumed for bfloat16."""
        return 1.0 if self.weight_bytes == 4 else 8.0


CLIP_L = Network(gib=1.59, image_gflop=162)
CLIP_H = Network(gib=3.67, image_gflop=336)
NETWORKS: Mapping[str, Network] = {
    "aesthetic": CLIP_L,
    "clip-score": CLIP_L,
    "hpsv2": CLIP_H,
    "hpsv3": Network(gib=14.4, image_gflop=13_800, weight_bytes=2),
    "image-reward": Network(gib=1.66, image_gflop=130),
    "objects": Network(gib=0.58, image_gflop=1100),
    "pick-score": CLIP_H,
    **{
        f"video-align{rating}": Network(gib=4.25, image_gflop=350, weight_bytes=2)
        for rating in ("", "-motion", "-quality", "-text")
    },
}
"""By the scorer's type, of what `digenrl fetch` brings (docs/rewards.md). Counted from their
configurations: tokens x weights x 2 for products, and 4 x layers x width x tokens^2 for
attention; of a text only where the network reads it with each image."""


def scorer_network(type: str, folder: Path | None) -> Network | None:
    """Returns what a scorer's network takes, by the weights in its folder if they are here; None if
    the type has no network of ours."""
    known = NETWORKS.get(type)
    if known is None or folder is None or not folder.is_dir():
        return known
    try:
        gib = _weights(folder) * known.weight_bytes / 2**30
    except UserError:
        return known
    gflop = known.image_gflop * gib / known.gib
    return replace(known, gib=gib, image_gflop=gflop) if gib else known


def _weights(folder: Path) -> int:
    headers = (read_header(file)[0] for file in folder.glob("*.safetensors"))
    return sum(
        math.prod(tensor.get("shape", (0,))) for header in headers for tensor in header.values()
    )
