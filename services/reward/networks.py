"""What the networks of scorers take: memory, and operations of an image."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.errors import UserError
from shared.models.memory import read_header

FLOAT32_BYTES = 4
WORK_GIB = 0.5
"""What a batch of images takes beside the weights."""


@dataclass(frozen=True, slots=True)
class Network:
    gib: float
    """Its weights in float32."""
    image_gflop: float
    """Operations of its image tower for one image, in 1e9."""


CLIP_L = Network(gib=1.59, image_gflop=162)
CLIP_H = Network(gib=3.67, image_gflop=336)
NETWORKS: Mapping[str, Network] = {
    "aesthetic": CLIP_L,
    "clip-score": CLIP_L,
    "hpsv2": CLIP_H,
    "image-reward": Network(gib=1.66, image_gflop=130),
    "objects": Network(gib=1.63, image_gflop=5800),
    "pick-score": CLIP_H,
}
"""By the scorer's type: of what is published, the largest (docs/rewards.md). Counted from their
configurations: tokens x weights x 2 for products, and 4 x layers x width x tokens^2 for
attention."""


def network_of(type: str, folder: Path | None) -> Network | None:
    """Returns what a scorer's network takes, by the weights in its folder if they are here; None if
    the type has no network of ours."""
    known = NETWORKS.get(type)
    if known is None or folder is None or not folder.is_dir():
        return known
    try:
        gib = _weights(folder) * FLOAT32_BYTES / 2**30
    except UserError:
        return known
    return Network(gib, known.image_gflop * gib / known.gib) if gib else known


def _weights(folder: Path) -> int:
    headers = (read_header(file)[0] for file in folder.glob("*.safetensors"))
    return sum(
        math.prod(tensor.get("shape", (0,))) for header in headers for tensor in header.values()
    )
