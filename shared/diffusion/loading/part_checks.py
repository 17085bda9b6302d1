"""Checks of a model's parts that need torch: whether their tensors fit, and whether all values are
finite."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared.diffusion.loading.network import build_network, check_fit, find_tensors, stored_tensors
from shared.diffusion.loading.ranks import local_shard
from shared.errors import UserError
from shared.models.catalogue import check_vocabulary

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_decoder(folder: Path, class_named: Any) -> None:
    """Raises UserError unless the files of a decoder hold what its class needs."""
    decoder: Any = build_network(folder, torch.float32, class_named)
    stored = find_tensors(folder)
    decoder._fix_state_dict_keys_on_load(stored)
    check_fit(stored_tensors(decoder), stored, folder)


def check_parts(folder: Path, pipeline: Any) -> None:
    """Raises UserError if a part that was loaded from ``folder`` holds a value that is not finite,
    or a tokenizer does not have the vocabulary of its encoder."""
    for name, part in pipeline.components.items():
        if isinstance(part, nn.Module):
            for key, tensor in part.state_dict().items():
                _check_finite(f"{key} of {folder / name}", local_shard(tensor))
        encoder = getattr(pipeline, name.replace("tokenizer", "text_encoder"), None)
        if name.startswith("tokenizer") and part is not None and encoder is not None:
            _check_vocabulary(folder / name, part, encoder)


def _check_finite(what: str, tensor: Tensor) -> None:
    if tensor.is_meta or not tensor.numel() or tensor.dtype not in DTYPES:
        return
    # Ten times as fast as isfinite, and without its memory: both are NaN where a value is.
    if not all(bound.isfinite() for bound in tensor.aminmax()):
        raise UserError(f"model.folder: {what} holds NaN or infinity; fetch or copy it again")


def _check_vocabulary(folder: Path, tokenizer: Any, encoder: Any) -> None:
    has, needed = len(tokenizer), encoder.config.get_text_config().vocab_size
    if not type(tokenizer).__name__.startswith("ByT5"):  # whose encoder has more than the bytes
        check_vocabulary(folder, has, needed)
