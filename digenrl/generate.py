"""`digenrl generate`: images or videos of a recipe's model, with or without an exported adapter."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from digenrl.media import save
from digenrl.report.export import FILE, PREFIX
from digenrl.sampling import Sampler
from shared.diffusion.lora import load_adapter
from shared.errors import IntegrityError, UserError
from shared.recipe import Recipe


def generate(
    recipe: Recipe,
    adapter: Path | None,
    prompts: Sequence[str],
    *,
    num_each: int,
    seed: int,
    out: Path,
) -> Iterator[Path]:
    """Write what the policy makes of the prompts, without noise; gives each file.

    Raises:
        UserError: if the adapter is none of this recipe's model, or ``out`` cannot be written.
    """
    tensors = None if adapter is None else read_adapter(adapter)
    sampler = Sampler(recipe)
    if tensors is not None:
        try:
            load_adapter(sampler.model.transformer, tensors)
        except IntegrityError as error:
            raise UserError(f"--adapter: {adapter} does not fit the recipe: {error}") from error
    media = sampler.sample(prompts, num_each=num_each, seed=seed)
    try:
        for number, sample in enumerate(media):
            yield from save(out, f"{number // num_each:03d}-{number % num_each}", sample)
    except OSError as error:
        raise UserError(f"--out: cannot write to {out}: {error.strerror}") from error


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """What `export_adapter` has written.

    Raises:
        UserError: if there is none.
    """
    path = folder / FILE if folder.is_dir() else folder
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"--adapter: cannot read {path}: {error}") from error
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
