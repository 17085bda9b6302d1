"""One velocity of made-up inputs, which every device of a run computes from the same bytes: by it,
kinds of devices and versions of libraries are compared (`shared.process.canary`)."""

import torch
from torch import Tensor

from shared.diffusion.families.base import NEGATIVE, Family
from shared.diffusion.models import ModelAdapter
from shared.models.catalogue import pixels_per_token, text_tokens
from shared.recipe.recipe import Recipe

COUNT = 64
"""Numbers that are compared."""
SIGMA = 0.7
TOKENS_PER_SIDE = 8
"""Most tokens of the input each way: it shows how numbers are rounded, and takes no time."""


def velocity_numbers(model: ModelAdapter, recipe: Recipe) -> tuple[float, ...]:
    """Returns `COUNT` numbers of a velocity, divided by its largest one. Nothing is compiled or
    encoded for it."""
    assert isinstance(model, Family)
    table = recipe.model
    side = TOKENS_PER_SIDE * pixels_per_token(table.folder)
    shape = model.latent_shape(height=min(side, table.height), width=min(side, table.width))
    generator = torch.Generator().manual_seed(0)

    def made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(1, *shape, generator=generator).to(model.device, dtype)

    shapes = _condition_shapes(model, recipe, shape)
    latents = made(shape, torch.float32)
    conditions = {name: made(shapes[name], model.dtype) for name in sorted(shapes)}
    sigma = torch.tensor([SIGMA], device=model.device)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found = model.velocity(latents, sigma, conditions, guidance=table.guidance)
    numbers = found.flatten().float().cpu()
    chosen = numbers[:: max(1, len(numbers) // COUNT)][:COUNT]
    return tuple(torch.nan_to_num(chosen / numbers.abs().max()).tolist())


def _condition_shapes(
    model: Family, recipe: Recipe, latents: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    table, spec = recipe.model, model.spec
    shapes = dict(spec.condition_shapes(model.config, text_tokens(table.folder, table.text_tokens)))
    if spec.forwards(table.guidance) == 2:
        shapes |= {NEGATIVE + name: shape for name, shape in shapes.items()}
    if spec.image_shapes is not None:
        shapes |= spec.image_shapes(model.config, latents)
    return shapes
