"""With `model.vae_tiling` every family decodes in tiles, and everybody who decodes does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.diffusion.loading.models import ModelAdapter, load_model
from shared.diffusion.policy import load_policy
from shared.errors import UserError
from shared.recipe.recipe import override
from tests import tiny_models
from tests.shared.diffusion.digits import RECIPE

CPU = torch.device("cpu")
SIDE, FRAMES = 320, 5
"""Larger than a tile of a video, which has 256 x 256 pixels."""


def loaded(family: str, folder: Path) -> ModelAdapter:
    tiny_models.save(family, folder)
    return load_model(folder, {"transformer", "decoder"}, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=pytest.mark.slow if each in tiny_models.VIDEO else ())
        for each in tiny_models.FAMILIES
    ],
)
def test_a_sample_larger_than_a_tile_is_decoded_in_tiles_to_pixels_of_its_size(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = loaded(family, tmp_path)
    decoder = model.pipeline.vae
    side = SIDE
    if hasattr(decoder, "tile_sample_min_size"):  # as large as the images of its training
        decoder.tile_sample_min_size, decoder.tile_latent_min_size, side = 64, 8, 128
    frames = FRAMES if family in tiny_models.VIDEO else 1
    shape = model.latent_shape(height=side, width=side, frames=frames)
    latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    whole = model.decode(latents)
    tiles: list[int] = []
    in_tiles = decoder.tiled_decode

    def noted(*what: Any, **how: Any) -> Any:
        tiles.append(1)
        return in_tiles(*what, **how)

    monkeypatch.setattr(decoder, "tiled_decode", noted)
    model.decode_in_tiles()
    made = model.decode(latents)
    assert tiles and made.shape == whole.shape
    assert not torch.equal(made, whole), "which is why a recipe has to ask for it"
    assert torch.equal(made, model.decode(latents))


def test_the_recipe_says_it_to_everybody_who_loads_a_decoder() -> None:
    tiled = override(RECIPE, {"model.vae_tiling": True})
    for recipe in (RECIPE, tiled):
        model: Any = load_policy(recipe, {"transformer", "decoder"}).model
        assert model.pipeline.vae.use_tiling == recipe.model.vae_tiling
    load_policy(tiled, {"transformer"})


def test_a_decoder_that_has_no_tiles_is_refused_by_the_name_of_the_key(tmp_path: Path) -> None:
    model: Any = loaded("wan", tmp_path)
    model.pipeline.vae.enable_tiling = None
    with pytest.raises(UserError, match=r"model\.vae_tiling: AutoencoderKLWan does not"):
        model.pipeline.vae = object.__new__(type("AutoencoderKLWan", (), {}))
        model.decode_in_tiles()
