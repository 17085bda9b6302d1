"""The noise schedule that a model's own pipeline uses, read from its folder without torch.

Each pipeline hands its scheduler another grid, and the scheduler shifts it as its configuration
says; conventions are those of diffusers 0.42. Wan's folders name a solver of higher order: what is
taken from it is its shift, for the Euler steps that we take.
"""

import json
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.models.catalogue import PACKED, pipeline_class, pixels_per_token
from shared.models.schedule import (
    Sigmas,
    default_sigmas,
    dynamic_sigmas,
    evenly_to,
    single_shift_sigmas,
)


def pipeline_sigmas(folder: Path, num_steps: int, *, height: int, width: int) -> Sigmas:
    """Raises UserError if the folder does not say how."""
    pipeline, config = pipeline_class(folder), _read(folder / "scheduler" / "scheduler_config.json")
    shift = float(config.get("shift", config.get("flow_shift", 1.0)))
    if pipeline == "HunyuanVideoPipeline":
        return single_shift_sigmas(num_steps, shift)
    if pipeline not in PACKED:
        return default_sigmas(num_steps, shift)
    if not config.get("use_dynamic_shifting"):
        return evenly_to(1 / num_steps, num_steps, shift)
    side = pixels_per_token(folder)
    return dynamic_sigmas(
        num_steps,
        _mu(config, (height // side) * (width // side)),
        terminal=config.get("shift_terminal"),
        linear=config.get("time_shift_type") == "linear",
    )


def _mu(config: dict[str, Any], num_tokens: int) -> float:
    """Linear in the number of tokens (Esser et al. 2024)."""
    fewest, most = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    return float(low + (num_tokens - fewest) * (high - low) / (most - fewest))


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    except (OSError, ValueError) as error:
        raise UserError(f'sampling.sigmas: "model" needs {file}, which cannot be read') from error
