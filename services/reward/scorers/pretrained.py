"""Loads networks that transformers has saved in a folder, or says in one line why not.

Nothing is downloaded, no pickle is read, and a missing weight is an error: transformers itself
would draw it at random, and the scores would be noise.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared.errors import UserError

MAX_REASON = 300
"""Characters quoted of an error: loaders list every name that does not fit."""
MAX_NAMES = 3
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt")


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Turns any error with a folder into a UserError that begins with the recipe's key."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the loaders of others raise whatever a broken file leads to
        reason = " ".join(str(error).split())[:MAX_REASON]
        raise UserError(
            f"folder: cannot load {folder}: {type(error).__name__}: {reason}"
        ) from error


def best_device() -> torch.device:
    """Returns the GPU that this process sees, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_network(cls: Any, folder: Path) -> Any:
    """Loads a network of the transformers class ``cls``: frozen, float32, on the best device.

    Raises:
        UserError: if the folder does not hold all of its weights.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would stand between the lines of the service's log
    with loading(folder):
        network, found = cls.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
        check_none_missing(folder, found["missing_keys"])
    return frozen(network)


def load_tensors(network: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fills a network with tensors of its names and shapes; others are left out.

    Raises:
        UserError: if one is missing or has another shape.
    """
    with loading(folder):
        names = network.state_dict().keys()
        check_none_missing(folder, names - tensors.keys())
        network.load_state_dict({name: tensors[name] for name in names})


def frozen(network: Any) -> Any:
    return network.to(best_device()).requires_grad_(False).eval()


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

    # Without one of them, transformers would make a tokenizer that knows no word.
    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise UserError(f"folder: {folder} has no tokenizer: none of {', '.join(VOCABULARIES)}")
    with loading(folder):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load_image_processor(folder: Path) -> Any:
    """Loads what turns pictures into pixels of the network's size and scale.

    It resizes with Pillow, whatever else is installed, as the published scorers do.
    """
    from transformers import AutoImageProcessor

    with loading(folder):
        return AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
