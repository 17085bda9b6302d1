"""An optimizer step on a base in fewer bits is one on the weights that its codes stand for."""

import io
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.protocols import GroupData
from shared.diffusion.generation import Generator
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.weights.trained_weights import load_weights, trained_tensors
from shared.messages.contracts import Prompt
from shared.models.memory import Form
from shared.recipe.recipe import Recipe, override
from tests import examples, tiny_models
from tests.report.tiny_recipes import recipe_of
from tests.shared.diffusion.test_quantisation import copy_base

SIDE = 32
RATIO_ERROR = 1e-6


def load(recipe: Recipe) -> LoadedPolicy:
    """A policy whose adapter changes what it computes."""
    found = load_policy(recipe, {"transformer", "text", "decoder"}, trains=True)
    network, generator = found.model.transformer, torch.Generator().manual_seed(5)
    moved = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in trained_tensors(network).items()
    }
    load_weights(network, moved)
    return found


def generated(family: str, recipe: Recipe, policy: LoadedPolicy) -> GroupData:
    """A group of two samples by the policy as it is."""
    source, prompt = None, Prompt(text=tiny_models.PROMPT)
    if family in tiny_models.EDITS:
        file = io.BytesIO()
        tiny_models.picture(SIDE, SIDE).save(file, "png")
        source = file.getvalue()
    generator = Generator(recipe, policy)
    task = examples.task(num_samples=recipe.batch.group_size, prompt=prompt, window_start=0)
    return GroupData(
        trajectories=(generator.generate(task, source).trajectory,),
        conditions=generator.conditions(prompt.text, source),
        advantages=(1.0, -0.5),
    )


def train(engine: TrainerEngine, group: GroupData) -> float:
    """Add up a batch of one group; return the error of its ratio."""
    engine.begin()
    engine.train(engine.read(group))
    return engine.tally["onpolicy_ratio_error"]


def base(policy: LoadedPolicy) -> dict[str, Tensor]:
    named = policy.model.transformer.named_parameters()
    return {name: each.detach().clone() for name, each in named if not each.requires_grad}


@pytest.mark.parametrize("form", ["int8", "nf4"])
@pytest.mark.parametrize("family", tiny_models.but_slow(["sd3"]))
def test_a_step_moves_the_adapter_to_the_same_bits_and_leaves_the_base_alone(
    family: str, form: Form, tmp_path: Path
) -> None:
    sized = {"model.width": SIDE, "sampling.window": 2}
    plain_recipe = override(recipe_of(family, tmp_path), sized)
    recipe = override(plain_recipe, {"model.weights": form})
    quantised, plain = load(recipe), load(plain_recipe)
    copy_base(quantised.model.transformer, plain.model.transformer)
    before, codes = trained_tensors(quantised.model.transformer), base(quantised)
    group = generated(family, recipe, quantised)
    engines = TrainerEngine(recipe, quantised), TrainerEngine(plain_recipe, plain)

    for engine in engines:
        assert train(engine, group) <= RATIO_ERROR
        engine.step(0)

    found, wanted = (trained_tensors(each.model.transformer) for each in (quantised, plain))
    assert found.keys() == wanted.keys() == before.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not any(torch.equal(found[name], before[name]) for name in before)
    after = base(quantised)
    assert after.keys() == codes.keys()
    assert all(torch.equal(after[name], codes[name]) for name in codes)
    assert train(engines[0], generated(family, recipe, quantised)) <= RATIO_ERROR
