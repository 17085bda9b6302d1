"""Loads networks that transformers has saved in a folder, or raises an error of one line.

Nothing is downloaded, no pickle is read, and a missing weight is an error: transformers itself
would draw it at random, and the scores would be noise.

A linear head is a stack of linear layers that ends in one number. Nothing is between the layers
(the dropout is for training), so together they are one linear map. They are applied one by one all
the same, to round as the published scorers do.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared.diffusion.loading.device import own_device
from shared.errors import UserError

MAX_REASON = 300
"""Characters quoted of an error: loaders list every name that does not fit."""
MAX_NAMES = 3
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt")


@contextmanager
def as_folder_error(folder: Path) -> Iterator[None]:
    """Turns any error into a UserError that names the recipe's key and the folder."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # loaders raise many types of errors for a broken file
        reason = " ".join(str(error).split())[:MAX_REASON]
        raise UserError(
            f"folder: cannot load {folder}: {type(error).__name__}: {reason}"
        ) from error


def load_network(cls: Any, folder: Path, dtype: torch.dtype | str = torch.float32) -> Any:
    """Loads a network of the transformers class ``cls``: frozen, on this device.

    Raises:
        UserError: if the folder does not hold all of its weights.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would mix with the lines of the service's log
    with as_folder_error(folder):
        network, report = cls.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
        )
        check_none_missing(folder, report["missing_keys"])
    return freeze(network)


def load_tensors(network: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fills a network with tensors of its names and shapes; others are left out.

    Raises:
        UserError: if one is missing or has another shape.
    """
    with as_folder_error(folder):
        names = network.state_dict().keys()
        check_none_missing(folder, names - tensors.keys())
        network.load_state_dict({name: tensors[name] for name in names})


def freeze(network: Any) -> Any:
    return network.to(own_device()).requires_grad_(False).eval()


def check_none_missing(folder: Path, names: Iterable[str]) -> None:
    """Raises UserError if any names of weights are given."""
    missing = sorted(names)
    if missing:
        more = f" and {len(missing) - MAX_NAMES} more" if len(missing) > MAX_NAMES else ""
        raise UserError(
            f"folder: {folder} holds no weights {', '.join(missing[:MAX_NAMES])}{more}; "
            "is it another network's?"
        )


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    # Without these files, transformers would create a tokenizer with an empty vocabulary.
    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise UserError(f"folder: {folder} has no tokenizer: none of {', '.join(VOCABULARIES)}")
    with as_folder_error(folder):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load_image_processor(folder: Path) -> Any:
    """Loads what turns pictures into pixels of the network's size and scale.

    It always resizes with Pillow, as the published scorers do.
    """
    from transformers import AutoImageProcessor

    with as_folder_error(folder):
        return AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")


NAME = re.compile(r"(?:layers\.(\d+)\.)?(weight|bias)")


def linear_head(tensors: Mapping[str, Tensor], width: int, folder: Path) -> nn.Module:
    """Builds a map from (n, ``width``) to (n, 1) of ``layers.N.weight`` and ``layers.N.bias``, in
    the order of N, or of ``weight`` and ``bias`` alone.

    Raises:
        UserError: if the layers do not fit together, or begin or end with other widths.
    """
    layers = _layers(tensors, folder)
    widths = [width, *(weight.shape[0] for weight, _ in layers)]
    with as_folder_error(folder):
        head = nn.Sequential(*(nn.Linear(before, after) for before, after in pairwise(widths)))
        for layer, (weight, bias) in zip(head, layers, strict=True):
            layer.load_state_dict({"weight": weight, "bias": bias})
    if widths[-1] != 1:
        raise UserError(f"folder: the head in {folder} ends in {widths[-1]} numbers, not in one")
    frozen_head: nn.Module = freeze(head)
    return frozen_head


def _layers(tensors: Mapping[str, Tensor], folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Returns the weight (out, in) and bias (out,) of each layer."""
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = NAME.fullmatch(name)
        if match is None:
            raise UserError(f"folder: {name} in {folder} is no part of a head of linear layers")
        layers.setdefault(int(match[1] or 0), {})[match[2]] = tensor
    if not layers or any(len(layer) != 2 for layer in layers.values()):
        raise UserError(f"folder: a layer of the head in {folder} has no weight or no bias")
    return [(layers[index]["weight"], layers[index]["bias"]) for index in sorted(layers)]
