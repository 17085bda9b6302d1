"""The plain loop that we compare with does the same work: the same samples, the same gradient."""

from pathlib import Path

import pytest
import torch

from digenrl.bench import loop
from shared.diffusion.lora import adapter_parameters, adapter_tensors, load_adapter
from shared.diffusion.policy import load_policy
from shared.diffusion.tensors import unpack_trajectory
from shared.recipe import load_recipe, override

RECIPE = override(
    load_recipe(Path(__file__).parents[2] / "recipes" / "digits.toml"),
    {
        "algorithm.kl_beta": 0.0, "batch.groups": 1, "batch.group_size": 4,
        "schedule.fragment_size": "auto", "schedule.tag": "auto", "trainer.micro_batch": "auto",
        "run.seed": 0,
    },
)  # fmt: skip


def test_both_train_the_same_gradient_of_the_same_path() -> None:
    torch.set_num_threads(1)
    loaded = load_policy(RECIPE, {"transformer", "text", "decoder"})
    generator = torch.Generator().manual_seed(0)
    tensors = adapter_tensors(loaded.model.transformer)
    moved = {n: 0.1 * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
    load_adapter(loaded.model.transformer, moved)
    plain = loop._Plain(RECIPE, loaded, "a handwritten three")
    ours = loop._Ours(RECIPE, loaded, "a handwritten three")
    data = ours.generate(0)
    path = unpack_trajectory(data.trajectories[0])
    assert plain.generate(0).latents.shape == path.latents.shape

    ours.train(data)
    parameters = adapter_parameters(loaded.model.transformer)
    found = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    seen: dict[str, torch.Tensor] = {}
    network = loaded.model.transformer

    def keep(set_to_none: bool = True) -> None:
        seen.update({n: p.grad.clone() for n, p in parameters.items() if p.grad is not None})

    network.zero_grad = keep  # type: ignore[method-assign]
    plain.train(path)
    assert found.keys() == seen.keys() and found
    for name, tensor in found.items():
        torch.testing.assert_close(seen[name], tensor, rtol=1e-4, atol=1e-8)


def test_a_comparison_has_every_round() -> None:
    found = loop.compare(RECIPE, rounds=2, groups=1)
    assert len(found.trainer) == len(found.plain_trainer) == 2
    assert min(found.rollout + found.plain_rollout + found.trainer + found.plain_trainer) > 0
    pairs = zip(found.trainer, found.plain_trainer, strict=True)
    assert found.trainer_ratio == pytest.approx(sum(a / b for a, b in pairs) / 2)
