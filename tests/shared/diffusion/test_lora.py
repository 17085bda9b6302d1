from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel, StableDiffusion3Pipeline

from digenrl.report.export import export_adapter
from digenrl.trace.device_profile.models import ARCHITECTURES, ModelName
from shared.diffusion.policy import LoadedPolicy, LoraSpec, attach_lora, load_policy
from shared.diffusion.weights.trained_weights import (
    WeightsInUse,
    load_weights,
    trained_parameters,
    trained_tensors,
    weights_digest,
)
from shared.errors import IntegrityError
from shared.models.lora_files import FILES
from shared.models.lora_names import HIGH
from shared.recipe.recipe import Recipe, load_recipe, override
from tests.paths import ROOT

BOTH_BLOCKS = {"attn.to_q", "attn.to_k", "attn.to_v"}
"""Layers of FLUX.1 whose names are the same in blocks of both kinds."""


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(ROOT / "recipes" / "digits.toml")


@pytest.fixture
def policy(recipe: Recipe) -> LoadedPolicy:
    return load_policy(recipe, {"transformer"})


def scrambled(policy: LoadedPolicy) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = trained_tensors(policy.model.transformer)
    return {n: 0.1 * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}


def test_every_process_starts_from_the_same_adapter(recipe: Recipe, policy: LoadedPolicy) -> None:
    other = load_policy(recipe, {"transformer"})
    mine, theirs = (trained_tensors(p.model.transformer) for p in (policy, other))
    assert weights_digest(mine) == weights_digest(theirs)
    reseeded = load_policy(override(recipe, {"run.seed": 1}), {"transformer"})
    assert weights_digest(mine) != weights_digest(trained_tensors(reseeded.model.transformer))


def test_the_digest_follows_the_weights_in_use(policy: LoadedPolicy) -> None:
    in_use = WeightsInUse(policy.model.transformer)
    before, tensors = in_use.digest(), scrambled(policy)
    load_weights(policy.model.transformer, tensors)
    assert in_use.digest() == weights_digest(tensors) != before
    with torch.no_grad():
        next(iter(trained_parameters(policy.model.transformer).values())).add_(1e-3)
    assert in_use.digest() != weights_digest(tensors)


def test_weights_of_another_shape_are_refused(policy: LoadedPolicy) -> None:
    tensors = scrambled(policy)
    name = next(iter(tensors))
    with pytest.raises(IntegrityError, match=name):
        load_weights(policy.model.transformer, {**tensors, name: torch.zeros(1)})


def test_the_exported_adapter_does_in_diffusers_what_it_does_here(
    recipe: Recipe, policy: LoadedPolicy, tmp_path: Path
) -> None:
    tensors = scrambled(policy)
    load_weights(policy.model.transformer, tensors)
    first = export_adapter(tmp_path, tensors, recipe)
    assert export_adapter(tmp_path, tensors, recipe) == first

    pipeline = StableDiffusion3Pipeline.from_pretrained(recipe.model.folder, local_files_only=True)
    pipeline.load_lora_weights(tmp_path, weight_name=FILES[HIGH])
    generator = torch.Generator().manual_seed(2)
    inputs = {
        "hidden_states": torch.randn(2, 1, 8, 8, generator=generator),
        "timestep": torch.tensor([700.0, 300.0]),
        "encoder_hidden_states": torch.randn(2, 16, 32, generator=generator),
        "pooled_projections": torch.randn(2, 32, generator=generator),
        "return_dict": False,
    }
    with torch.no_grad():
        [theirs] = pipeline.transformer(**inputs)
        [ours] = policy.model.transformer(**inputs)
        pipeline.unload_lora_weights()
        [base] = pipeline.transformer(**inputs)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    assert not torch.allclose(base, ours, atol=1e-3)


def test_the_flux_recipe_adapts_the_published_layers_and_no_others() -> None:
    config = {**ARCHITECTURES[ModelName.flux1_dev].config, "num_layers": 2, "num_single_layers": 2}
    with torch.device("meta"):
        network = FluxTransformer2DModel(**config)
    targets = load_recipe(ROOT / "recipes" / "flux1-dev.toml").model.lora.targets
    attach_lora(network, LoraSpec(rank=2, alpha=4.0, targets=targets, seed=0))
    adapted = {name.split(".lora_")[0] for name in trained_parameters(network)}
    assert adapted == {
        *(f"transformer_blocks.{block}.{layer}" for block in range(2) for layer in targets),
        *(f"single_transformer_blocks.{b}.{layer}" for b in range(2) for layer in BOTH_BLOCKS),
    }
    assert sum(".ff" in name for name in adapted) == 2 * 4
