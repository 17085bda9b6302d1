"""Loads the LoRA that a run begins from into the adapter that it trains."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shared.diffusion.weights.trained_weights import load_weights, trained_parameters
from shared.errors import IntegrityError, UserError
from shared.models.lora_files import KEY, LoraFile, LoraPart, remedy


def lora_tensors(lora: LoraFile, key: str = KEY) -> dict[str, Tensor]:
    """Reads the matrices of every layer: A (rank, inputs) and B (outputs, rank), by the names that
    `shared.diffusion.weights.trained_weights.trained_parameters` has. ``key`` is what errors name.

    Raises:
        UserError: if a file cannot be read, or holds what no layer would get, or numbers that are
            not finite.
    """
    tensors: dict[str, Tensor] = {}
    by_file: dict[Path, list[LoraPart]] = {}
    for part in lora.parts:
        by_file.setdefault(part.file, []).append(part)
    for file, parts in by_file.items():
        try:
            tensors |= _read(file, parts)
        except (OSError, SafetensorError, ValueError) as error:
            raise UserError(f"{key}: {file} {error}") from error
    return tensors


def _read(file: Path, parts: Sequence[LoraPart]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    by_matrix: dict[str, list[LoraPart]] = {}
    for part in parts:
        by_matrix.setdefault(part.up, []).append(part)
    with ExitStack() as stack:
        opened: Any = stack.enter_context(safe_open(file, framework="pt"))
        for name, those in by_matrix.items():
            down, up = opened.get_tensor(those[0].down), opened.get_tensor(name)
            if not bool(down.isfinite().all() and up.isfinite().all()):
                raise ValueError(f"holds numbers that are not finite: {name}")
            blocks = {each.layer: up[slice(*each.rows), slice(*each.ranks)] for each in those}
            if sum(int(each.count_nonzero()) for each in blocks.values()) != up.count_nonzero():
                rank = max(opened.get_slice(part.down).get_shape()[0] for part in parts)
                raise ValueError(
                    f"cuts {name} otherwise than the same layer of its first block; "
                    f"{remedy(file, '--rank', str(rank))}"
                )
            for each in those:
                tensors[f"{each.layer}.lora_A.weight"] = down[slice(*each.ranks)]
                tensors[f"{each.layer}.lora_B.weight"] = blocks[each.layer]
    return tensors


def load_adapter(network: nn.Module, lora: LoraFile) -> None:
    """Overwrites a network's fresh adapter, in place.

    Raises:
        UserError: if it cannot be read, or has other layers than the network's adapter.
    """
    tensors = lora_tensors(lora)
    parameters = trained_parameters(network)
    typed = {
        name: tensor.to(parameters[name].dtype if name in parameters else torch.float32)
        for name, tensor in tensors.items()
    }
    try:
        load_weights(network, typed)
    except IntegrityError as error:
        raise UserError(f"{KEY}: it does not fit the network: {error}") from error
