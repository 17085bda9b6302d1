"""A stack of linear layers that ends in one number: the head of two published scorers.

Nothing is between the layers (the dropout is for training), so together they are one linear map.
They are applied one by one all the same, to round as the published scorers do.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from torch import Tensor, nn

from services.reward.scorers.pretrained import frozen, loading
from shared.errors import UserError

NAME = re.compile(r"(?:layers\.(\d+)\.)?(weight|bias)")


def linear_head(tensors: Mapping[str, Tensor], width: int, folder: Path) -> nn.Module:
    """Builds a map from (n, ``width``) to (n, 1) of ``layers.N.weight`` and ``layers.N.bias``, in
    the order of N, or of ``weight`` and ``bias`` alone.

    Raises:
        UserError: if the layers do not fit together, or begin or end with other widths.
    """
    layers = _layers(tensors, folder)
    widths = [width, *(weight.shape[0] for weight, _ in layers)]
    with loading(folder):
        head = nn.Sequential(*(nn.Linear(before, after) for before, after in pairwise(widths)))
        for layer, (weight, bias) in zip(head, layers, strict=True):
            layer.load_state_dict({"weight": weight, "bias": bias})
    if widths[-1] != 1:
        raise UserError(f"folder: the head in {folder} ends in {widths[-1]} numbers, not in one")
    made: nn.Module = frozen(head)
    return made


def _layers(tensors: Mapping[str, Tensor], folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Returns the weight (out, in) and bias (out,) of each layer."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = NAME.fullmatch(name)
        if match is None:
            raise UserError(f"folder: {name} in {folder} is no part of a head of linear layers")
        found.setdefault(int(match[1] or 0), {})[match[2]] = tensor
    if not found or any(len(layer) != 2 for layer in found.values()):
        raise UserError(f"folder: a layer of the head in {folder} has no weight or no bias")
    return [(found[index]["weight"], found[index]["bias"]) for index in sorted(found)]
