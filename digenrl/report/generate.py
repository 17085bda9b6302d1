"""Generates images or videos with a recipe's model and an exported adapter."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from digenrl.evaluation.media import save
from digenrl.evaluation.sampler import Sampler
from digenrl.report.export import networks_in, read_adapter, read_network
from shared.diffusion.weights import load_weights
from shared.errors import IntegrityError, UserError
from shared.recipe.recipe import Recipe


def generate(
    recipe: Recipe,
    adapter: Path | None,
    prompts: Sequence[str],
    *,
    num_each: int,
    seed: int,
    out: Path,
) -> Iterator[Path]:
    """Sample the prompts with an ODE and all steps, write the samples, and yield the path of each
    file.

    Raises:
        UserError: if the adapter does not fit the recipe, or ``out`` cannot be written.
    """
    tensors = None if adapter is None else _read(adapter, recipe)
    sampler = Sampler(recipe.with_whole_grid)
    if tensors is not None:
        try:
            load_weights(sampler.model.transformer, _trained_of(tensors, sampler))
        except IntegrityError as error:
            raise UserError(f"--adapter: {adapter} does not fit the recipe: {error}") from error
    media = sampler.sample(prompts, num_each=num_each, seed=seed)
    try:
        for number, sample in enumerate(media):
            yield from save(out, f"{number // num_each:03d}-{number % num_each}", sample)
    except OSError as error:
        raise UserError(f"--out: cannot write to {out}: {error.strerror}") from error


def _read(adapter: Path, recipe: Recipe) -> Mapping[str, Tensor]:
    if recipe.model.trained == "full":
        return read_network(adapter, networks_in(recipe.model.folder))
    return read_adapter(adapter, recipe)


def _trained_of(tensors: Mapping[str, Tensor], sampler: Sampler) -> Mapping[str, Tensor]:
    """Leave out constants, which a network's folder contains but which are not trained."""
    constants = {name for name, _ in sampler.model.transformer.named_buffers()}
    return {name: tensor for name, tensor in tensors.items() if name not in constants}
