"""The plain loop that we compare with does the same work: the same samples, the same gradient."""

from dataclasses import replace

import pytest
import torch

from bench import loop
from shared.diffusion.policy import load_policy
from shared.diffusion.sampling.tensors import unpack_trajectory
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.recipe.recipe import load_recipe, override
from tests.paths import DIGITS
from tests.shared.diffusion.shared_noise import move

RECIPE = override(
    load_recipe(DIGITS),
    {
        "algorithm.kl_beta": 0.0, "batch.groups": 1, "batch.group_size": 4,
        "schedule.fragment_size": "auto", "schedule.tag": "auto", "trainer.micro_batch": "auto",
        "run.seed": 0,
    },
)  # fmt: skip


def test_both_train_the_same_gradient_of_the_same_path() -> None:
    torch.set_num_threads(1)
    loaded = load_policy(RECIPE, {"transformer", "text", "decoder"})
    move(loaded, 0.1)
    plain = loop._Plain(RECIPE, loaded, "a handwritten three", rows=3)
    ours = loop.Ours(RECIPE, loaded, "a handwritten three")
    data = ours.generate(0)
    path = unpack_trajectory(data.trajectories[0])
    made = plain.generate(0)
    assert [len(part.latents) for part in made] == [3, 1]
    parts = [
        replace(path, latents=path.latents[part], log_probs=path.log_probs[part])
        for part in (slice(0, 3), slice(3, 4))
    ]

    ours.train(data)
    parameters = trained_parameters(loaded.model.transformer)
    found = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    seen: dict[str, torch.Tensor] = {}
    network = loaded.model.transformer

    def keep(set_to_none: bool = True) -> None:
        seen.update({n: p.grad.clone() for n, p in parameters.items() if p.grad is not None})

    network.zero_grad = keep  # type: ignore[method-assign]
    plain.train(parts)
    assert found.keys() == seen.keys() and found
    for name, tensor in found.items():
        torch.testing.assert_close(seen[name], tensor, rtol=1e-4, atol=1e-8)


@pytest.mark.slow
def test_a_comparison_has_every_round() -> None:
    first, found = loop.compare(RECIPE, rounds=2, groups=1, plain_rows=4)
    assert first.trainer == found.trainer[:1]
    assert len(found.trainer) == len(found.plain_trainer) == 2
    assert min(found.rollout + found.plain_rollout + found.trainer + found.plain_trainer) > 0
    pairs = zip(found.trainer, found.plain_trainer, strict=True)
    assert found.trainer_ratio == pytest.approx(sum(a / b for a, b in pairs) / 2)
