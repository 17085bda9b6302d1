"""Converts LoRA files so that a run can begin from them."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shared.errors import UserError
from shared.models.lora_files import FILES, lora_paths
from shared.models.lora_header import LoraHeader
from shared.models.lora_names import HIGH, converted_name

ZERO = 1e-12
"""A singular value below this share of the largest one counts as zero."""


def convert_lora(source: Path, out: Path, rank: int | None, *, drops_text: bool) -> float:
    """Writes ``source`` to ``out`` in float32, with alpha = rank: one file, or for the files of two
    networks a folder. Returns the largest share of a layer's change that the rank cannot hold.

    Raises:
        UserError: if an argument is invalid, or ``source`` is no plain LoRA.
    """
    files = lora_paths(source, list(FILES) if source.is_dir() else [HIGH], "IN")
    is_folder = files.keys() != {HIGH}
    if out.exists():
        raise UserError(f"OUT: {out} already exists; choose another name")
    if is_folder == (out.suffix == ".safetensors"):
        kind = "a folder, for the files of two networks" if is_folder else "a .safetensors file"
        raise UserError(f"OUT: {out} has to be {kind}; choose another name")
    try:
        headers = {network: LoraHeader(file) for network, file in files.items()}
        text = [name for each in headers.values() for name in each.text]
        if text and not drops_text:
            raise UserError(f"IN: it adapts a text encoder ({text[0]}); add --drop text-encoder")
        ranks = sorted(
            {each.shapes(stem)[0][0] for each in headers.values() for stem in each.stems}
        )
        if rank is None and len(ranks) > 1:
            raise UserError(
                f"--rank: the layers have the ranks {', '.join(map(str, ranks))}; name one, such "
                f"as {ranks[-1]}, which keeps all of them exactly"
            )
        converted = {network: _converted(each, rank) for network, each in headers.items()}
        (out if is_folder else out.parent).mkdir(parents=True, exist_ok=True)
        for network, (tensors, _) in converted.items():
            save_file(tensors, out / FILES[network] if is_folder else out, {"format": "pt"})
    except UserError as error:  # of a header
        raise UserError(str(error).replace("model.folder", "IN", 1)) from error
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"IN: {source} cannot be converted: it {error}") from error
    return max(lost for _, lost in converted.values())


def _converted(file: LoraHeader, rank: int | None) -> tuple[dict[str, Tensor], float]:
    """Returns the tensors by their names, and the largest share that is lost."""
    tensors: dict[str, Tensor] = {}
    max_lost, generator = 0.0, torch.Generator().manual_seed(0)
    opened: Any
    with safe_open(file.path, framework="pt") as opened:
        for stem, names in file.stems.items():
            down, up = (opened.get_tensor(names[role]).double() for role in ("down", "up"))
            if not bool(down.isfinite().all() and up.isfinite().all()):
                raise ValueError(f"holds numbers that are not finite: {stem}")
            up = up * (file.alpha(stem) / len(down))
            if rank is not None:
                down, up, lost = _resized(down, up, rank, generator)
                max_lost = max(max_lost, lost)
            parts = {"down": down, "up": up, "alpha": torch.tensor(float(len(down)))}
            for role, name in names.items():
                if converted_name(name) in tensors:
                    raise ValueError(f"adapts {stem} twice, under two names")
                tensors[converted_name(name)] = parts[role].float().contiguous()
    return tensors, max_lost


def _resized(
    down: Tensor, up: Tensor, rank: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, float]:
    """Returns A and B of this rank whose product is the nearest one, and the share that is lost."""
    (left, upper), (right, lower) = torch.linalg.qr(up), torch.linalg.qr(down.T)
    first, values, last = torch.linalg.svd(upper @ lower.T, full_matrices=False)
    kept = min(rank, int((values > ZERO * values[0]).sum()))
    lost = float(values[kept:].norm() / values.norm().clamp(min=1e-300))
    root = values[:kept].sqrt()
    down, up = root[:, None] * (last[:kept] @ right.T), left @ first[:, :kept] * root
    number, inputs = rank - len(down), down.shape[1]
    # Rows as a fresh LoRA has them: with A and B both 0, their gradients would stay 0.
    fresh = (2 * torch.rand(number, inputs, generator=generator).double() - 1) / inputs**0.5
    down, up = torch.cat([down, fresh]), torch.cat([up, up.new_zeros(len(up), number)], dim=1)
    # A rotation leaves no blocks of zeros, by which layers that share a matrix get smaller ranks.
    rotation, _ = torch.linalg.qr(torch.randn(rank, rank, generator=generator).double())
    return rotation.T @ down, up @ rotation, lost
