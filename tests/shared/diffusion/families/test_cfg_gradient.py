"""The gradient by one half of classifier-free guidance, on small random models of every family."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shared.diffusion.families.base import NEGATIVE, Family
from shared.diffusion.loading.experts import named_networks
from shared.diffusion.loading.models import IMAGE, Conditions, repeat_rows
from shared.diffusion.loading.recomputation import checkpoint_blocks
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.errors import UserError
from shared.recipe.networks import check_networks
from shared.recipe.recipe import load_recipe, override
from shared.recipe.sampling import CfgGradient
from tests import tiny_models
from tests.paths import DIGITS

SIZE = 32
GUIDANCE = 4.0
ROWS = 3
QUICK = ("qwen-image", "flux")
"""Texts of two lengths, and no second half at all."""
OWN_LENGTHS = ("qwen-image", "hunyuan-video15", "qwen-image-edit")
"""Texts are as long as they are, and the empty one is shorter."""
Velocity = Callable[[Family, Tensor, Tensor, Conditions], Tensor]


@pytest.fixture(scope="module", params=tiny_models.but_slow(QUICK))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def model(folder: Path) -> Family:
    return load(folder)


def load(folder: Path) -> Family:
    made = tiny_models.load(folder)
    tiny_models.add_lora(made)
    generator = torch.Generator().manual_seed(1)
    for parameter in trained_parameters(made.transformer).values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return made


def ours(model: Family, latents: Tensor, sigma: Tensor, told: Conditions) -> Tensor:
    return model.velocity(latents, sigma, told, guidance=GUIDANCE)


def plain(model: Family, latents: Tensor, sigma: Tensor, told: Conditions) -> Tensor:
    """Compute one half after the other, as loops do that detach."""
    prompt = {name: each for name, each in told.items() if not name.startswith(NEGATIVE)}
    empty = {name: told[name if name.startswith(IMAGE) else NEGATIVE + name] for name in prompt}
    unconditional = model.forward(latents, sigma, empty, GUIDANCE).detach()
    conditional = model.forward(latents, sigma, prompt, GUIDANCE)
    strength = model.strength(GUIDANCE, sigma, conditional)
    return model.guided(unconditional, conditional, strength)


def gradient(
    family: str, model: Family, velocity: Velocity, *, forward_only: bool = False
) -> dict[str, Tensor]:
    """The gradient of products with fixed directions, a sample's each."""
    frames = 5 if family in tiny_models.VIDEO else 1
    shape = model.latent_shape(height=SIZE, width=SIZE, frames=frames)
    latents = torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(2))
    told = repeat_rows(tiny_models.encoded(family, model, GUIDANCE, SIZE), ROWS)
    parameters = trained_parameters(model.transformer)
    model.transformer.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(not forward_only):
        found = velocity(model, latents, torch.tensor([0.97, 0.5, 0.2]), told)
    if not forward_only:
        directions = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
        (found * directions).sum().backward()
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Relative, over the whole gradient as one vector."""
    assert found.keys() == wanted.keys() and wanted
    squares = sum(float((found[n] - wanted[n]).double().square().sum()) for n in wanted)
    return float((squares / sum(float(w.double().square().sum()) for w in wanted.values())) ** 0.5)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_gradient_by_the_conditional_half_is_that_of_a_loop_that_detaches(
    family: str, model: Family, checkpointed: bool
) -> None:
    both = gradient(family, model, ours)
    if checkpointed:
        checkpoint_blocks(model.transformer, True)
    model.cfg_gradient = "conditional"
    try:
        found = gradient(family, model, ours)
        if family not in tiny_models.CFG:
            assert distance(found, both) <= 1e-6, "guidance is an input: there is one half"
            return
        wanted = gradient(family, model, plain)
    finally:
        model.cfg_gradient = "both"
        for each in named_networks(model.transformer).values():
            each.disable_gradient_checkpointing()  # type: ignore[operator]
    assert distance(found, wanted) <= 1e-6
    assert distance(both, wanted) > 0.05, "both halves give another one"


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_training_pass_takes_half_of_the_operations_of_a_backward_pass(
    family: str, model: Family, checkpointed: bool
) -> None:
    """A forward pass, and what is computed again, in it."""
    if family not in tiny_models.CFG:
        return
    found: dict[CfgGradient | None, int] = {}
    for kind in (None, "both", "conditional"):
        if checkpointed:
            checkpoint_blocks(model.transformer, True)
        model.cfg_gradient = kind or "both"
        with FlopCounterMode(display=False) as counter:
            gradient(family, model, ours, forward_only=kind is None)
        found[kind] = counter.get_total_flops()
    model.cfg_gradient = "both"
    for each in named_networks(model.transformer).values():
        each.disable_gradient_checkpointing()  # type: ignore[operator]
    half = (found["both"] + found[None]) / 2
    assert found["conditional"] == pytest.approx(half, rel=0.04 if family in OWN_LENGTHS else 0)


def test_a_half_that_is_not_there_is_refused(family: str, folder: Path) -> None:
    changes = {"model.folder": folder, "model.guidance": GUIDANCE}
    recipe = override(load_recipe(DIGITS), {**changes, "algorithm.cfg_gradient": "conditional"})
    if family in tiny_models.CFG:
        check_networks(recipe)
        return
    with pytest.raises(UserError, match=r"algorithm\.cfg_gradient: a .*Pipeline takes guidance as"):
        check_networks(recipe)


def test_one_row_of_each_sample_is_computed_with_a_gradient(
    family: str, model: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: dict[bool, int] = {True: 0, False: 0}
    forward = model.forward

    def counted(latents: Tensor, sigma: Tensor, told: Conditions, guidance: float) -> Tensor:
        rows[torch.is_grad_enabled()] += len(latents)
        return forward(latents, sigma, told, guidance)

    monkeypatch.setattr(model, "forward", counted)
    monkeypatch.setattr(model, "cfg_gradient", "conditional")
    gradient(family, model, ours)
    assert rows == {True: ROWS, False: ROWS * (family in tiny_models.CFG)}
    with torch.no_grad():
        rows.update({True: 0, False: 0})
        before, model.cfg_gradient = model.cfg_gradient, "both"
        told = repeat_rows(tiny_models.encoded(family, model, GUIDANCE, SIZE), 1)
        frames = 5 if family in tiny_models.VIDEO else 1
        shape = model.latent_shape(height=SIZE, width=SIZE, frames=frames)
        x, sigma = torch.zeros(1, *shape), torch.tensor([0.5])
        both = ours(model, x, sigma, told)
        model.cfg_gradient = before
        assert torch.equal(ours(model, x, sigma, told), both), "samples are the same to the bit"
