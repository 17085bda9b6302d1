"""Generates images or videos with a recipe's model and an exported adapter."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from digenrl.evaluation.media import save
from digenrl.evaluation.sampler import Sampler
from digenrl.evaluation.samples import rewards_of
from digenrl.report.export import networks_in, read_adapter, read_network
from shared.diffusion.weights.trained_weights import load_weights
from shared.errors import ContractError, IntegrityError, UserError
from shared.learning.pictures import check_picture
from shared.models.catalogue import check_family
from shared.recipe.recipe import Recipe


def generate(
    recipe: Recipe, adapter: Path | Mapping[str, Tensor] | None, prompts: Sequence[str], *,
    images: Sequence[Path] = (), num_each: int, seed: int, out: Path,
    follow: Callable[[Mapping[str, Any]], None] | None = None,
) -> Iterator[Path]:  # fmt: skip
    """Sample the prompts with an ODE and all steps, write the samples, and yield the path of each
    file.

    Args:
        adapter: exported weights, or a version's; None: the base model.
        images: source images of the prompts: one for all, or one for each.
        follow: gets the denoising steps done, and at last the rewards of all samples.

    Raises:
        UserError: if the adapter does not fit the recipe, an image cannot be taken, or ``out``
            cannot be written.
    """
    sources = _sources(recipe, prompts, images)
    tensors, recipe = _read(adapter, recipe) if isinstance(adapter, Path) else (adapter, recipe)
    rows = zip(prompts, sources, [None] * len(prompts), strict=True)

    def on_step(done: int, of: int) -> None:
        if follow is not None:
            follow({"done": done, "of": of})

    sampler = Sampler(recipe, rows=rows, on_step=on_step)
    if tensors is not None:
        try:
            load_weights(sampler.model.transformer, _without_constants(tensors, sampler))
        except IntegrityError as error:
            name = adapter if isinstance(adapter, Path) else "the version"
            raise UserError(f"--adapter: {name} does not fit the recipe: {error}") from error
    media = sampler.sample(prompts, num_each=num_each, seed=seed, sources=sources)
    if follow is not None:
        follow(rewards_of(recipe, prompts, media))
    try:
        for number, sample in enumerate(media):
            yield from save(out, f"{number // num_each:03d}-{number % num_each}", sample)
    except OSError as error:
        raise UserError(f"--out: cannot write to {out}: {error.strerror}") from error


def _sources(
    recipe: Recipe, prompts: Sequence[str], images: Sequence[Path]
) -> Sequence[bytes | None]:
    takes_image = check_family(recipe.model.folder).takes_image
    if takes_image and len(images) not in (1, len(prompts)):
        raise UserError(
            f"--image: {len(images)} images for {len(prompts)} prompts; this model edits images: "
            "give one for all prompts, or one for each"
        )
    if images and not takes_image:
        raise UserError(f"--image: {recipe.model.folder} takes no image; leave it out")
    pictures: list[bytes | None] = [_picture(path) for path in images]
    pictures = pictures or [None]
    return pictures * (len(prompts) // len(pictures))


def _picture(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        check_picture(data)
    except OSError as error:
        raise UserError(f"--image: cannot read {path}: {error.strerror}") from error
    except ContractError as error:
        raise UserError(f"--image: {path} {error}") from error
    return data


def _read(adapter: Path, recipe: Recipe) -> tuple[Mapping[str, Tensor], Recipe]:
    if recipe.model.trained == "full":
        return read_network(adapter, networks_in(recipe.model.folder)), recipe
    return read_adapter(adapter, recipe)


def _without_constants(tensors: Mapping[str, Tensor], sampler: Sampler) -> Mapping[str, Tensor]:
    """Leave out constants, which a network's folder contains but which are not trained."""
    constants = {name for name, _ in sampler.model.transformer.named_buffers()}
    return {name: tensor for name, tensor in tensors.items() if name not in constants}
