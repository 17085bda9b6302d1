"""Costs of scorers' networks: memory, and operations of an image or a frame."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from shared.errors import UserError
from shared.models.memory import read_header

WORK_GIB = 0.5
"""Memory of a batch of images, besides the weights."""


@dataclass(frozen=True, slots=True)
class Network:
    """Costs of a scorer's network, counted from its configuration: tokens x weights x 2 for
    products, and 4 x layers x width x tokens^2 for attention.

    A text counts only where the network reads it with each image.
    """

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

    def in_folder(self, folder: Path | None) -> "Network":
        """Returns the network with the memory and operations of the weights in a folder, if they
        are here."""
        if folder is None or not folder.is_dir():
            return self
        try:
            gib = _weights(folder) * self.weight_bytes / 2**30
        except UserError:
            return self
        gflop = self.image_gflop * gib / self.gib
        return replace(self, gib=gib, image_gflop=gflop) if gib else self


def _weights(folder: Path) -> int:
    headers = (read_header(file)[0] for file in folder.glob("*.safetensors"))
    return sum(
        math.prod(tensor.get("shape", (0,))) for header in headers for tensor in header.values()
    )
